"""The task of a run: the one object that knows what is learned.

Training, measuring, averages over sites, the best model, tables and reports ask the task, so that
none of them has to know whether a label is a class. A task is a subclass of ``Task`` in a file of
its own, and a line in ``fedsilo/core/tasks.py``. Its module imports PyTorch only inside functions,
because commands that only list or compare runs must start quickly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from fedsilo.core.errors import SettingError
from fedsilo.core.one_line import join_names
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.core.tasks import TASKS, count_strata
from fedsilo.models.privacy.summed_metrics import LARGEST_LOSS

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor


@dataclass(frozen=True)
class Task(ABC):
    """The task of a run: its loss, labels, metrics and what reports show.

    In the tensors below, n is a number of samples, and ``outputs`` is the number of outputs of the
    network (``NetworkShape.outputs``).

    Class attributes:
        name: the task's key in ``TASKS``, and the value of the setting 'task'.
        headline: the metric that decides the best round and orders a table, unless a setting says
            otherwise. ``fedsilo.core.metric_names.best_direction`` says whether more is better.
        shown: the metrics of result tables, the headline first; empty for those of the data set.
        always: the metrics that every split with samples has. Secure sums and noisy measurements
            carry only these.
        measured_words, counted_words: what ``metrics`` and ``counts`` send, for privacy.json, which
            puts the first into brackets and the second after a colon.
        losses: the values of 'train.loss' that the task accepts.
        label_type: the dtype of the label tensor, by its name in torch.
        label_noun: what a single label is called in sentences, such as "class".
        fewest_names: the fewest classes, findings or outcomes that data of the task have.
        curves: metric -> the label of its curve over rounds.
        progress: pairs of a validation metric and the text of its mean in a round's line, with a
            place for the number.
        answer_words: title -> meaning of the columns of ``answer_columns`` and ``truth_columns``,
            for the document next to a table of predictions; empty for those of classes.
        output_name, output_meaning: the name of an exported program's outputs, and what they are.
        report: the module of ``fedsilo/reports`` with the task's parts of reports and model cards;
            empty for classification's.
        network: ``module:function`` that builds the network from the settings and the
            ``NetworkShape``; empty for the classifiers of ``models/networks/build.py``, whose
            number of outputs is that of the shape.
        trains_stacked: whether 'machine.vectorised' can train several sites as one batch, which
            needs a cross-entropy of class numbers.
        why_not_private: the reason why training cannot be private per patient, as a predicate such
            as "compares patients with each other"; None if it can.
    """

    name: ClassVar[str]
    headline: ClassVar[str]
    shown: ClassVar[tuple[str, ...]] = ()
    always: ClassVar[tuple[str, ...]] = ("loss",)
    losses: ClassVar[tuple[str, ...]] = ("auto",)
    measured_words: ClassVar[str] = "the metrics of the task"
    counted_words: ClassVar[str] = "nothing more"
    label_type: ClassVar[str] = "float32"
    label_noun: ClassVar[str] = "label"
    fewest_names: ClassVar[int] = 1
    curves: ClassVar[Mapping[str, str]] = {"loss": "loss"}
    progress: ClassVar[tuple[tuple[str, str], ...]] = ()
    report: ClassVar[str] = ""
    answer_words: ClassVar[Mapping[str, str]] = {}
    output_name: ClassVar[str] = "probabilities"
    output_meaning: ClassVar[str] = "class probabilities"
    network: ClassVar[str] = ""
    trains_stacked: ClassVar[bool] = False
    why_not_private: ClassVar[str | None] = None

    settings: CommonSettings
    # Mean and standard deviation of a numeric outcome, by which it is standardised in training
    scale: tuple[float, float] = (0.0, 1.0)

    def scaled_by(self, outcome: FeatureStatistics) -> Task:
        """Return a copy of the task whose ``scale`` is the mean and deviation of an outcome.

        This task is not changed.

        Args:
            outcome: the mean and standard deviation of the numeric outcome, (1,) each.
        """
        return replace(self, scale=(float(outcome.mean[0]), float(outcome.std[0])))

    @abstractmethod
    def criterion(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the training loss, a function of a batch's outputs and labels to a scalar mean."""

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensor:
        """Map float32 outputs of the network (batch, ...) to predictions (batch, ...).

        Predictions are averaged over the passes of Monte Carlo dropout, so they must be numbers
        whose mean makes sense, such as probabilities.
        """

    @abstractmethod
    def metrics(self, predictions: Tensor, labels: Tensor) -> dict[str, float]:
        """Compute the metrics of one split (such as the test data) of a site: metric -> value.

        All metrics in ``always`` are present. Another metric is absent if it is not defined for
        these samples. The server weights each site's value by the number of samples in the split.

        Args:
            predictions: (n, ...) float64 on the CPU, with n at least 1.
            labels: the samples' labels, (n, ...), in the form of the task.
        """

    def counts(self, predictions: Tensor, labels: Tensor, minimum: int) -> dict[str, float]:
        """Compute metrics of a site's test samples beyond those of ``metrics``: metric -> value.

        They are sent only once, in the final evaluation. Each name must have a form that
        ``fedsilo.core.metric_names`` knows, such as ``class.0.right``. The default is an empty
        mapping.

        Args:
            predictions: (n, ...) float64 on the CPU.
            labels: (n, ...).
            minimum: the fewest samples behind a value. Values that rest on fewer samples are left
                out.
        """
        return {}

    def strata(self, labels: Tensor) -> Tensor:
        """Return the stratum of each sample, (n,) int64 from 0 to ``stratum_count`` - 1.

        A stratum is a group of samples, such as a class, that a site counts separately. When the
        site's samples are split, the strata have the same proportions in each split. By default all
        samples are in stratum 0.
        """
        import torch

        return torch.zeros(len(labels), dtype=torch.int64)

    def stratum_count(self, outputs: int) -> int:
        """Return the number of strata, the groups of samples that are counted separately.

        Some tasks have a fixed number, and others a stratum for each output (``TASKS``).

        Args:
            outputs: the number of outputs of the network.
        """
        return count_strata(self.name, outputs)

    def odd_counts(self, counts: Sequence[int]) -> str:
        """Describe a fault in the numbers of a site's training samples, such as a single class.

        The text is a clause. It is empty if there is no fault, which is the default.

        Args:
            counts: the number of the site's training samples in each stratum (``strata``), such as
                a class. Empty if the numbers are unknown.
        """
        return ""

    def may_report(self, metric: str, counts: Sequence[int], outputs: int) -> bool:
        """Tell whether a metric is defined for samples with these numbers by stratum.

        Early stopping can act only if its metric is defined. The default ignores the numbers: it is
        True for the metrics in ``shown`` and ``always``.

        Args:
            metric: the metric's name.
            counts: the number of samples in each stratum (``strata``), such as a class.
            outputs: the number of outputs of the network.
        """
        return metric in (*self.shown, *self.always)

    def label_fault(self, labels: npt.NDArray[Any], samples: int, names: Sequence[str]) -> str:
        """Explain why an array cannot be the labels of the samples, or return '' if it can.

        The explanation is a predicate, which the caller puts after a subject, such as "must be a
        number for each of 5 samples ...". By default, each sample needs one finite number.

        Args:
            labels: the array.
            samples: the number of samples.
            names: the names of classes or findings, or of a numeric outcome. The default ignores
                them.
        """
        import numpy as np

        if labels.shape != (samples,) or labels.dtype.kind not in "iuf":
            return (
                f"must be a number for each of {samples} samples, but is {labels.dtype} of shape "
                f"{labels.shape}"
            )
        if not np.isfinite(labels).all():
            return "contains non-finite numbers: remove those samples"
        return ""

    def describe(self, names: Sequence[str]) -> str:
        """Describe the prediction in a clause, such as "which of: benign, malignant"."""
        return ", ".join(names)

    def answer_columns(self, predictions: Tensor, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return the columns of a table of predictions: title -> a value for each sample.

        The first column is the predicted label or number. By default there is no table, and the
        function raises an error.

        Args:
            predictions: (n, ...) float64.
            names: the names of classes or findings, or of a numeric outcome.

        Raises:
            SettingError: the task's predictions do not fit into a table.
        """
        raise SettingError(f"task '{self.name}' has no table of predictions")

    def truth_columns(self, labels: Tensor, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return columns of known labels for the table of predictions: title -> a value per sample.

        The default is an empty mapping.

        Args:
            labels: (n, ...).
            names: the names of classes or findings, or of a numeric outcome.
        """
        return {}

    def summarise(self, predictions: Tensor, names: Sequence[str]) -> str:
        """Summarise the answers (n, ...) in a clause, such as "3 benign, 2 malignant".

        The default is only the names, joined by commas.
        """
        return ", ".join(names)

    def stratum_names(self, names: Sequence[str]) -> list[str]:
        """Return a name for each stratum, to be shown to people.

        A stratum is a group of samples that is counted by itself (``strata``). If the task has a
        stratum for each output of the network, such as each class, the names are ``names``.
        Otherwise the default is ["samples"], for a single stratum. A task with several fixed strata
        overrides this function.

        Args:
            names: the names of the network's outputs, such as the classes.
        """
        if not TASKS[self.name].strata:
            return list(names)
        return ["samples"]

    @abstractmethod
    def stand_in_labels(self, counts: Sequence[int], outputs: int) -> Tensor:
        """Make placeholder labels with given numbers of samples in each stratum.

        A hospital may declare its numbers of samples without opening its real labels. Placeholder
        labels then take their place where the settings of a run are checked.

        Args:
            counts: the number of samples in each stratum, a group of samples such as a class.
            outputs: the number of outputs of the network.

        Returns:
            Labels (n, ...) in the order of the strata, with n the sum of ``counts``.
        """

    def parts(self, predictions: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Compute each sample's contribution, 0 to 1, to the metrics that a private run measures.

        The contributions are summed over a split, and the sums leave the site with noise. A
        contribution must be finite even if a prediction is not, because the sum would otherwise
        reveal that sample. By default the mapping is empty, and a private run measures nothing.

        Args:
            predictions: (n, ...) float64 on the CPU.
            labels: (n, ...).

        Returns:
            Metric -> contributions, (n,). A contribution of 1 stands for the value in
            ``part_ranges``.
        """
        return {}

    def part_ranges(self, outputs: int) -> Mapping[str, float]:
        """Return the value that a contribution of 1 in ``parts`` stands for: metric -> value.

        The default is an empty mapping, like that of ``parts``.
        """
        return {}

    def limits(self, outputs: int) -> Mapping[str, tuple[float, float]]:
        """Return the bounds to which metrics are clipped before a secure sum: metric -> bounds.

        The metrics are those in ``always``. Bounds are the least and the largest value. By default
        only the loss has bounds, -10 and 10.
        """
        return {"loss": (-LARGEST_LOSS, LARGEST_LOSS)}

    def check(self, is_table: bool) -> None:
        """Check that the run's settings make sense for the task.

        Args:
            is_table: whether the data set is a table. The default does not use it.

        Raises:
            SettingError: in one of these cases:

                - The loss belongs to another task.
                - Class weights are set, but the task has no classes.
                - 'machine.vectorised' is above 1, but the task cannot train several sites in one
                  batch.
                - Training is private, but the task does not support it.
        """
        common = self.settings
        if common.loss not in self.losses:
            raise SettingError(
                f"'train.loss' is '{common.loss}', but task '{self.name}' trains with one of "
                f"{', '.join(self.losses)}: set one of these, or another 'task'"
            )
        if common.class_weights != "none" and self.label_noun != "class":
            raise SettingError(
                f"'train.class-weights' is set, but task '{self.name}' has no classes: set it to "
                "'none'"
            )
        if common.vectorised > 1 and not self.trains_stacked:
            raise SettingError(
                f"'machine.vectorised' is {common.vectorised}, but task '{self.name}' cannot train "
                "several sites as one: set it to 1"
            )
        if common.is_private() and self.why_not_private:
            raise SettingError(
                f"'privacy.sample-clip-norm' is set, but task '{self.name}' {self.why_not_private}:"
                " set it and 'privacy.noise-multiplier' to 0, or choose another 'task'"
            )


def describe_range(numbers: Tensor) -> str:
    """Describe numbers (n,), at least one, by their range: "from 18.8 to 56.4, median 31.9".

    Each number has three significant digits. If n is even, the median is the lower of the two
    middle numbers.
    """
    numbers = numbers.double()
    return f"from {numbers.min():.3g} to {numbers.max():.3g}, median {numbers.median():.3g}"


def task_class(name: str) -> type[Task]:
    """Import and return the class of a task, named as in 'task'.

    Raises:
        SettingError: no task has that name.
    """
    if name not in TASKS:
        raise SettingError(f"there is no task '{name}': choose one of {join_names(TASKS)}")
    module, _, cls = TASKS[name].place.partition(":")
    found: type[Task] = getattr(import_module(module), cls)
    return found


def curve_label(metric: str) -> str:
    """Return the label of a metric's axis in plots.

    The label comes from the first task in ``TASKS`` whose ``curves`` have the metric. If there is
    none, the label is the metric's name.
    """
    for name in TASKS:
        curves = task_class(name).curves
        if metric in curves:
            return curves[metric]
    return metric


def task_of(settings: CommonSettings) -> Task:
    """Create the task that the setting 'task' names, such as classification.

    The task keeps ``settings``. Its module is imported when it is first needed.

    Raises:
        SettingError: no task has that name.
    """
    return task_class(settings.task)(settings)


def task_named(name: str) -> Task:
    """Build a task by its name with default settings, for callers that know no run's settings.

    Such a task suits work on labels or strata (groups of samples, such as the classes).

    Raises:
        SettingError: no task has that name.
    """
    return task_class(name)(CommonSettings())
