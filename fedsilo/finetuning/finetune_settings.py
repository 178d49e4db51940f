"""Builds the settings of fine-tuning from a run's settings, our recipe and the user's changes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedsilo.core.errors import SettingError
from fedsilo.core.files.locations import find_places
from fedsilo.core.settings.common_settings import NETWORK_KEYS, CommonSettings
from fedsilo.core.settings_schema import (
    Value,
    as_mapping,
    build,
    defaults,
    keys_in,
    keys_with,
    unknown_key,
)
from fedsilo.datasets.partition.cuts import cut_keys
from fedsilo.datasets.registry import check_data_settings, data_set
from fedsilo.datasets.weights.initial_weights import refuse_seen_start
from fedsilo.datasets.weights.provenance import PARTITION, refuse_other_provenance
from fedsilo.finetuning.finetune_request import (
    CLASSIFICATION,
    SEGMENTATION,
    RunModel,
    Source,
)
from fedsilo.models.networks.kinds import check_network_settings
from fedsilo.server_app.config.settings import parse_assignment

# Network for segmentation -> the run's network whose weights it accepts, or empty
RUN_NETWORK = {"unet": "conv", "vit": "vit", "swin": "", "transunet": "vit", "swinunet": ""}
_LEARNERS = ("unet", "swin", "swinunet")  # a run's ViT can be distilled into these
_DISTIL = "give --distil-epochs to let it learn that ViT's tokens first, "
_CLASSIFIERS = ("conv", "vgg16-bn", "resnet22", "vit")

_FILES = keys_with(CommonSettings, "files")
_OF_NETWORK = frozenset(NETWORK_KEYS)
_OF_DATA = frozenset(("dataset", *keys_with(CommonSettings, "files", "partition")))
# Settings that only the sites of a run use, so they have no effect here
_OF_SITES = {"machine.memory-format", "machine.vectorised"}
_OF_TRAINING = (
    frozenset(keys_with(CommonSettings, "step") + keys_in(CommonSettings, "machine")) - _OF_SITES
)
_RECIPE: dict[str, Value] = {
    "train.batch-size": 16,
    "train.optimiser": "adamw",
    "train.weight-decay": 0.01,
    # The same for all networks, and fit for a new head: no evidence, no dropout when measuring
    "train.loss": "cross-entropy",
    "train.mc-passes": 0,
    "train.local-epochs": 1,
}
_VALIDATION_FOLDS = 5
_OPTIONS = {"network.name": "--network", "dataset": "--dataset"}


def network_of(
    task: str, wanted: str | None, sources: Sequence[Source], *, distil: bool = False
) -> str:
    """Choose the network that is trained, and return its name.

    It is ``wanted``; if this is None, the task's first network that accepts the weights; if there
    are only starts from scratch, the task's first network. With ``distil``, a run's ViT may be
    distilled into a network that does not accept its weights.

    Raises:
        SettingError: there is no such network, none accepts the weights, or nothing can be
            distilled.
    """
    of_task: Mapping[str, str] = {name: name for name in _CLASSIFIERS}
    if task == SEGMENTATION:
        of_task = RUN_NETWORK
    network = wanted or ""
    if network and network not in of_task:
        known = ", ".join(of_task)
        raise SettingError(f"--network for {task} must be one of {known}, but is '{network}'")
    if distil and not any(_distils(network, source) for source in sources):
        raise SettingError(
            "--distil-epochs is for a run of a ViT and a --network that does not take it "
            f"({', '.join(_LEARNERS)}): remove it, or name such a run and network"
        )
    # The first source decides the network; the others must fit it
    for source in sources:
        if distil and _distils(network, source):
            continue
        # A network of the task takes the weights of one network of runs, or of none
        fitting = [name for name, taken in of_task.items() if taken == source.network]
        weights = f"the weights of {source.label} (network '{source.network}')"
        if not fitting:
            runs = " or ".join(sorted({*of_task.values()} - {""}))
            raise SettingError(
                f"no network for {task} accepts {weights}: name a run of {runs}, or give --weights "
                "scratch"
            )
        if network and network not in fitting:
            learn = ""
            if _distils(network, source):
                learn = _DISTIL
            raise SettingError(
                f"network '{network}' does not accept {weights}: remove --network, {learn}or give "
                "--weights scratch"
            )
        network = network or fitting[0]
    return network or next(iter(of_task))


def takes(network: str, source: Source) -> bool:
    """Tell whether a network of the task accepts the arrays of ``source`` as they are."""
    return RUN_NETWORK.get(network, network) == source.network


def _distils(network: str, source: Source) -> bool:
    """Tell whether a network can learn by distillation from ``source``, which is a run's ViT."""
    return network in _LEARNERS and isinstance(source, RunModel) and source.network == "vit"


def settings_of(
    task: str,
    network: str,
    run_models: Sequence[RunModel],
    dataset: str | None,
    changes: Mapping[str, Value],
) -> CommonSettings:
    """Build the settings of data, network and training.

    Network settings come from the first run. Data settings come from it too if the data set is the
    same. Then follow our recipe and the user's ``changes``. If ``dataset`` is None, it is the first
    run's.

    Raises:
        SettingError: a setting is unknown, out of range or unused here, or images would be tested
            that a run has trained on.
    """
    first: dict[str, Value] = {}
    if run_models:
        first = as_mapping(run_models[0].common)
    dataset = dataset or str(first.get("dataset", ""))
    if not dataset:
        raise SettingError("without a run, the data set is unknown: give --dataset")
    partition = str({**first, **changes}.get("split.partition", "own"))
    of_data = _of_data(dataset, partition, task)
    _refuse_unused(changes, of_data)
    values: dict[str, Value] = {}
    if run_models:
        values = _inherited_values(run_models[0], network, dataset, of_data)
    values |= _RECIPE | {
        "dataset": dataset,
        "network.name": RUN_NETWORK.get(network, network) or "auto",
    }
    # The whole ViT is trained, from --weights or from the seed
    if values["network.name"] == "vit":
        values |= {"vit.train-backbone": True, "vit.backbone-weights": "random"}
    cut_again = partition != "own" and of_data >= cut_keys(partition)
    if "split.val-folds" in of_data and not values.get("split.val-folds") and not cut_again:
        values["split.val-folds"] = _VALIDATION_FOLDS
    settings = build(CommonSettings, _with_absolute_paths({**values, **changes}))
    check_data_settings(settings)
    # A data set with a validation split of its own needs no folds, unless the user wants them
    if not changes.keys() & {"split.val-folds", "split.val-fold"}:
        places = find_places(settings.data_dir, settings.cache_dir)
        if data_set(settings.dataset).gives_validation(settings, places):
            settings = replace(settings, val_folds=0, val_fold=0)
    check_network_settings(settings)
    # Images that a run has trained on would be an easy test, so no start may have seen them
    for run_model in run_models:
        refuse_other_provenance(settings, run_model.common, run_model.label)
        initial_weights = run_model.common.initial_weights
        refuse_seen_start(replace(settings, initial_weights=initial_weights))
    return settings


def _inherited_values(
    run_model: RunModel, network: str, dataset: str, of_data: frozenset[str]
) -> dict[str, Value]:
    """Return the settings of a run that hold here: always its files, data and network if equal."""
    values = as_mapping(run_model.common)
    kept = frozenset(_FILES)
    if dataset == values["dataset"]:
        kept = of_data
    # A network that only learns from the run's by distillation has its own settings
    if takes(network, run_model):
        kept |= _OF_NETWORK
    return {key: value for key, value in values.items() if key in kept}


def read_changes(
    texts: Sequence[str], device: str | None, data_dir: Path | None
) -> dict[str, Value]:
    """Read the user's settings, each ``key=value``; ``device`` and ``data_dir`` override them."""
    changes = dict(parse_assignment(text) for text in texts)
    if device is not None:
        changes["machine.device"] = device
    if data_dir is not None:
        changes["data.dir"] = str(data_dir)
    return changes


def _with_absolute_paths(values: dict[str, Value]) -> dict[str, Value]:
    """Make the paths among settings absolute, because the settings are written to a file."""
    absolute = dict(values)
    for key in _FILES:
        if values.get(key):
            absolute[key] = str(Path(str(values[key])).expanduser().resolve())
    return absolute


def _of_data(dataset: str, partition: str, task: str) -> frozenset[str]:
    """Return the keys of settings that concern the data.

    Masks belong to the data set's own sites. So for segmentation, the settings by which a run has
    cut the images into other silos are left out.
    """
    own_keys = data_set(dataset).settings
    if task == SEGMENTATION and "split.silos" not in own_keys:
        return (_OF_DATA | own_keys) - PARTITION
    return _OF_DATA | own_keys | cut_keys(partition)


def used_settings(settings: CommonSettings) -> dict[str, Value]:
    """Return the settings that concern data, network or training here."""
    of_data = _of_data(settings.dataset, settings.partition, CLASSIFICATION)
    keys = _OF_NETWORK | _OF_TRAINING | of_data
    return {key: value for key, value in as_mapping(settings).items() if key in keys}


def _refuse_unused(changes: Mapping[str, Value], of_data: frozenset[str]) -> None:
    """Raise a SettingError for a setting that concerns neither data, network nor training here."""
    known = _OF_NETWORK | _OF_TRAINING | of_data
    for key in changes:
        if key not in defaults(CommonSettings):
            raise unknown_key(key, known)
        if key in _OPTIONS or key not in known:
            advice = "has no effect with fine-tuning: remove it"
            if key in _OPTIONS:
                advice = f"has an option of its own: give {_OPTIONS[key]} instead"
            raise SettingError(f"setting '{key}' {advice}")
