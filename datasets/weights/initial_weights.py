"""Load a run's initial weights, unless the seed makes them: a run's model, a ViT or VGG16.

A file of exchanged arrays, as a run writes ``model.safetensors``, must fit the network array by
array, unless only its encoder is wanted, which classes of another data set leave as it is; so
must the features of VGG16 with batch norm. For another ViT's weights (CLIP, SAM, LVM-Med) all
arrays of the blocks are needed; of the rest what fits is taken, resampled where timm can, and what
does not stays as the seed has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fedsilo.core.errors import SettingError
from fedsilo.core.files.locations import find_places, weight_paths
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.weights.backbones import file_state, timm_state
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
    """Put the weights that 'train.initial-weights' names into ``network``, if it names any.

    Raises:
        SettingError: there are no such weights, or they are not of this network.
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
    """Refuse weights of a run that was cut otherwise: it may have trained on what is tested here.

    What that run started from itself is followed too, as far as its files are there.

    Raises:
        SettingError: names the setting that differs, or a file that is missing.
    """
    seen: set[Path] = set()
    run: CommonSettings | None = settings
    while run and run.initial_weights and not run.initial_weights.startswith(_TIMM):
        path = initial_file(run) if run is settings else Path(_file_named(run))
        if path in seen or not path.is_file():
            return
        seen.add(path)
        run = run_beside(path)
        if run:
            refuse_other_provenance(settings, run, f"the run of {path}")


def initial_file(settings: CommonSettings) -> Path:
    """Return the file that 'train.initial-weights' names; a ``SettingError`` if there is none."""
    places = find_places(settings.data_dir, settings.cache_dir)
    tried = weight_paths(_file_named(settings), places)
    if found := next(filter(Path.is_file, tried), None):
        return found
    raise SettingError(
        f"setting 'train.initial-weights' is '{settings.initial_weights}', and there is no "
        f"{' or '.join(map(str, tried))}: give an absolute path (of a run: its model.safetensors), "
        "or a name of timm with 'timm:' before it"
    )


def _file_named(settings: CommonSettings) -> str:
    return settings.initial_weights.removeprefix(_ENCODER)


def _only_encoder(network: nn.Module, state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the network's own arrays, those of its encoder from ``state``.

    Raises:
        SettingError: an array of the encoder is not in it.
    """
    own = exchanged_arrays(network)
    wanted = [name for name in own if name.startswith("encoder.")]
    missing = [name for name in wanted if name not in state]
    if missing or not wanted:
        first = f" ('{missing[0]}')" if missing else ""
        raise SettingError(
            f"setting 'train.initial-weights': {path} lacks {len(missing)} of {len(wanted)} arrays "
            f"of the network's encoder{first}: with 'encoder:' before it a file must be a run's "
            "model of the same 'network.name' and 'network.width'"
        )
    return {**own, **{name: state[name] for name in wanted}}


def _load(network: nn.Module, state: Mapping[str, Any], path: Path) -> None:
    arrays = {name: torch.as_tensor(array).float() for name, array in state.items()}
    if broken := [name for name, array in arrays.items() if not array.isfinite().all()]:
        raise SettingError(
            f"setting 'train.initial-weights': '{broken[0]}' in {path} is not finite: it is of a "
            "run that diverged"
        )
    try:
        load_exchanged(network, arrays)
    except SettingError as error:
        raise SettingError(
            f"setting 'train.initial-weights': {path}: {error}; give the run the network, classes "
            "and image size of the one that wrote it"
        ) from None


def _fill(network: nn.Module, state: Mapping[str, Any], where: str) -> None:
    """Put pretrained weights of a published network into ``network``."""
    encoder = getattr(network, "encoder", None)
    if isinstance(encoder, VggEncoder):
        fill_vgg(encoder, state, where)
    elif isinstance(network, PluggedClassifier):
        network.fill(state, where)
    else:
        _fill_vit(network, state, where)


def _fill_vit(network: nn.Module, state: Mapping[str, Any], where: str) -> None:
    """Take what fits of another ViT's weights."""
    if not any(name.startswith("encoder.vit.") for name in exchanged_arrays(network)):
        raise SettingError(
            f"setting 'train.initial-weights': {where} holds no arrays of this network; weights of "
            "a ViT need 'network.name' 'vit' and 'vit.train-backbone' true (of a frozen one they "
            "are 'vit.backbone-weights'), those of VGG16 'network.name' 'vgg16-bn' and "
            "'network.width' 128"
        )
    vit = cast("VisionTransformer", network.vit)
    wanted = vit.state_dict()
    given = _rename_arrays(_resample(state, vit))
    # Around the blocks (a head, positions) what fits will do; of the blocks, below, all must fit
    fitting = {
        name: torch.as_tensor(array).float()
        for name, array in given.items()
        if name in wanted and isinstance(array, Tensor) and array.shape == wanted[name].shape
    }
    blocks = [name for name in wanted if name.startswith("blocks.")]
    if missing := [name for name in blocks if name not in fitting]:
        raise SettingError(
            f"setting 'train.initial-weights': {where} has another architecture than the run's "
            f"ViT: {len(missing)} of {len(blocks)} arrays of the blocks are not in it "
            f"({', '.join(missing[:3])}); set 'vit.backbone' and 'vit.backbone-...' to those of "
            "the weights, or name other weights"
        )
    if broken := [name for name, array in fitting.items() if not array.isfinite().all()]:
        raise SettingError(
            f"setting 'train.initial-weights': '{broken[0]}' in {where} is not finite"
        )
    vit.load_state_dict({**wanted, **fitting})


def _resample(state: Mapping[str, Any], vit: VisionTransformer) -> Mapping[str, Any]:
    """Convert weights for ``vit`` as timm does; return them unchanged if timm cannot."""
    from timm.models.vision_transformer import checkpoint_filter_fn

    try:
        resampled: Mapping[str, Any] = checkpoint_filter_fn(dict(state), vit)
    except Exception:  # it knows its own kinds of files only, and fails on others in any way
        return state
    return resampled


def _rename_arrays(state: Mapping[str, Any]) -> dict[str, Any]:
    """Rename arrays to timm's names, and drop a prefix that all blocks have."""
    prefix = next(
        (p for p in _PREFIXES if any(name.startswith(f"{p}blocks.") for name in state)), ""
    )
    renamed = {}
    for name, array in state.items():
        short = name.removeprefix(prefix)
        for old, new in _RENAMED.items():
            short = short.replace(old, new)
        renamed[short] = array
    return renamed
