"""The settings of fine-tuning: network and data of a run, a recipe, and what the command says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedsilo.datasets.io.locations import find_places
from fedsilo.datasets.partition.cuts import cut_keys
from fedsilo.datasets.registry import check_data_settings, data_set
from fedsilo.datasets.weights.initial_weights import refuse_seen_start
from fedsilo.datasets.weights.provenance import PARTITION, refuse_other_provenance
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import (
    Value,
    as_mapping,
    build,
    defaults,
    keys_with,
    unknown_key,
)
from fedsilo.models.networks.kinds import check_network_settings
from fedsilo.server_app.config.settings import parse_assignment
from fedsilo.server_app.studies.finetune.request import (
    CLASSIFICATION,
    SEGMENTATION,
    FinetuneRequest,
)
from fedsilo.server_app.studies.finetune.weights import RunModel, Source

# What a network for segmentation is made of: which run's network can give it weights
RUN_NETWORK = {"unet": "conv", "vit": "vit", "swin": "", "transunet": "vit", "swinunet": ""}
_LEARNER = ("unet", "swin", "swinunet")  # which a run's ViT can be distilled into
_DISTIL = "give --distil-epochs to have it learn that ViT's tokens first, "
_CLASSIFIERS = ("conv", "vgg16-bn", "resnet22", "vit")

_FILES = keys_with(CommonSettings, "files")
_OF_NETWORK = frozenset(keys_with(CommonSettings, "network"))
_OF_DATA = frozenset(keys_with(CommonSettings, "data", "files", "partition"))
_OF_TRAINING = frozenset(keys_with(CommonSettings, "step", "machine"))
_RECIPE: dict[str, Value] = {
    "batch-size": 16,
    "optimiser": "adamw",
    "weight-decay": 0.01,
    # Comparable over networks, and what a new head needs: no evidence, no dropout when measuring
    "loss": "cross-entropy",
    "mc-passes": 0,
    "local-epochs": 1,
}
_VALIDATION_FOLDS = 5


def network_of(
    task: str, wanted: str | None, sources: Sequence[Source], *, distil: bool = False
) -> str:
    """Return the network that is trained, by its name among those of the task.

    It is the one ``wanted``, else the one that takes the given weights, else unet or conv.
    ``distil``: a run's ViT may be distilled into one that does not take it.

    Raises:
        SettingError: there is no such network, or none that takes the weights, or nothing to be
            distilled.
    """
    # By each network of the task: the run's network whose weights it takes
    of_task = RUN_NETWORK if task == SEGMENTATION else {name: name for name in _CLASSIFIERS}
    network = wanted or ""
    if network and network not in of_task:
        known = ", ".join(of_task)
        raise SettingError(f"--network is '{network}'; for {task} it is one of {known}")
    if distil and not any(_distils(network, source) for source in sources):
        raise SettingError(
            "--distil-epochs is for a run of a ViT and a --network that does not take it "
            f"({', '.join(_LEARNER)}): leave it out, or name such a run and network"
        )
    for source in sources:
        if not (distil and _distils(network, source)):
            network = _taking(task, of_task, network, source)
    return network or next(iter(of_task))


def _taking(task: str, of_task: Mapping[str, str], network: str, source: Source) -> str:
    """Return ``network``, if it is empty the first of the task that takes the weights.

    Raises:
        SettingError: it does not take them, or none does.
    """
    fitting = [name for name, taken in of_task.items() if taken == source.network]
    weights = f"the weights of {source.label}, which are of network '{source.network}'"
    if not fitting:
        raise SettingError(
            f"no network for {task} takes {weights}: name a run of "
            f"{' or '.join(sorted({*of_task.values()} - {''}))}, or take --weights scratch"
        )
    if network and network not in fitting:
        raise SettingError(
            f"network '{network}' does not take {weights}: leave out --network, "
            f"{_DISTIL if _distils(network, source) else ''}or take --weights scratch"
        )
    return network or fitting[0]


def takes(network: str, source: Source) -> bool:
    """Tell whether a network of the task takes the arrays of ``source`` itself."""
    return RUN_NETWORK.get(network, network) == source.network


def _distils(network: str, source: Source) -> bool:
    """Tell whether a network takes nothing of ``source``, a run's ViT, and can learn from it."""
    return network in _LEARNER and isinstance(source, RunModel) and source.network == "vit"


def settings_of(
    request: FinetuneRequest, network: str, run_models: Sequence[RunModel]
) -> CommonSettings:
    """Return the settings of data, network and training.

    The network's are the first run's, and so are the data's if it is the same data set; then
    the request's changes.

    Raises:
        SettingError: a setting is unknown, out of range, or means nothing here, or images would be
            tested that a run has trained on.
    """
    first = as_mapping(run_models[0].common) if run_models else {}
    dataset = str(request.dataset or first.get("dataset", ""))
    if not dataset:
        raise SettingError("no run is named whose data set could be taken: give --dataset")
    changes = dict(parse_assignment(text) for text in request.changes)
    partition = {**first, **changes}.get("partition", "own")
    of_data = _of_data(dataset, partition, request.task)
    # Of a network that only learns from the run's, nothing is the run's
    of_network = _OF_NETWORK if run_models and takes(network, run_models[0]) else frozenset()
    values = _starting_values(first, dataset, network, of_network, of_data, partition)
    _refuse_idle(changes, of_data)
    values |= changes
    if request.device is not None:
        values["device"] = request.device
    if request.data_dir is not None:
        values["data-dir"] = str(request.data_dir)
    for key in _FILES:
        if values.get(key):
            values[key] = str(Path(str(values[key])).expanduser().resolve())
    settings = build(CommonSettings, values)
    check_data_settings(settings)
    if not changes.keys() & {"val-folds", "val-fold"}:
        settings = _as_given(settings)
    check_network_settings(settings)
    for run_model in run_models:
        refuse_other_provenance(settings, run_model.common, run_model.label)
        initial_weights = run_model.common.initial_weights
        refuse_seen_start(replace(settings, initial_weights=initial_weights))
    return settings


def _starting_values(
    first: Mapping[str, Value],
    dataset: str,
    network: str,
    of_network: frozenset[str],
    of_data: frozenset[str],
    partition: Value,
) -> dict[str, Value]:
    """Return the values before any change: what is kept of the first run, then the recipe."""
    of_run = of_data if dataset == first.get("dataset") else frozenset(_FILES)
    kept = of_network | of_run
    values: dict[str, Value] = {key: value for key, value in first.items() if key in kept}
    values |= _RECIPE | {"dataset": dataset, "network": RUN_NETWORK.get(network, network) or "auto"}
    if values["network"] == "vit":  # all of it is trained, from --weights or from the seed
        values |= {"train-backbone": True, "backbone-weights": "random"}
    cut_anew = partition != "own" and of_data >= cut_keys(str(partition))
    if "val-folds" in of_data and not values.get("val-folds") and not cut_anew:
        values["val-folds"] = _VALIDATION_FOLDS
    return values


def _as_given(settings: CommonSettings) -> CommonSettings:
    """Return the settings without folds for validation where the files name images for it."""
    places = find_places(settings.data_dir, settings.cache_dir)
    if data_set(settings.dataset).gives_validation(settings, places):
        return replace(settings, val_folds=0, val_fold=0)
    return settings


def _of_data(dataset: str, partition: Value, task: str) -> frozenset[str]:
    """Return the settings that say something about the data.

    Masks lie at the data set's own sites, whatever silos a run has cut its images into.
    """
    own_keys = data_set(dataset).settings
    if task == SEGMENTATION and "silos" not in own_keys:
        return (_OF_DATA | own_keys) - PARTITION
    return _OF_DATA | own_keys | cut_keys(str(partition))


def used(settings: CommonSettings) -> dict[str, Value]:
    """Return the settings that say something about data, network or training here."""
    of_data = _of_data(settings.dataset, settings.partition, CLASSIFICATION)
    keys = _OF_NETWORK | _OF_TRAINING | of_data
    return {key: value for key, value in as_mapping(settings).items() if key in keys}


def _refuse_idle(changes: dict[str, Value], of_data: frozenset[str]) -> None:
    """Refuse a setting that says nothing about data, network or training here."""
    for key in changes:
        if key not in defaults(CommonSettings):
            raise unknown_key(key, _OF_NETWORK | _OF_TRAINING | of_data)
        if key in ("network", "dataset"):
            raise SettingError(f"--set {key}: give --{key} instead")
        if key not in _OF_NETWORK | _OF_TRAINING | of_data:
            raise SettingError(f"setting '{key}' means nothing to fine-tuning: remove it")
