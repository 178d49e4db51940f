"""Find pretrained backbone weights, check them, and load them into a ViT or ResNet-22.

A ViT never falls back to random weights silently: 'random' must be set.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedsilo.core.errors import CheckpointError, DataError, SettingError
from fedsilo.core.files.locations import find_places, weight_paths
from fedsilo.core.files.sealed_folders import file_sha256
from fedsilo.core.files.state_files import load_state
from fedsilo.core.files.unpacked_size import check_members, check_unpacked
from fedsilo.core.one_line import reason_of
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.networks.published_weights import fill_published_head, fill_resnet22

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer


def weights_file(settings: CommonSettings) -> Path | None:
    """Find the file of network weights that 'vit.backbone-weights' names.

    A relative path is looked up in the folder ``backbones`` of the cache and then in the data
    directory.

    Returns:
        The file's path, or None for 'timm' and 'random', which need no file.

    Raises:
        SettingError: the setting is empty, or no such file exists.
    """
    named = settings.backbone_weights
    if not named:
        raise SettingError(
            "network 'vit' needs weights for its backbone: set 'vit.backbone-weights' to a file "
            "(safetensors or a PyTorch state dict), to 'timm' to take those of the name in "
            "'vit.backbone', or, to go without any, to 'random'; 'fedsilo pretrain' makes a file"
        )
    if named in ("timm", "random"):
        return None
    tried = weight_paths(named, find_places(settings.data_dir, settings.cache_dir))
    for path in tried:
        if path.is_file():
            return path
    raise SettingError(
        f"'vit.backbone-weights' is '{named}', but there is no "
        f"{' or '.join(map(str, tried))}: give an absolute path, put the file there, or make it "
        "with 'fedsilo pretrain'"
    )


def backbone_digest(settings: CommonSettings) -> str:
    """Return a text that identifies the backbone's weights, which all sites of a run must share.

    Returns:
        One of these texts:

        - The SHA-256 of the weights file, if there is one.
        - The model's name and the origin of its weights, such as 'MODEL, random', for weights that
          are timm's or random.
        - '' for networks without a backbone, and for a ResNet-22 without backbone weights.

    Raises:
        SettingError: the weights file is missing, or 'vit.backbone-weights' is empty for a ViT.
    """
    # A ViT always has a backbone to name; a ResNet-22 has one only if weights are given
    given = settings.network == "resnet22" and settings.backbone_weights
    if settings.network != "vit" and not given:
        return ""
    path = weights_file(settings)
    if path is None:
        return f"{settings.backbone}, {_origin(settings)}"
    return file_sha256(path)


def _origin(settings: CommonSettings) -> str:
    """Describe the origin of a backbone's weights that are not from a file.

    The text is 'random' or 'timm VERSION, REPOSITORY', with a repository on the Hugging Face Hub.
    The repository is 'unknown' if timm publishes no weights for the backbone.
    """
    if settings.backbone_weights == "random":
        return "random"
    import timm

    published = timm.get_pretrained_cfg(settings.backbone)
    place = published.hf_hub_id if published else "unknown"
    return f"timm {timm.__version__}, {place}"


def load_backbone(network: nn.Module, settings: CommonSettings) -> None:
    """Load the weights that 'vit.backbone-weights' names into a ViT or a ResNet-22.

    Other networks, a ViT with 'random', and a ResNet-22 without named weights are not changed. If
    ``settings.classifier`` is 'published', a ResNet-22 also gets the classifier from the file.

    Raises:
        SettingError: in one of these cases:

            - The weights are missing, unreadable, not finite or of another architecture.
            - A ViT's weights were trained on images in this run's silos.
            - The weights of a ResNet-22 are set to 'timm' or 'random', which are not files.
    """
    if settings.network == "resnet22" and settings.backbone_weights:
        path = weights_file(settings)
        if path is None:
            raise SettingError(
                f"'vit.backbone-weights' is '{settings.backbone_weights}', but weights of "
                "'resnet22' come from a file: name one, or leave it empty to start from the seed"
            )
        content = file_state(path)
        fill_resnet22(network.get_submodule("encoder"), content, str(path))
        if settings.classifier == "published":
            fill_published_head(network.get_submodule("head"), content, str(path))
        return
    if not hasattr(network, "vit") or settings.backbone_weights == "random":
        return
    path = weights_file(settings)
    vit = cast("VisionTransformer", network.vit)
    if path is None:
        state = timm_state(settings.backbone)
        where = f"timm's weights of '{settings.backbone}'"
    else:
        refuse_seen_images(path, settings)
        state, where = file_state(path), str(path)
    _fill(vit, state, where)


def refuse_seen_images(path: Path, settings: CommonSettings) -> None:
    """Check that backbone weights were not pretrained on images in this run's silos.

    ``fedsilo pretrain`` trains on a public share of a data set's images, and notes the share in its
    file. No silo gets public images. The check passes in these cases:

    - The run's 'split.public-share' is at least the noted share.
    - The run uses another data set.
    - The file cannot be read, or is not from ``fedsilo pretrain``.

    Raises:
        SettingError: the run has the same data set but a smaller public share, or a file of
            ``fedsilo pretrain`` was altered.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            # Only 'fedsilo pretrain' writes this entry into the metadata of a file
            ours = "fedsilo" in (file.metadata() or {})
    except (SafetensorError, OSError, ValueError):
        return  # no file of ours; if it is none at all, its reader reports that
    if not ours:
        return
    try:
        _, facts = load_state(path)
    except CheckpointError as error:
        raise SettingError(f"'vit.backbone-weights': {error}") from None
    # A larger public part contains every smaller one, so sizes are all that must be compared
    dataset, share, _ = facts["data"]
    if dataset == settings.dataset and settings.public_share < share:
        raise SettingError(
            f"'vit.backbone-weights': {path} was trained on a public part of {share:g} of "
            f"'{dataset}', but 'split.public-share' is {settings.public_share:g}, so the sites "
            "would have images that it has seen; set 'split.public-share' to the same"
        )


def file_state(path: Path, key: str = "vit.backbone-weights") -> dict[str, Any]:
    """Read the tensors in a safetensors file or a PyTorch state dict without executing code in it.

    Args:
        path: the file.
        key: the setting that named the file, for errors.

    Returns:
        Name -> tensor.

    Raises:
        SettingError: the file is missing, damaged, in neither of the two formats, or larger than
            fedsilo's limit for unpacked files, by default 1 GiB.
    """
    from timm.models import load_state_dict

    try:
        check_unpacked(path, path.stat().st_size)
        if zipfile.is_zipfile(path):  # PyTorch's own form, which it does not pack
            with zipfile.ZipFile(path) as archive:
                check_members(path, archive.infolist())
        state: dict[str, Any] = load_state_dict(str(path), weights_only=True)  # runs no code
        # An array may repeat one stored number over any shape, and is written out when it is used
        size = 0
        for array in state.values():
            size += getattr(array, "nbytes", 0)
        check_unpacked(path, size)
    except DataError as error:
        raise SettingError(f"'{key}': {error}") from None
    except Exception as error:  # a damaged file fails in any way
        raise SettingError(
            f"'{key}': {path} is truncated or not a weights file ({reason_of(error)}): name "
            "another file"
        ) from None
    return state


def timm_state(name: str, key: str = "vit.backbone-weights") -> dict[str, Tensor]:
    """Load a pretrained model's weights, including its classifier, by its name in timm.

    They are downloaded unless they are in timm's local cache.

    Args:
        name: timm's name for the model.
        key: the setting that named the model, for errors.

    Returns:
        Array name -> tensor.

    Raises:
        SettingError: the weights cannot be downloaded, or timm has no such model.
    """
    import timm

    try:
        # The head is kept, because without one timm accepts files that lack arrays, and those
        # arrays would silently stay random
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # no network, unknown weights or an unknown name
        raise SettingError(
            f"cannot download timm's weights for '{name}' ({reason_of(error)}): check the network, "
            f"or name a file in '{key}'"
        ) from None
    state: dict[str, Tensor] = model.state_dict()
    return state


def _sum_colours(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Sum the colours in a ViT's patch embedding in ``given``, so that it can read grey images.

    If ``wanted`` has one channel there and ``given`` three, the three are replaced by their sum, in
    place. A grey image then gives the same patches as a colour image with three equal channels.

    Args:
        given: array name -> array.
        wanted: array name -> shape.
    """
    name = "patch_embed.proj.weight"
    if given[name].ndim == 4 and given[name].shape[1] == 3 and wanted[name][1] == 1:
        given[name] = given[name].sum(dim=1, keepdim=True)


def _fill(vit: VisionTransformer, state: dict[str, Any], where: str) -> None:
    """Load pretrained weights into a ViT, after checking that they fit.

    First timm's ``checkpoint_filter_fn`` converts the names, and resamples the position and patch
    embeddings to the sizes of ``vit``. The arrays are loaded as float32. If an error is raised,
    ``vit`` is unchanged.

    Args:
        vit: the network. Its arrays are replaced, and its parameters stay frozen or trainable.
        state: array name -> array, of a ViT with the same width and depth. Arrays of a head are
            ignored.
        where: the origin of the weights for errors.

    Raises:
        SettingError: timm cannot convert the weights, or an array is missing, surplus, of another
            shape or not finite.
    """
    from timm.models.vision_transformer import checkpoint_filter_fn

    wanted = {name: tensor.shape for name, tensor in vit.state_dict().items()}
    try:
        given = checkpoint_filter_fn(state, vit)
    except Exception as error:  # resampling fails on weights that are not a ViT's
        given = {}
        fault = type(error).__name__
    else:
        fault = _architecture_fault(given, wanted)
    if fault:
        raise SettingError(
            f"'vit.backbone-weights': {where} is of another architecture than the run's ViT: "
            f"{fault}; set 'vit.backbone' and 'vit.backbone-...' to those of the weights, or name "
            "other weights"
        )
    _assign(vit, {name: given[name] for name in wanted}, where)


def _architecture_fault(given: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Describe for an error why weights do not fit the run's ViT, or return '' if they fit.

    If arrays are missing or surplus, the text has the number of each and up to three names. Surplus
    arrays whose names begin with 'head' are allowed. Otherwise the text describes the first array
    with another shape. If the run's images are grey, the colours in ``given`` are first summed in
    place.

    Args:
        given: array name -> array of the weights.
        wanted: array name -> shape in the run's ViT.
    """
    missing = sorted(wanted.keys() - given.keys())
    surplus = sorted(given.keys() - wanted.keys())
    # A head classifies into the classes of other data: it is left out
    surplus = [name for name in surplus if not name.startswith("head")]
    if missing or surplus:
        return (
            f"{len(missing)} arrays are missing ({', '.join(missing[:3])}), {len(surplus)} too "
            f"many ({', '.join(surplus[:3])})"
        )
    _sum_colours(given, wanted)
    for name, shape in wanted.items():
        if given[name].shape != shape:
            return f"'{name}' is {tuple(given[name].shape)}, not {tuple(shape)}"
    return ""


def _assign(vit: VisionTransformer, arrays: dict[str, Any], where: str) -> None:
    """Set all arrays of ``vit`` to ``arrays`` as float32, by name.

    ``arrays`` must have exactly the names of ``vit``. The parameters keep ``requires_grad``.
    ``where`` is the origin of the arrays, for errors.

    Raises:
        SettingError: an array has NaN or infinity.
    """
    values = {name: torch.as_tensor(array).float().contiguous() for name, array in arrays.items()}
    refuse_non_finite(values, where, "vit.backbone-weights")
    trained = {name: parameter.requires_grad for name, parameter in vit.named_parameters()}
    # 'assign' replaces the parameters instead of copying into them, which saves the memory of a
    # copy. So a frozen backbone must be frozen again
    vit.load_state_dict(values, assign=True)
    for name, parameter in vit.named_parameters():
        parameter.requires_grad_(trained[name])


def refuse_non_finite(arrays: Mapping[str, Tensor], where: str, key: str) -> None:
    """Check that all arrays of a weights file are finite, before they are loaded into a network.

    Args:
        arrays: array name -> array.
        where: the origin of the arrays, for the error.
        key: the setting that named the weights, for the error.

    Raises:
        SettingError: an array has NaN or infinity. The error names the array.
    """
    for name, array in arrays.items():
        if not array.isfinite().all():
            raise SettingError(
                f"'{key}': '{name}' in {where} is not finite, as in a run that diverged: name "
                "other weights"
            )
