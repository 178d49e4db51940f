"""The starting points of ``fedsilo finetune``: models of finished runs, and other weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from fedsilo.core.errors import SettingError
from fedsilo.core.files.state_files import load_state
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.weights.provenance import run_beside
from fedsilo.models.networks.kinds import image_network
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.runs.trained_site import refuse_other_backbone

CLASSIFICATION, SEGMENTATION = "classification", "segmentation"
SCRATCH = "scratch"
_ENCODER = ("encoder.", "prompts.")

# The names of the classes, empty if they have none, and the number of classes
Classes: TypeAlias = tuple[tuple[str, ...], int]


def check_starts(weights: Sequence[str], from_site: str | None) -> None:
    """Check the names of the starting points before any of them is opened.

    Raises:
        SettingError: a starting point is named twice, or ``from_site`` is given without a run.
    """
    for name in weights:
        if weights.count(name) > 1:
            raise SettingError(f"--weights names {name} twice: name each once")
    if from_site and not any(Path(name).expanduser().is_dir() for name in weights):
        raise SettingError(
            "--from-site needs a run, but --weights names none: name a run directory"
        )


@dataclass(frozen=True)
class RunModel:
    """A finished run's model."""

    label: str  # the run's name, with the site's if the model is a site's own
    common: CommonSettings  # the run's, with this machine's data directory
    arrays: Mapping[str, Tensor]  # name -> array on the CPU
    classes: Classes
    # Whether a ViT's backbone is among the arrays; if not, 'vit.backbone-weights' names it
    has_backbone: bool

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


@dataclass(frozen=True)
class Starts:
    """The starting points, in the user's order; None for a start from the seed's weights."""

    named: Sequence[Source | None]

    @property
    def sources(self) -> list[Source]:
        """The starts with weights."""
        return [source for source in self.named if source is not None]

    @property
    def run_models(self) -> list[RunModel]:
        """The starts from a run."""
        return [source for source in self.named if isinstance(source, RunModel)]


def open_starts(
    weights: Sequence[str], data_dir: Path | None, from_site: str | None, state_dir: Path | None
) -> Starts:
    """Open all that ``--weights`` names; arguments and errors are those of ``open_start``.

    Raises:
        SettingError: two starts have the same label, so that their rows would look alike.
    """
    starts = Starts([open_start(name, data_dir, from_site, state_dir) for name in weights])
    labels = [source.label for source in starts.sources]
    for label in sorted(labels):
        if labels.count(label) > 1:
            raise SettingError(
                f"two of --weights are named '{label}', so their rows would look alike: rename one "
                "of the folders"
            )
    return starts


def open_start(
    weights: str, data_dir: Path | None, from_site: str | None, state_dir: Path | None
) -> Source | None:
    """Open the model or the weights that ``--weights`` names; None for scratch.

    ``data_dir``, ``from_site`` and ``state_dir`` are for a run, see ``open_run_model``.

    Raises:
        FedsiloError: ``weights`` names nothing, or a run that has not ended or has no such model.
    """
    if weights == SCRATCH:
        return None
    path = Path(weights).expanduser()
    if path.is_dir():
        return open_run_model(path, data_dir, from_site, state_dir)
    if weights.startswith("timm:vgg16_bn"):
        return PretrainedWeights(weights, weights, "vgg16-bn")
    if weights.startswith("timm:"):
        return PretrainedWeights(weights, weights)
    if path.is_file() and path.name == "model.safetensors" and run_beside(path):
        # Its run's settings name the images on which these weights were trained
        return open_run_model(path.parent, data_dir, from_site, state_dir)
    if path.is_file():
        return PretrainedWeights(path.name, str(path.resolve()))
    raise SettingError(
        f"--weights is '{weights}', but no such run directory or file exists: name one, a ViT of "
        f"timm as timm:NAME, or '{SCRATCH}'"
    )


def open_run_model(
    run_dir: Path, data_dir: Path | None, from_site: str | None, state_dir: Path | None
) -> RunModel:
    """Open a finished run's model.

    Args:
        run_dir: the run directory.
        data_dir: the data directory; None for the run's.
        from_site: the site whose own model is opened; its data must be on this machine. None for
            the shared model in model.safetensors, which needs no data.
        state_dir: the folder of the site's private state; None for the one in the run directory.

    Raises:
        FedsiloError: the run has not ended, or has no such model.
    """
    run = FinishedRun.open(run_dir)
    common = run.local_settings(data_dir).common
    if data_set(common.dataset).is_table:
        raise SettingError(
            f"{run_dir} is a run on a table, but fine-tuning needs images: name another run"
        )
    label = run_dir.resolve().name
    if from_site:
        label = f"{label}, {from_site}"
        network = cast(nn.Module, run.lab(from_site, data_dir, state_dir).open())
        arrays = {}
        for name, array in network.state_dict().items():
            arrays[name] = array.cpu()
    else:
        arrays = _shared_arrays(run_dir, common)
        frozen = common.network == "vit" and not common.train_backbone
        if frozen and common.backbone_weights != "random":
            # The run has only trained prompts, which are of no use with another backbone
            digests = {facts.get("backbone", "") for facts in run.silos.values()}
            refuse_other_backbone(run_dir, common, digests, "restore those")
    # A method may share only its head, or an encoder that no site has trained
    fault = _encoder_fault(common, arrays)
    if fault:
        raise SettingError(f"{run_dir}: {fault}")
    first_site = next(iter(run.silos.values()))
    label_counts = next(iter(first_site["label_counts"].values()), first_site["classes"])
    classes = (tuple(first_site["classes"]), len(label_counts))
    has_backbone = any(name.startswith("encoder.vit.") for name in arrays)
    return RunModel(label, common, arrays, classes, has_backbone)


def _shared_arrays(run_dir: Path, common: CommonSettings) -> dict[str, Tensor]:
    """Read the arrays of model.safetensors; SettingError if the run has no shared model."""
    path = run_dir / "model.safetensors"
    if not path.is_file():
        raise SettingError(
            f"{run_dir}: method '{common.method}' has no shared model; choose a site's model by "
            "--from-site"
        )
    arrays, _ = load_state(path)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _encoder_fault(common: CommonSettings, arrays: Mapping[str, Any]) -> str:
    """Say why a model has no encoder that the run has trained; empty if it has one."""
    if not any(name.startswith(_ENCODER) for name in arrays):
        return (
            f"the model of method '{common.method}' holds no encoder "
            f"({', '.join(list(arrays)[:3])}, ...); choose a site's model by --from-site"
        )
    # Prompts were trained for one backbone, and a random one is not among the run's arrays
    prompts_only = not any(name.startswith("encoder.") for name in arrays)
    if prompts_only and common.backbone_weights == "random":
        return (
            "its ViT is frozen and random, so the run has trained no encoder: name a run with "
            "'vit.train-backbone', or with 'vit.backbone-weights'"
        )
    return ""
