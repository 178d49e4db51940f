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
    """Check the values of ``--weights`` and ``--from-site`` before any starting point is opened.

    ``from_site`` is the site whose own model is taken from a run.

    Raises:
        SettingError: ``weights`` names a starting point twice, or ``from_site`` is given but
            ``weights`` names no existing folder.
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
    """A finished run's model as a starting point: its arrays and the settings that built it."""

    label: str  # the name of the run directory, and the site if the model is that site's own
    common: CommonSettings  # the settings of the run, with this machine's data directory
    arrays: Mapping[str, Tensor]  # name -> array on the CPU
    classes: Classes  # the classes that the run learned
    # Whether a ViT's backbone is among the arrays; if not, 'vit.backbone-weights' names it
    has_backbone: bool

    @property
    def network(self) -> str:
        """The name of the run's network, such as 'conv' or 'vit'; 'auto' is resolved."""
        return image_network(self.common)


@dataclass(frozen=True)
class PretrainedWeights:
    """The weights of a ViT or a VGG16 from a file or from timm, not from a run."""

    label: str  # the name in the table of results
    named: str  # the value of 'train.initial-weights' that loads them: a path, or timm:NAME
    network: str = "vit"  # the name of the network that they fit


Source: TypeAlias = RunModel | PretrainedWeights


@dataclass(frozen=True)
class Starts:
    """The starting points that the user named."""

    named: Sequence[Source | None]  # the user's order; None for a start from scratch

    @property
    def sources(self) -> list[Source]:
        """The starting points with weights, in order: all except starts from scratch."""
        return [source for source in self.named if source is not None]

    @property
    def run_models(self) -> list[RunModel]:
        """The starting points that are models of runs, in order."""
        return [source for source in self.named if isinstance(source, RunModel)]


def open_starts(
    weights: Sequence[str], data_dir: Path | None, from_site: str | None, state_dir: Path | None
) -> Starts:
    """Open all starting points that ``--weights`` names, in order.

    Args:
        weights: the starting points. ``open_start`` lists the forms that one can have.
        data_dir: the data directory. None for the one in each run's settings.
        from_site: the site whose own model is opened from each run. None for the shared model.
        state_dir: the folder of the site's private state. None for the one in each run directory.

    Raises:
        SettingError: two starting points have the same label in the table of results, such as two
            runs in folders of the same name.
        FedsiloError: ``open_start`` cannot open a starting point.
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
    """Open one starting point of ``--weights``: a run's model, pretrained weights, or nothing.

    Args:
        weights: one of these:

            - 'scratch' for random initial weights
            - a run directory, or a run's model.safetensors in it
            - timm:NAME for weights of the library timm: a VGG16 if NAME starts with 'vgg16_bn', and
              otherwise a ViT
            - any other file, which is taken for the weights of a ViT
        data_dir: the data directory. None for the one in the run's settings.
        from_site: the site whose own model is opened from a run. None for the shared model.
        state_dir: the folder of the site's private state. None for the one in the run directory.

    Returns:
        The run's model with its arrays. For a file or timm's weights, the result has only their
        name, because they are not loaded or checked here. For 'scratch', it is None.

    Raises:
        SettingError: ``weights`` is none of these, for example because the file does not exist.
        FedsiloError: the run cannot be opened.
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
        # Opened as a run, because only its settings say which images these weights have seen
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
    """Open a finished run's model as a starting point, and read its arrays to the CPU.

    Args:
        run_dir: the run directory.
        data_dir: the data directory. None for the one in the run's settings.
        from_site: the site whose own model is opened, which needs the site's data on this machine.
            None for the shared model in model.safetensors, which needs no data.
        state_dir: the folder of the site's private state. None for the one in the run directory.

    Raises:
        FedsiloError: in one of these cases:

            - The run has not ended, used a table, or lacks the wanted model.
            - The run did not train an encoder.
            - The run's frozen ViT had another backbone than the one on this machine.
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
            # The run has trained only prompts, which do not work with another backbone
            digests = {facts.get("backbone", "") for facts in run.silos.values()}
            refuse_other_backbone(run_dir, common, digests, "restore those")
    # Without a trained encoder there is nothing to transfer: a method may share only its head, and
    # a frozen random ViT has learned nothing
    fault = _encoder_fault(common, arrays)
    if fault:
        raise SettingError(f"{run_dir}: {fault}")
    # All sites have the same classes. A data set without class names lists none, so the number of
    # classes is read from the label counts of a split
    first_site = next(iter(run.silos.values()))
    label_counts = next(iter(first_site["label_counts"].values()), first_site["classes"])
    classes = (tuple(first_site["classes"]), len(label_counts))
    has_backbone = any(name.startswith("encoder.vit.") for name in arrays)
    return RunModel(label, common, arrays, classes, has_backbone)


def _shared_arrays(run_dir: Path, common: CommonSettings) -> dict[str, Tensor]:
    """Read the model that all sites of a run share, from its model.safetensors.

    Returns:
        Name -> array, on the CPU.

    Raises:
        SettingError: the file does not exist, because the run's method does not share a model.
    """
    path = run_dir / "model.safetensors"
    if not path.is_file():
        raise SettingError(
            f"{run_dir}: method '{common.method}' has no shared model; choose a site's model by "
            "--from-site"
        )
    arrays, _ = load_state(path)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _encoder_fault(common: CommonSettings, arrays: Mapping[str, Any]) -> str:
    """Explain in a sentence why a run's model cannot be a starting point; "" if it can.

    A starting point needs an encoder that the run trained. A head alone is not enough. Prompts,
    which are learned input tokens of a frozen ViT, count as a trained encoder. They do not count if
    the ViT was initialised at random, because its arrays are not stored.

    Args:
        common: the run's settings. 'method' and 'vit.backbone-weights' are used.
        arrays: the model's arrays by name. Only the names are used.
    """
    if not any(name.startswith(_ENCODER) for name in arrays):
        return (
            f"the model of method '{common.method}' has no encoder "
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
