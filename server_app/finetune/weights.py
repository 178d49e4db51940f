"""What fine-tuning starts from: a finished run's model, or a foundation ViT's weights."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from datasets.io.atomic_files import load_state
from datasets.registry import data_set
from datasets.weights.backbones import backbone_digest, load_backbone
from datasets.weights.initial_weights import load_initial_weights
from datasets.weights.provenance import run_beside
from models.contract.errors import SettingError
from models.contract.settings import CommonSettings
from server_app.records.finished_site import finished_settings, opened
from server_app.records.run_directory import RunDirectory

SCRATCH = "scratch"
_ENCODER = ("encoder.", "prompts.")
_HEAD = "head."


@dataclass(frozen=True)
class Theta:
    """A finished run's model.

    Attributes:
        label: the run's name, with the site's where the model is a site's own.
        method: the run's method.
        common: its settings, the data where they lie now.
        arrays: by name, on the CPU.
        classes: the names of its classes, empty if they have none, and how many there are.
        whole: whether a ViT's backbone is among the arrays; else it is that of 'backbone-weights'.
    """

    label: str
    method: str
    common: CommonSettings
    arrays: Mapping[str, Tensor]
    classes: tuple[tuple[str, ...], int]
    whole: bool

    @property
    def network(self) -> str:
        """The run's network; 'auto' means conv, since only images are fine-tuned here."""
        return "conv" if self.common.network == "auto" else self.common.network


@dataclass(frozen=True)
class Given:
    """A ViT's weights as 'initial-weights' names them: a file, or a name of timm."""

    label: str
    named: str
    network: str = "vit"


@dataclass(frozen=True)
class Taken:
    """What a network took from given weights.

    Attributes:
        arrays: how many it took, of ``of`` that its encoder has.
        share: of the numbers in those, which share.
        left: arrays of the encoder that stayed as the seed drew them.
        head: whether the head is the run's.
        backbone: where a frozen backbone came from beside the run; empty: there is none.
    """

    arrays: int
    of: int
    share: float
    left: tuple[str, ...]
    head: bool = False
    backbone: str = ""

    def told(self) -> str:
        """Say it in a line."""
        share = f"{100 * self.share:.1f} % of its numbers"
        parts = [f"gives {self.arrays} of the encoder's {self.of} arrays, {share}"]
        if self.backbone:
            parts.append(f"a backbone from '{self.backbone}', as the run's")
        if self.head:
            parts.append("its head")
        if self.left:
            parts.append(f"left to the seed: {', '.join(self.left[:3])}")
        return "; ".join(parts)


def open_start(options: argparse.Namespace, weights: str) -> Theta | Given | None:
    """Return what ``--weights`` names, None for scratch.

    Raises:
        FedsiloError: it names nothing, or a run that has not ended or has no such model.
    """
    if weights == SCRATCH:
        return None
    path = Path(weights).expanduser()
    if path.is_dir():
        return open_theta(path, options)
    if weights.startswith("timm:"):
        return Given(weights, weights)
    if path.is_file() and path.name == "model.safetensors" and run_beside(path):
        return open_theta(path.parent, options)  # what a run has trained on is to be known
    if path.is_file():
        return Given(path.name, str(path.resolve()))
    raise SettingError(
        f"--weights is '{weights}', and there is no such run directory or file: name one, a ViT of "
        f"timm with 'timm:' before it, or '{SCRATCH}'"
    )


def open_theta(run_dir: Path, options: argparse.Namespace) -> Theta:
    """Return a finished run's model.

    With ``--from-site`` it is the model that this site was left with, for which its data must be
    here; else the one of model.safetensors, and nothing but the run directory is needed.

    Raises:
        FedsiloError: the run has not ended, or has no such model.
    """
    common = finished_settings(run_dir, options.data_dir).common
    silos = RunDirectory(run_dir).read_json("silos.json")
    first = next(iter(silos.values()))
    label = run_dir.resolve().name
    if "standardise" in data_set(common.dataset).settings:
        raise SettingError(f"{run_dir} is a run on a table, and fine-tuning is of images")
    if options.from_site:
        _, network = opened(run_dir, options.from_site, options.data_dir, options.state_dir)
        state = cast(nn.Module, network).state_dict()
        arrays = {name: array.cpu() for name, array in state.items()}
        label = f"{label}, {options.from_site}"
    else:
        arrays = _shared_arrays(run_dir, common)
        _refuse_other_backbone(run_dir, common, {one.get("backbone", "") for one in silos.values()})
    _refuse_no_encoder(run_dir, common, arrays)
    counts = next(iter(first["label_counts"].values()))
    whole = any(name.startswith("encoder.vit.") for name in arrays)
    classes = (tuple(first["classes"]), len(counts))
    return Theta(label, common.method, common, arrays, classes, whole)


def _shared_arrays(run_dir: Path, common: CommonSettings) -> dict[str, Tensor]:
    path = run_dir / "model.safetensors"
    if not path.is_file():
        raise SettingError(
            f"{run_dir}: method '{common.method}' has no shared model; name the site whose own is "
            "meant by --from-site"
        )
    arrays, _ = load_state(path)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _refuse_no_encoder(run_dir: Path, common: CommonSettings, arrays: Mapping[str, Any]) -> None:
    """Refuse a model without an encoder, and one that trained nothing but prompts of noise."""
    if not any(name.startswith(_ENCODER) for name in arrays):
        raise SettingError(
            f"{run_dir}: the model of method '{common.method}' holds no encoder "
            f"({', '.join(list(arrays)[:3])}, ...); name the site whose own is meant by --from-site"
        )
    whole = any(name.startswith("encoder.") for name in arrays)
    if not whole and common.backbone_weights == "random":
        raise SettingError(
            f"{run_dir}: its ViT is frozen and random, the run has trained no encoder: name a run "
            "with 'train-backbone', or with 'backbone-weights'"
        )


def _refuse_other_backbone(run_dir: Path, common: CommonSettings, digests: set[str]) -> None:
    """Refuse prompts that were trained beside another backbone than is here."""
    if common.network != "vit" or common.train_backbone or common.backbone_weights == "random":
        return
    if backbone_digest(common) not in digests:
        raise SettingError(
            f"the weights that 'backbone-weights' names ('{common.backbone_weights}') are not "
            f"those of the run in {run_dir}: bring those back"
        )


def take(
    trunk: nn.Module,
    source: Theta | Given,
    settings: CommonSettings,
    classes: tuple[tuple[str, ...], int],
) -> Taken:
    """Copy into ``trunk``, named as a run's network, what fits of the given weights.

    Raises:
        SettingError: nothing fits, or they are of another architecture.
    """
    if isinstance(source, Theta):
        return _take_theta(trunk, source, settings, classes)
    before = {name: tensor.clone() for name, tensor in _below(trunk).items()}
    load_initial_weights(trunk, dataclasses.replace(settings, initial_weights=source.named))
    now = _below(trunk)
    return _taken(now, [name for name in now if not torch.equal(now[name], before[name])])


def _below(trunk: nn.Module) -> dict[str, Tensor]:
    """Return the arrays of ``trunk`` but its head's."""
    state = trunk.state_dict()
    return {
        name: tensor
        for name, tensor in state.items()
        if tensor.is_floating_point() and not name.startswith(_HEAD)
    }


def _taken(below: Mapping[str, Tensor], names: Sequence[str], **more: Any) -> Taken:
    numbers = sum(below[name].numel() for name in names)
    share = numbers / sum(target.numel() for target in below.values())
    left = tuple(sorted(below.keys() - set(names)))
    return Taken(arrays=len(names), of=len(below), share=share, left=left, **more)


def _take_theta(
    trunk: nn.Module, theta: Theta, settings: CommonSettings, classes: tuple[tuple[str, ...], int]
) -> Taken:
    """Copy what fits of a run's model.

    A head is taken only whole and for the same ``classes``. Position embeddings of a ViT are
    resampled to the images' size.

    Raises:
        SettingError: nothing fits.
    """
    if not theta.whole and hasattr(trunk, "vit"):
        # Whether the weights have seen images of these silos is asked of the data used here
        here = dataclasses.replace(
            theta.common, dataset=settings.dataset, public_share=settings.public_share
        )
        load_backbone(trunk, here)
    below = _below(trunk)
    found = {
        name: array
        for name, target in below.items()
        if (array := _fitting(name, theta.arrays, target, trunk)) is not None
    }
    if not found:
        raise SettingError(
            f"none of the {len(theta.arrays)} arrays of {theta.label} (network '{theta.network}') "
            f"fits the network to be trained: leave 'width' and 'backbone-...' at the run's"
        )
    state = trunk.state_dict()
    head = _head(state, theta) if classes == theta.classes else {}
    with torch.no_grad():
        for name, array in {**found, **head}.items():
            state[name].copy_(array)
    given = {n for n in below if not theta.whole and n.startswith("encoder.vit.")}
    backbone = theta.common.backbone_weights if given else ""
    taken = _taken(below, list(found), head=bool(head), backbone=backbone)
    return dataclasses.replace(taken, left=tuple(n for n in taken.left if n not in given))


def _fitting(
    name: str, arrays: Mapping[str, Tensor], target: Tensor, trunk: nn.Module
) -> Tensor | None:
    """Return a run's array as ``target`` takes it, None if it does not fit."""
    array = arrays.get(name)
    if array is None or array.shape == target.shape:
        return array
    if name.endswith("pos_embed") and array.shape[-1] == target.shape[-1]:
        from timm.layers.pos_embed import resample_abs_pos_embed

        vit = cast(Any, trunk).vit
        grid = list(vit.patch_embed.grid_size)
        moved: Tensor = resample_abs_pos_embed(array, grid, num_prefix_tokens=vit.num_prefix_tokens)
        return moved
    return None


def _head(state: Mapping[str, Tensor], theta: Theta) -> dict[str, Tensor]:
    """Return the arrays of a run's head if all fit, else none."""
    wanted = {name: target for name, target in state.items() if name.startswith(_HEAD)}
    found = {name: theta.arrays[name] for name in wanted if name in theta.arrays}
    fits = all(name in found and found[name].shape == wanted[name].shape for name in wanted)
    return found if fits else {}
