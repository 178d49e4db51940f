"""What fine-tuning starts from: a finished run's model, or a foundation ViT's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from fedsilo.datasets.io.state_files import load_state
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.weights.backbones import backbone_digest
from fedsilo.datasets.weights.provenance import run_beside
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.kinds import image_network
from fedsilo.server_app.records.finished_site import finished_settings, opened
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.studies.finetune.request import FinetuneRequest

SCRATCH = "scratch"
_ENCODER = ("encoder.", "prompts.")

# The names of the classes, empty if they have none, and how many there are
Classes: TypeAlias = tuple[tuple[str, ...], int]


@dataclass(frozen=True)
class RunModel:
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
    classes: Classes
    whole: bool

    @property
    def network(self) -> str:
        """The run's network; only images are fine-tuned here."""
        return image_network(self.common)


@dataclass(frozen=True)
class PretrainedWeights:
    """A ViT's or VGG16's weights as 'initial-weights' names them: a file, or a name of timm."""

    label: str
    named: str
    network: str = "vit"


Source: TypeAlias = RunModel | PretrainedWeights


def open_start(weights: str, request: FinetuneRequest) -> Source | None:
    """Return what ``--weights`` names, None for scratch.

    Raises:
        FedsiloError: it names nothing, or a run that has not ended or has no such model.
    """
    if weights == SCRATCH:
        return None
    path = Path(weights).expanduser()
    if path.is_dir():
        return open_run_model(path, request)
    if weights.startswith("timm:"):
        vgg = weights.startswith("timm:vgg16_bn")
        return PretrainedWeights(weights, weights, "vgg16-bn" if vgg else "vit")
    if path.is_file() and path.name == "model.safetensors" and run_beside(path):
        return open_run_model(path.parent, request)  # what a run has trained on is to be known
    if path.is_file():
        return PretrainedWeights(path.name, str(path.resolve()))
    raise SettingError(
        f"--weights is '{weights}', and there is no such run directory or file: name one, a ViT of "
        f"timm with 'timm:' before it, or '{SCRATCH}'"
    )


def open_run_model(run_dir: Path, request: FinetuneRequest) -> RunModel:
    """Return a finished run's model.

    With ``--from-site`` it is the model that this site was left with, for which its data must be
    here; else the one of model.safetensors, and nothing but the run directory is needed.

    Raises:
        FedsiloError: the run has not ended, or has no such model.
    """
    common = finished_settings(run_dir, request.data_dir).common
    sites = RunDirectory(run_dir).read_json("silos.json")
    if data_set(common.dataset).is_table:
        raise SettingError(f"{run_dir} is a run on a table, and fine-tuning is of images")
    label = run_dir.resolve().name
    if request.from_site:
        arrays = _site_arrays(run_dir, request.from_site, request)
        label = f"{label}, {request.from_site}"
    else:
        arrays = _shared_arrays(run_dir, common)
        _refuse_other_backbone(
            run_dir, common, {facts.get("backbone", "") for facts in sites.values()}
        )
    _refuse_no_encoder(run_dir, common, arrays)
    first_site = next(iter(sites.values()))
    label_counts = next(iter(first_site["label_counts"].values()))
    return RunModel(
        label=label,
        method=common.method,
        common=common,
        arrays=arrays,
        classes=(tuple(first_site["classes"]), len(label_counts)),
        whole=any(name.startswith("encoder.vit.") for name in arrays),
    )


def _site_arrays(run_dir: Path, site: str, request: FinetuneRequest) -> dict[str, Tensor]:
    _, network = opened(run_dir, site, request.data_dir, request.state_dir)
    state = cast(nn.Module, network).state_dict()
    return {name: array.cpu() for name, array in state.items()}


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
