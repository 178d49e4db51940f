"""Load the weights that 'train.initial-weights' names: a run's model, a ViT's or VGG16's.

A run's ``model.safetensors`` must fit the network array by array; with 'encoder:' before its name
only the encoder must fit, so that a data set with other classes can use it. VGG16 weights must have
all feature layers with batch norm. Weights of other ViTs (CLIP, SAM, LVM-Med) must have all arrays
of the blocks; any other array is taken if it fits, resampled by timm where possible, and otherwise
stays as the seed initialised it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fedsilo.core.errors import SettingError
from fedsilo.core.files.locations import find_places, weight_paths
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.weights.backbones import file_state, refuse_non_finite, timm_state
from fedsilo.datasets.weights.provenance import refuse_other_provenance, run_beside
from fedsilo.models.networks.encoders import VggEncoder
from fedsilo.models.networks.plugged import PluggedClassifier
from fedsilo.models.networks.published_weights import fill_vgg
from fedsilo.models.networks.site_network import exchanged_arrays, load_exchanged

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer

_TIMM = "timm:"
_ENCODER = "encoder:"
# SAM's own names, which LVM-Med's files have too, and timm's for the same arrays
_RENAMED = {"mlp.lin1.": "mlp.fc1.", "mlp.lin2.": "mlp.fc2."}
_PREFIXES = ("image_encoder.", "visual.", "encoder.vit.", "")


def load_initial_weights(network: nn.Module, settings: CommonSettings) -> None:
    """Load the weights that 'train.initial-weights' names into ``network``.

    If the setting is empty, nothing is loaded. Its other values are:

    - 'timm:MODEL' loads timm's published weights.
    - 'encoder:FILE' loads only the encoder from the file of a run's model.
    - 'FILE' loads a run's whole model if the file and the network share an array name. Otherwise
      the file must have published weights for VGG16, a ViT or a plugin's network.

    Raises:
        SettingError: the weights do not exist, cannot be read or do not fit the network, or they
            may have been trained on images that this run tests.
    """
    named = settings.initial_weights
    if not named:
        return
    if named.startswith(_TIMM):
        _fill(network, timm_state(named.removeprefix(_TIMM), "train.initial-weights"), named)
        return
    path = initial_file(settings)
    refuse_seen_start(settings)
    state = file_state(path, "train.initial-weights")
    if named.startswith(_ENCODER):
        _load(network, _only_encoder(network, state, path), path)
    elif state.keys() & exchanged_arrays(network).keys():
        _load(network, state, path)
    else:
        _fill(network, state, str(path))


def refuse_seen_start(settings: CommonSettings) -> None:
    """Check that this run's initial weights were not trained on the images that this run tests.

    Initial weights may come from an earlier run, which may itself have started from a run's
    weights. Each of these runs must have another data set, or the same settings that decide the
    test images. The ``config.toml`` next to a file of weights tells its run's settings. The search
    ends at a run without such a file, with timm's weights, or with a file that is missing or
    already checked.

    Raises:
        SettingError: a setting that decides the test images differs in an earlier run or is
            invalid, or the file of this run's initial weights is missing.
    """
    # Runs may name each other's files in a circle: a file that was seen already ends the search
    seen: set[Path] = set()
    run: CommonSettings | None = settings
    while run and run.initial_weights and not run.initial_weights.startswith(_TIMM):
        # Files of earlier runs may be gone, so only this run's own file must exist
        path = Path(_file_named(run))
        if run is settings:  # only its own file must exist, and may be in a folder of weights
            path = initial_file(run)
        if path in seen or not path.is_file():
            return
        seen.add(path)
        run = run_beside(path)
        if run:
            refuse_other_provenance(settings, run, f"the run of {path}")


def initial_file(settings: CommonSettings) -> Path:
    """Find the file that 'train.initial-weights' names, with or without 'encoder:' before it.

    A relative path is looked up in the folder ``backbones`` of the cache and then in the data
    directory.

    Raises:
        SettingError: no such file exists.
    """
    places = find_places(settings.data_dir, settings.cache_dir)
    tried = weight_paths(_file_named(settings), places)
    for path in tried:
        if path.is_file():
            return path
    raise SettingError(
        f"'train.initial-weights' is '{settings.initial_weights}', but there is no "
        f"{' or '.join(map(str, tried))}: give an absolute path (of a run: its model.safetensors), "
        "or a name of timm with 'timm:' before it"
    )


def _file_named(settings: CommonSettings) -> str:
    return settings.initial_weights.removeprefix(_ENCODER)


def _only_encoder(network: nn.Module, state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the arrays that sites exchange, but with the encoder's arrays taken from ``state``.

    The encoder's arrays are those whose names begin with 'encoder.'. All other arrays keep the
    values of ``network``, and other arrays of ``state`` are ignored. Shapes are not checked.
    ``path`` is the file of ``state``, for the error.

    Raises:
        SettingError: ``state`` lacks an array of the encoder, or the network has no encoder.
    """
    arrays: dict[str, Any] = dict(exchanged_arrays(network))
    wanted = [name for name in arrays if name.startswith("encoder.")]
    missing = []
    for name in wanted:
        if name in state:
            arrays[name] = state[name]
        else:
            missing.append(name)
    if missing or not wanted:
        first = f" ('{missing[0]}')" if missing else ""
        raise SettingError(
            f"'train.initial-weights': {path} lacks {len(missing)} of {len(wanted)} arrays of the "
            f"network's encoder{first}, but with 'encoder:' before it a file must be a run's "
            "model: name one of the same 'network.name' and 'network.width'"
        )
    return arrays


def _load(network: nn.Module, state: Mapping[str, Any], path: Path) -> None:
    """Load the arrays of a run's file into ``network``, as float32.

    The file must have exactly the exchanged arrays of ``network``, with the same names and shapes.

    Raises:
        SettingError: an array is missing, surplus, of another shape, or not finite.
    """
    arrays = {name: torch.as_tensor(array).float() for name, array in state.items()}
    refuse_non_finite(arrays, str(path), "train.initial-weights")
    try:
        load_exchanged(network, arrays)
    except SettingError as error:
        raise SettingError(
            f"'train.initial-weights': {path}: {error}; give the run the network, classes and "
            "image size of the run that wrote the file"
        ) from None


def _fill(network: nn.Module, state: Mapping[str, Any], where: str) -> None:
    """Load published weights into VGG16, a plugin's network or a ViT.

    VGG16 gets its convolutions. A plugin's network uses its own method ``fill``. Any other network
    must be a ViT.

    Args:
        network: the network, changed in place.
        state: array name -> array.
        where: the origin of the weights for errors.

    Raises:
        SettingError: the weights do not fit the network.
    """
    encoder = getattr(network, "encoder", None)
    if isinstance(encoder, VggEncoder):
        fill_vgg(encoder, state, where)
    elif isinstance(network, PluggedClassifier):
        network.fill(state, where)
    else:
        _fill_vit(network, state, where)


def _fill_vit(network: nn.Module, state: Mapping[str, Any], where: str) -> None:
    """Load published weights into a ViT whose backbone is trained.

    All arrays of the blocks must be in ``state``. Any other array is loaded if its name and shape
    fit, and otherwise keeps its values. ``where`` is the origin of the weights, for errors.

    Raises:
        SettingError: the network is not a ViT with a trained backbone, an array of a block is
            missing or has another shape, or an array is not finite.
    """
    if not any(name.startswith("encoder.vit.") for name in exchanged_arrays(network)):
        raise SettingError(
            f"'train.initial-weights': {where} has no arrays of this network: for weights of a "
            "ViT set 'network.name' to 'vit' and 'vit.train-backbone' to true (of a frozen ViT "
            "they are 'vit.backbone-weights'), for weights of VGG16 'network.name' to 'vgg16-bn' "
            "and 'network.width' to 128"
        )
    vit = cast("VisionTransformer", network.vit)
    wanted = vit.state_dict()
    # Around the blocks (a head, positions) what fits will do; of the blocks, below, all must fit
    fitting = {}
    for name, array in _rename_arrays(_resample(state, vit)).items():
        is_wanted = name in wanted and isinstance(array, Tensor)
        if is_wanted and array.shape == wanted[name].shape:
            fitting[name] = array.float()
    # A ViT that misses some of its pretrained blocks would be useless, but would train all the same
    blocks = [name for name in wanted if name.startswith("blocks.")]
    missing = [name for name in blocks if name not in fitting]
    if missing:
        raise SettingError(
            f"'train.initial-weights': {where} has another architecture than the run's ViT: "
            f"{len(missing)} of {len(blocks)} arrays of the blocks are not in it "
            f"({', '.join(missing[:3])}); set 'vit.backbone' and 'vit.backbone-...' to those of "
            "the weights, or name other weights"
        )
    refuse_non_finite(fitting, where, "train.initial-weights")
    vit.load_state_dict({**wanted, **fitting})


def _resample(state: Mapping[str, Any], vit: VisionTransformer) -> Mapping[str, Any]:
    """Let timm rename and resize the arrays of ``state``, so that they fit ``vit``.

    timm knows only some kinds of files. If it raises an error, ``state`` is returned unchanged.
    """
    from timm.models.vision_transformer import checkpoint_filter_fn

    try:
        resampled: Mapping[str, Any] = checkpoint_filter_fn(dict(state), vit)
    except Exception:  # it knows its own kinds of files only, and fails on others in any way
        return state
    return resampled


def _rename_arrays(state: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the arrays of published ViTs, such as SAM's or CLIP's, to timm's names.

    - Some files have a prefix such as 'image_encoder.' before 'blocks.'. The first prefix in
      ``_PREFIXES`` that stands before 'blocks.' in some name is removed from all names that begin
      with it.
    - SAM's names for the layers of an MLP become timm's (``_RENAMED``).

    Other names do not change.
    """
    prefix = _find_prefix(state)
    renamed = {}
    for name, array in state.items():
        short = name.removeprefix(prefix)
        for old, new in _RENAMED.items():
            short = short.replace(old, new)
        renamed[short] = array
    return renamed


def _find_prefix(names: Iterable[str]) -> str:
    """Return the first known prefix that precedes 'blocks.' in some name, or '' if none does."""
    for prefix in _PREFIXES:
        if any(name.startswith(f"{prefix}blocks.") for name in names):
            return prefix
    return ""
