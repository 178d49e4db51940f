"""Builds the settings of fine-tuning from a run's settings, our recipe and the user's changes."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

from fedsilo.core.errors import SettingError, unknown_key
from fedsilo.core.files.locations import find_places
from fedsilo.core.settings.common_settings import NETWORK_KEYS, CommonSettings
from fedsilo.core.settings_schema import Value, as_mapping, build, defaults, keys_in, keys_with
from fedsilo.datasets.partition.cuts import cut_keys
from fedsilo.datasets.registry import check_data_settings, data_set
from fedsilo.datasets.weights.initial_weights import refuse_seen_start
from fedsilo.datasets.weights.provenance import PARTITION, refuse_other_provenance
from fedsilo.finetuning.finetune_request import SEGMENTATION, RunModel, Source
from fedsilo.models.networks.kinds import check_network_settings
from fedsilo.server_app.config.settings import parse_assignment

# Network for segmentation -> the network of a run whose weights it accepts; empty for none
RUN_NETWORK = {"unet": "conv", "vit": "vit", "swin": "", "transunet": "vit", "swinunet": ""}
_LEARNERS = ("unet", "swin", "swinunet")  # a run's ViT can be distilled into these
# Part of an error's advice if distillation would help
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
    # The run's evidential loss and its MC dropout do not fit the new head of every network
    "train.loss": "cross-entropy",
    "train.mc-passes": 0,
    "train.local-epochs": 1,
}
_VALIDATION_FOLDS = 5
_OPTIONS = {"network.name": "--network", "dataset": "--dataset"}


def choose_network(
    task: str, wanted: str | None, sources: Sequence[Source], *, distil: bool = False
) -> str:
    """Choose the network to train, and return its name.

    The network is ``wanted`` if the user named one. Otherwise, it is the task's first network that
    accepts the weights of the first source. Without sources, it is the task's first network. The
    network must accept the weights of every source, except those of a run's ViT that it learns from
    by distillation.

    Args:
        task: 'classification' or 'segmentation'.
        wanted: the name that the user gave. None or empty to choose by the sources.
        sources: the starting points with weights, which are models of runs and pretrained weights.
        distil: whether the user asked for distillation, in which a network learns to predict the
            tokens of a run's ViT.

    Raises:
        SettingError: in one of these cases:

            - The task does not have the wanted network.
            - The network does not accept the weights of a source.
            - ``distil`` is True, but ``wanted`` cannot learn from any source.
    """
    # Network of the task -> the network of a run whose weights it accepts
    of_task: Mapping[str, str] = dict(zip(_CLASSIFIERS, _CLASSIFIERS, strict=True))
    if task == SEGMENTATION:
        of_task = RUN_NETWORK
    network = wanted or ""
    if network and network not in of_task:
        known = ", ".join(of_task)
        raise SettingError(f"--network for {task} must be one of {known}, but is '{network}'")
    can_distil = [_can_learn_from(network, source) for source in sources]
    if distil and not any(can_distil):
        raise SettingError(
            "--distil-epochs is for a run of a ViT and a --network that does not take it "
            f"({', '.join(_LEARNERS)}): remove it, or name such a run and network"
        )
    # The first source decides the network; the other sources must fit it
    for source in sources:
        if distil and _can_learn_from(network, source):
            continue
        fitting = _networks_for(source, of_task)
        weights = f"the weights of {source.label} (network '{source.network}')"
        if not fitting:
            runs = " or ".join(sorted({*of_task.values()} - {""}))
            raise SettingError(
                f"no network for {task} accepts {weights}: name a run of {runs}, or give --weights "
                "scratch"
            )
        if network and network not in fitting:
            learn = ""
            if _can_learn_from(network, source):
                learn = _DISTIL
            raise SettingError(
                f"network '{network}' does not accept {weights}: remove --network, {learn}or give "
                "--weights scratch"
            )
        network = network or fitting[0]
    return network or next(iter(of_task))


def _networks_for(source: Source, of_task: Mapping[str, str]) -> list[str]:
    """List the names of the task's networks that can start from the weights of ``source``.

    The list is in the order of ``of_task``. It is empty if no network accepts the weights.

    Args:
        source: a run's model, or pretrained weights. Both name the network that the weights fit.
        of_task: each network of the task -> the name of the network whose weights fit, or "" if
            none do.
    """
    fitting = []
    for name, accepted in of_task.items():
        if accepted == source.network:
            fitting.append(name)
    return fitting


def accepts_weights(network: str, source: Source) -> bool:
    """Tell whether the network named ``network`` can copy the arrays of ``source``.

    A network for segmentation takes arrays only from the network that ``RUN_NETWORK`` gives for it:
    a UNet from "conv", and a ViT or TransUNet from "vit". A Swin or SwinUnet takes none. Any other
    network takes arrays only from a network of the same name.
    """
    return RUN_NETWORK.get(network, network) == source.network


def _can_learn_from(network: str, source: Source) -> bool:
    """Tell whether ``source`` is a run's ViT and ``network`` can learn that ViT's tokens."""
    return network in _LEARNERS and isinstance(source, RunModel) and source.network == "vit"


def build_settings(
    task: str,
    network: str,
    run_models: Sequence[RunModel],
    dataset: str | None,
    changes: Mapping[str, Value],
) -> CommonSettings:
    """Build the settings of data, network and training for fine-tuning, and check them.

    There are four sources, and a later source overrides an earlier one: the defaults, the settings
    inherited from the first run, a fixed recipe (such as AdamW with batch size 16), and the user's
    ``changes``. If there would be no validation images, one of 5 folds of the training images is
    used for validation.

    Args:
        task: 'classification' or 'segmentation'.
        network: the name of the network to train.
        run_models: the starting points that are models of runs.
        dataset: the name of the data set. None for the first run's.
        changes: the user's settings, key -> value.

    Raises:
        SettingError: in one of these cases:

            - A setting is unknown, out of range or unused in fine-tuning.
            - The data set is unknown, or neither a data set nor a run is given.
            - A run chose its test images by other settings, so it may have trained on these ones.
    """
    first: dict[str, Value] = {}
    if run_models:
        first = as_mapping(run_models[0].common)
    dataset = dataset or str(first.get("dataset", ""))
    if not dataset:
        raise SettingError("without a run, the data set is unknown: give --dataset")
    partition = str({**first, **changes}.get("split.partition", "own"))
    of_data = _data_keys(dataset, partition, task)
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
    # A partition makes a validation part itself, so folds are needed only without a partition
    cut_again = partition != "own" and of_data >= cut_keys(partition)
    if "split.val-folds" in of_data and not values.get("split.val-folds") and not cut_again:
        values["split.val-folds"] = _VALIDATION_FOLDS
    settings = build(CommonSettings, _with_absolute_paths({**values, **changes}))
    check_data_settings(settings)
    # Folds are not needed if the data set has its own validation split, unless the user sets them
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
    """Select the settings that fine-tuning inherits from a run, key -> value.

    If ``dataset`` is the run's own data set, the run's values of the data settings ``of_data`` are
    inherited. For another data set, only the paths of files and folders are. If ``network`` can
    copy the run's arrays, the settings of the network are inherited too, whatever the data set.
    """
    values = as_mapping(run_model.common)
    inherited = frozenset(_FILES)
    if dataset == values["dataset"]:
        inherited = of_data
    # A network that only learns from the run's by distillation has its own settings
    if accepts_weights(network, run_model):
        inherited |= _OF_NETWORK
    return _select(values, inherited)


def _select(values: Mapping[str, Value], keys: Set[str]) -> dict[str, Value]:
    """Return the settings whose key is in ``keys``, in the order of ``values``."""
    return {key: value for key, value in values.items() if key in keys}


def read_changes(
    texts: Sequence[str], device: str | None, data_dir: Path | None
) -> dict[str, Value]:
    """Parse the settings that the user changes, and return them as key -> value.

    Args:
        texts: the settings, each as ``key=value``. If a key is repeated, its last value counts.
        device: the value of --device, which overrides 'machine.device' in ``texts``; None if the
            option is not given.
        data_dir: the value of --data-dir, which overrides 'data.dir' in ``texts``; None if the
            option is not given.

    Raises:
        SettingError: a text is not of the form ``key=value``. Unknown keys are not rejected here.
    """
    changes = dict(parse_assignment(text) for text in texts)
    if device is not None:
        changes["machine.device"] = device
    if data_dir is not None:
        changes["data.dir"] = str(data_dir)
    return changes


def _with_absolute_paths(values: dict[str, Value]) -> dict[str, Value]:
    """Return a copy of the settings in which all paths of files and folders are absolute.

    Paths are the settings that are declared with the role "files", such as 'data.dir'. A relative
    path starts from the working folder, ``~`` is expanded, and an empty path stays empty. The
    settings are written to a file, which may be read later in another folder.
    """
    absolute = dict(values)
    for key in _FILES:
        if values.get(key):
            absolute[key] = str(Path(str(values[key])).expanduser().resolve())
    return absolute


def _data_keys(dataset: str, partition: str, task: str) -> frozenset[str]:
    """List the keys of all settings that concern the data of fine-tuning.

    The keys are 'dataset', the settings with paths, the settings of partitions, and those that the
    data set and ``partition`` (the value of 'split.partition') use.

    For segmentation, all settings of partitions are left out if the data set has no setting
    'split.silos'. The masks then belong to fixed sites.
    """
    own_keys = data_set(dataset).settings
    if task == SEGMENTATION and "split.silos" not in own_keys:
        return (_OF_DATA | own_keys) - PARTITION
    return _OF_DATA | own_keys | cut_keys(partition)


def used_settings(settings: CommonSettings, task: str) -> dict[str, Value]:
    """Select the settings that have an effect on fine-tuning, key -> value.

    These are the settings of the data, the network and the training. The settings of a federated
    run, such as the number of rounds, are left out. With the ``task`` "segmentation", the settings
    of partitions may have no effect, and are then left out too.
    """
    of_data = _data_keys(settings.dataset, settings.partition, task)
    return _select(as_mapping(settings), _OF_NETWORK | _OF_TRAINING | of_data)


def _refuse_unused(changes: Mapping[str, Value], of_data: frozenset[str]) -> None:
    """Check that fine-tuning uses each setting that the user changed.

    Args:
        changes: the user's settings, key -> value. Only the keys are checked.
        of_data: the keys of the data settings that apply to the chosen data set and task.

    Raises:
        SettingError: a key is unknown, or is not a setting of the data, the network or the
            training. The error is also raised for 'network.name' and 'dataset', which have options
            of their own. The message names the first such key in ``changes``.
    """
    known = _OF_NETWORK | _OF_TRAINING | of_data
    for key in changes:
        if key not in defaults(CommonSettings):
            raise unknown_key(key, known)
        if key in _OPTIONS or key not in known:
            advice = "has no effect with fine-tuning: remove it"
            if key in _OPTIONS:
                advice = f"has an option of its own: give {_OPTIONS[key]} instead"
            raise SettingError(f"setting '{key}' {advice}")
