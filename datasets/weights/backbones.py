"""Weights at rest: found, checked, and put into a network; a ViT's are never silently random."""

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
    """Return the file that ``backbone-weights`` names; None where it names none.

    Raises:
        SettingError: there is no such file, or the setting is empty.
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
    """Return a digest of the backbone's weights, which all sites of a run must share.

    It is empty if the network starts from the seed.
    """
    given = settings.network == "resnet22" and settings.backbone_weights
    if settings.network != "vit" and not given:
        return ""
    path = weights_file(settings)
    if path is None:
        return f"{settings.backbone}, {_origin(settings)}"
    return file_sha256(path)


def _origin(settings: CommonSettings) -> str:
    """Return where weights without a file of ours come from."""
    if settings.backbone_weights == "random":
        return "random"
    import timm

    published = timm.get_pretrained_cfg(settings.backbone)
    place = published.hf_hub_id if published else "unknown"
    return f"timm {timm.__version__}, {place}"


def load_backbone(network: nn.Module, settings: CommonSettings) -> None:
    """Fill the backbone of a prompted ViT, or a ResNet-22 if weights are named; no other network.

    Raises:
        SettingError: the weights are missing, unreadable or of another architecture.
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
    """Refuse weights of ``fedsilo pretrain`` that have seen images of this run's silos.

    Raises:
        SettingError: the run's public part is smaller than theirs, or the file was altered.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            ours = "fedsilo" in (file.metadata() or {})
    except (SafetensorError, OSError, ValueError):
        return  # no file of ours; if it is none at all, its reader reports that
    if not ours:
        return
    try:
        _, facts = load_state(path)
    except CheckpointError as error:
        raise SettingError(f"'vit.backbone-weights': {error}") from None
    dataset, share, _ = facts["data"]
    if dataset == settings.dataset and settings.public_share < share:
        raise SettingError(
            f"'vit.backbone-weights': {path} was trained on a public part of {share:g} of "
            f"'{dataset}', but 'split.public-share' is {settings.public_share:g}, so that the "
            "sites would hold images that it has seen; set 'split.public-share' to the same"
        )


def file_state(path: Path, key: str = "vit.backbone-weights") -> dict[str, Any]:
    """Return the arrays in a safetensors file or a PyTorch state dict; no code in it is run.

    Raises:
        SettingError: it is neither; ``key`` is the setting that named it.
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
    """Return timm's pretrained weights of the model ``name``, from its hub or the cache.

    Raises:
        SettingError: they cannot be had; ``key`` is the setting that named them.
    """
    import timm

    try:
        # The head is kept. Without a head timm accepts a file that lacks arrays, which stay random
        # then
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # no network, no such weights, no such name
        raise SettingError(
            f"cannot download timm's weights for '{name}' ({reason_of(error)}): check the network, "
            f"or name a file in '{key}'"
        ) from None
    state: dict[str, Tensor] = model.state_dict()
    return state


def _sum_colours(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Let a patch embedding of colour images take grey ones, the same in all three channels."""
    name = "patch_embed.proj.weight"
    if given[name].ndim == 4 and given[name].shape[1] == 3 and wanted[name][1] == 1:
        given[name] = given[name].sum(dim=1, keepdim=True)


def _fill(vit: VisionTransformer, state: dict[str, Any], where: str) -> None:
    """Put weights into ``vit``, with position and patch embeddings resampled to its sizes."""
    from timm.models.vision_transformer import checkpoint_filter_fn

    wanted = {name: tensor.shape for name, tensor in vit.state_dict().items()}
    try:
        given = checkpoint_filter_fn(state, vit)
    except Exception as error:  # resampling fails on what is no ViT's
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
    """Say which ``given`` arrays differ from the ``wanted`` shapes; empty if none does.

    A patch embedding of colour images is made one of grey images first, if grey ones are wanted.
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
    """Put ``arrays`` into ``vit``; what is trained stays so."""
    values = {name: torch.as_tensor(array).float().contiguous() for name, array in arrays.items()}
    refuse_non_finite(values, where, "vit.backbone-weights")
    trained = {name: parameter.requires_grad for name, parameter in vit.named_parameters()}
    vit.load_state_dict(values, assign=True)
    for name, parameter in vit.named_parameters():
        parameter.requires_grad_(trained[name])


def refuse_non_finite(arrays: Mapping[str, Tensor], where: str, key: str) -> None:
    """Refuse arrays with NaN or infinity, by a ``SettingError`` about the setting ``key``."""
    for name, array in arrays.items():
        if not array.isfinite().all():
            raise SettingError(
                f"'{key}': '{name}' in {where} is not finite, as in a run that diverged: name "
                "other weights"
            )
