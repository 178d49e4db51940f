"""Checks the settings of training before the run starts, by the same rules as the sites."""

from collections.abc import Mapping

from fedsilo.core.errors import SettingError
from fedsilo.core.methods import site_class
from fedsilo.core.one_line import join_names, quote_value
from fedsilo.core.settings.common_settings import NOBODY, SUMS, CommonSettings
from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import Value, as_mapping, defaults, keys_with
from fedsilo.datasets.registry import data_set
from fedsilo.models.tasks.task import task_of

_STRUCTURED = keys_with(CommonSettings, "structured")
_TRAINING = ("train.optimiser", "train.schedule", "train.warm-up", *_STRUCTURED)
# Optimisers that treat each number separately
_NUMBERWISE = (
    "adam",
    "adamw",
    "sgd",
    "adagrad",
    "rmsprop",
    "adadelta",
    "adamax",
    "nadam",
    "radam",
)
# The values, by key, that let the inline engine train several sites as one batch
_VECTORISED: Mapping[str, tuple[Value, ...]] = {
    "privacy.sample-clip-norm": (0.0,),
    "network.name": ("auto", "conv", "vgg16-bn", "logistic", "mlp"),
    "train.loss": ("auto", "cross-entropy"),
    "train.class-weights": ("none",),
    "train.augmentation": ("",),
    "train.micro-batch": (0,),
    "train.epoch-steps": (0,),
    "train.optimiser-state": ("round",),
    "train.optimiser": _NUMBERWISE,
    "machine.precision": ("auto", "fp32", "bf16"),
}


def check_training(common: CommonSettings, is_table: bool) -> None:
    """Check the settings that control training at a site, and those of early stopping.

    Early stopping is always checked. The settings of the optimiser, schedule, class weights and
    augmentation are checked with the functions that sites use. These functions import PyTorch, so
    they are not called if all those settings have their defaults.

    Args:
        common: the run's common settings.
        is_table: True if the data set is a table, or False if it has images.

    Raises:
        SettingError: in one of these cases:

            - A site would refuse the settings.
            - The settings of early stopping have no effect, or need a metric that has noise or is
              not measured.
            - 'machine.vectorised' is above 1, but the sites cannot be trained as one batch.
    """
    _check_early_stopping(common)
    if common.vectorised > 1:
        reason = why_not_together(common)
        if reason:
            raise SettingError(
                f"'machine.vectorised' is {common.vectorised}, but {reason}: set "
                "'machine.vectorised' to 1"
            )
    # The sites' own checks are imported only if a setting needs them: they bring PyTorch
    values, usual = as_mapping(common), defaults(CommonSettings)
    if all(values[key] == usual[key] for key in _TRAINING):
        return
    from fedsilo.client_app.training.augmentation import check_augmentation
    from fedsilo.client_app.training.initial_network import check_class_weights
    from fedsilo.client_app.training.optimisers import check_optimiser
    from fedsilo.client_app.training.rates import check_schedule

    check_optimiser(common)
    check_schedule(common)
    check_class_weights(common)
    check_augmentation(common, is_table)


def check_task(common: CommonSettings, own: OwnSettings, is_table: bool) -> None:
    """Check that the run's method, data set and settings suit the run's task.

    Args:
        common: the run's common settings. ``task`` is among them, for example "classification".
        own: the settings of the run's method.
        is_table: True if the data set is a table, or False if it has images.

    Raises:
        SettingError: the method or the data set is for other tasks, or a setting does not suit the
            task, such as the loss of another task.
    """
    if own.tasks and common.task not in own.tasks:
        raise SettingError(
            f"method '{common.method}' {own.why_tasks}, so it suits task "
            f"{join_names(own.tasks)}, but 'task' is '{common.task}': choose another method, such "
            "as 'fedavg'"
        )
    suited = data_set(common.dataset).tasks
    if common.task not in suited:
        raise SettingError(
            f"data set '{common.dataset}' has labels for task {join_names(suited)}, but 'task' is "
            f"'{common.task}': set 'task' to one of these, or choose another data set"
        )
    task_of(common).check(is_table)


def _check_early_stopping(common: CommonSettings) -> None:
    metric, usual = common.early_stopping_metric, CommonSettings()
    always = task_of(common).always
    fault = ""
    if metric == "none":
        if common.patience != usual.patience:
            fault = (
                "setting 'server.patience' has no effect without a metric: set "
                "'server.early-stopping-metric'"
            )
    # A metric with noise would stop a run at random, and one that never comes would stop none
    elif common.trust == NOBODY or (common.trust == SUMS and metric not in always):
        fault = (
            f"setting 'server.early-stopping-metric' is '{metric}', but at 'privacy.trust' "
            f"'{common.trust}' this metric has noise or is not reported: remove "
            f"'server.early-stopping-metric', or at trust 'sums' choose {', '.join(always)}"
        )
    elif not common.evaluate_every:
        fault = (
            f"setting 'server.early-stopping-metric' is '{metric}', but 'server.evaluate-every' is "
            "0, so no round is measured: set 'server.evaluate-every' to 1"
        )
    if fault:
        raise SettingError(fault)


def why_not_together(common: CommonSettings) -> str:
    """Explain why the engine 'inline' cannot train several sites of this run as one batch.

    That engine trains all sites in one process. The method is checked first, then the task, then
    the settings. A method or a task may lack support for batched training, and a setting may have a
    value that batched training cannot use.

    Returns:
        The first reason as a clause. It is empty if the sites can be trained as one batch.
    """
    values = as_mapping(common)
    # Not by inheritance, because a method that extends another may do more
    if not vars(site_class(common.method)).get("trains_stacked", False):
        return f"method '{common.method}' has training steps that sites cannot take as one"
    if not task_of(common).trains_stacked:
        return f"task '{common.task}' cannot train several sites as one"
    for key, allowed in _VECTORISED.items():
        value = values[key]
        if isinstance(value, str):
            value = value.lower()
        if value not in allowed:
            wanted = join_names([str(one) or "empty" for one in allowed])
            return (
                f"'{key}' is {quote_value(values[key])}, and sites are trained as one only if it "
                f"is {wanted}"
            )
    return ""
