"""The request of ``fedsilo finetune``, and its starting points: models of runs, other weights.

``FinetuneRequest.check`` refuses errors that can be found before anything is opened.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from fedsilo.datasets.io.state_files import load_state
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.weights.provenance import run_beside
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.kinds import image_network
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.run.arguments import refuse_below
from fedsilo.server_app.studies.finished_site import (
    finished_settings,
    open_site,
    refuse_other_backbone,
)

CLASSIFICATION, SEGMENTATION = "classification", "segmentation"
SCRATCH = "scratch"
_ENCODER = ("encoder.", "prompts.")

# The names of the classes, or empty if they have none, and how many there are
Classes: TypeAlias = tuple[tuple[str, ...], int]


@dataclass(frozen=True)
class FinetuneRequest:
    """One call of fine-tuning."""

    task: str  # classification or segmentation
    weights: Sequence[str]  # starting points: run directories, files, timm:NAME or scratch
    out: Path  # the folder to write; it must not exist
    dataset: str | None = None  # None: the first run's
    sites: Sequence[str] = ()  # the sites with the images to pool; empty for all sites
    network: str | None = None  # None: the first of the task that takes the weights
    epochs: int = 20
    seeds: int = 3  # how many, from 0
    changes: Sequence[str] = ()  # settings as key=value, over the run's or the default
    device: str | None = None  # auto, cpu, cuda or cuda:N, or None for auto
    data_dir: Path | None = None  # None: the run's
    from_site: str | None = None  # use this site's own model of a run, or None for the shared one
    state_dir: Path | None = None  # that site's private state, or None for the run's
    images: int = 4  # how many test images are painted
    # Passes in which a network without an array of a run's ViT learns its tokens, or 0 to refuse it
    distil_epochs: int = 0

    def check(self) -> None:
        """Raise a SettingError for what is out of range or could not be written."""
        for name in ("seeds", "epochs", "images"):
            refuse_below(1, name, getattr(self, name))
        if self.distil_epochs < 0:
            raise SettingError(
                f"--distil-epochs must be at least 0, but is {self.distil_epochs}: give 5, or "
                "remove it"
            )
        if twice := {weights for weights in self.weights if self.weights.count(weights) > 1}:
            raise SettingError(f"--weights names {', '.join(sorted(twice))} twice: name each once")
        if self.from_site and not any(Path(name).expanduser().is_dir() for name in self.weights):
            raise SettingError(
                "--from-site needs a run, but --weights names none: name a run directory"
            )
        refuse_target(self.out, "another --out")


def refuse_target(target: Path, instead: str) -> None:
    """Raise a SettingError if a target exists or its folder cannot be written.

    ``instead`` names the option by which the user can choose another target.
    """
    if target.exists():
        raise SettingError(f"{target} already exists: remove it, or give {instead}")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(target.parent, os.W_OK):
        raise SettingError(f"{target.parent} cannot be written to: give {instead}")


@dataclass(frozen=True)
class RunModel:
    """A finished run's model."""

    label: str  # the run's name, with the site's if the model is a site's own
    common: CommonSettings  # the run's, with this machine's data directory
    arrays: Mapping[str, Tensor]  # name -> array on the CPU
    classes: Classes
    has_backbone: bool  # a ViT's is among the arrays; else it is that of 'vit.backbone-weights'

    @property
    def network(self) -> str:
        """The run's network."""
        return image_network(self.common)


@dataclass(frozen=True)
class PretrainedWeights:
    """A ViT's or VGG16's weights, named as in 'train.initial-weights': a file, or timm's name."""

    label: str
    named: str
    network: str = "vit"


Source: TypeAlias = RunModel | PretrainedWeights


def open_start(weights: str, request: FinetuneRequest) -> Source | None:
    """Open the model or the weights that ``--weights`` names; None for scratch.

    Raises:
        FedsiloError: ``weights`` names nothing, or a run that has not ended or has no such model.
    """
    if weights == SCRATCH:
        return None
    path = Path(weights).expanduser()
    if path.is_dir():
        return open_run_model(path, request)
    if weights.startswith("timm:"):
        network = "vgg16-bn" if weights.startswith("timm:vgg16_bn") else "vit"
        return PretrainedWeights(weights, weights, network)
    if path.is_file() and path.name == "model.safetensors" and run_beside(path):
        return open_run_model(path.parent, request)  # we must know what the run has trained on
    if path.is_file():
        return PretrainedWeights(path.name, str(path.resolve()))
    raise SettingError(
        f"--weights is '{weights}', but no such run directory or file exists: name one, a ViT of "
        f"timm as timm:NAME, or '{SCRATCH}'"
    )


def open_run_model(run_dir: Path, request: FinetuneRequest) -> RunModel:
    """Return a finished run's model.

    Without ``--from-site`` it is that of model.safetensors, and the run directory is enough. With
    it, it is the model of this site after the run, and the site's data must be on this machine.

    Raises:
        FedsiloError: the run has not ended, or has no such model.
    """
    common = finished_settings(run_dir, request.data_dir).common
    sites = RunDirectory(run_dir).read_json("silos.json")
    if data_set(common.dataset).is_table:
        raise SettingError(
            f"{run_dir} is a run on a table, but fine-tuning needs images: name another run"
        )
    label = run_dir.resolve().name
    if request.from_site:
        label = f"{label}, {request.from_site}"
        network = open_site(run_dir, request.from_site, request.data_dir, request.state_dir)[1]
        state = cast(nn.Module, network).state_dict()
        arrays = {name: array.cpu() for name, array in state.items()}
    else:
        arrays = _shared_arrays(run_dir, common)
        frozen = common.network == "vit" and not common.train_backbone
        if frozen and common.backbone_weights != "random":  # prompts, trained for this backbone
            digests = {facts.get("backbone", "") for facts in sites.values()}
            refuse_other_backbone(run_dir, common, digests, "restore those")
    _refuse_no_encoder(run_dir, common, arrays)
    first_site = next(iter(sites.values()))
    label_counts = next(iter(first_site["label_counts"].values()), first_site["classes"])
    classes = (tuple(first_site["classes"]), len(label_counts))
    has_backbone = any(name.startswith("encoder.vit.") for name in arrays)
    return RunModel(label, common, arrays, classes, has_backbone)


def _shared_arrays(run_dir: Path, common: CommonSettings) -> dict[str, Tensor]:
    path = run_dir / "model.safetensors"
    if not path.is_file():
        raise SettingError(
            f"{run_dir}: method '{common.method}' has no shared model; choose a site's model by "
            "--from-site"
        )
    arrays, _ = load_state(path)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _refuse_no_encoder(run_dir: Path, common: CommonSettings, arrays: Mapping[str, Any]) -> None:
    """Refuse a model without an encoder, or with prompts trained for random weights only."""
    if not any(name.startswith(_ENCODER) for name in arrays):
        raise SettingError(
            f"{run_dir}: the model of method '{common.method}' holds no encoder "
            f"({', '.join(list(arrays)[:3])}, ...); choose a site's model by --from-site"
        )
    prompts_only = not any(name.startswith("encoder.") for name in arrays)
    if prompts_only and common.backbone_weights == "random":
        raise SettingError(
            f"{run_dir}: its ViT is frozen and random, so the run has trained no encoder: name a "
            "run with 'vit.train-backbone', or with 'vit.backbone-weights'"
        )
