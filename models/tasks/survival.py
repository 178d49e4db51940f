"""Survival: the time to an event that may be censored, by Cox's proportional hazards.

Equations (doi:10.1111/j.2517-6161.1972.tb00899.x):
  (partial likelihood) of a batch of one site's patients -> partial_likelihood_loss
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fedsilo.core.tasks import SURVIVAL
from fedsilo.models.tasks.task import Task, describe_range

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor


class Survival(Task):
    """The time to an event, such as death, of patients of whom some are censored.

    Labels are (n, 2) float32: the time to the event or to the end of follow-up, at least 0, and 1
    for an event or 0 for a censored patient. The network has one output, the logarithm of a
    patient's hazard relative to others. Patients are only compared with patients of the same site,
    so the model is stratified by site.
    """

    name = SURVIVAL
    headline = "c-index"
    shown: ClassVar = ("c-index", "brier", "loss")
    measured_words = "C-index, integrated Brier score and loss"
    counted_words = (
        "points of the Kaplan-Meier curve of its test patients, each with enough events since the "
        "point before and enough patients still followed"
    )
    curves: ClassVar = {
        "c-index": "C-index",
        "brier": "integrated Brier score",
        "loss": "loss per event (nats)",
    }
    progress: ClassVar = (("c-index", "validation C-index before training {:.3f}"),)
    answer_words: ClassVar = {
        "risk": "the logarithm of the patient's hazard; only differences have a meaning",
        "time": "the time to the event or to the end of follow-up, if it is known",
        "event": "1 if the event happened at that time, 0 if the patient is censored",
    }
    report = "fedsilo.reports.tasks.survival"
    output_name = "risk"
    output_meaning = "the logarithm of the patient's hazard; only differences have a meaning"
    label_noun = "time to an event"
    why_not_private = "compares patients with each other, so one patient changes others' gradients"

    def criterion(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return Cox's loss, a function of outputs (batch, 1) and labels (batch, 2) to a scalar."""
        return partial_likelihood_loss

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the log hazards (batch, 1) unchanged; only their differences have a meaning."""
        return outputs

    def metrics(self, predictions: Tensor, labels: Tensor) -> dict[str, float]:
        """Return the loss and, if they are defined, the C-index and the integrated Brier score.

        - ``loss``: the loss of Cox's model over all samples.
        - ``c-index``: Harrell's C-index. It needs a pair of patients that can be compared.
        - ``brier``: the integrated Brier score. It needs two different times of events before the
          end of follow-up.
        """
        from fedsilo.models.measures.survival_metrics import concordance, integrated_brier_score

        times, events = labels.double().numpy().T
        risks = predictions[:, 0].double().numpy()
        values: dict[str, float] = {
            "loss": partial_likelihood_loss(predictions.double(), labels.double()).item()
        }
        index = concordance(times, events, risks)
        if index is not None:
            values["c-index"] = index
        score = integrated_brier_score(times, events, risks)
        if score is not None:
            values["brier"] = score
        return values

    def counts(self, predictions: Tensor, labels: Tensor, minimum: int) -> dict[str, float]:
        """Return the points of the site's Kaplan-Meier curve that may leave the site, by name.

        The metrics are ``survival.<number>.<part>`` (``published_curve``). The curve depends only
        on the labels. At least ``minimum`` patients must have the event between two points, and at
        least ``minimum`` must still be followed after each point.
        """
        from fedsilo.models.measures.survival_curves import published_curve

        times, events = labels.double().numpy().T
        return published_curve(times, events, minimum)

    def label_fault(self, labels: npt.NDArray[Any], samples: int, names: Sequence[str]) -> str:
        """Explain why an array cannot be the samples' times and events, or return '' if it can.

        The array must be (samples, 2). A time, in the first column, is a finite number of at least
        0. An event is 0 or 1. ``names`` must have one name, that of the event.
        """
        import numpy as np

        if len(names) != 1:
            return f"needs one name in 'classes', that of the event, but there are {len(names)}"
        if labels.shape != (samples, 2) or labels.dtype.kind not in "iuf":
            return (
                f"must be a time and an event for each of {samples} samples, but is {labels.dtype} "
                f"of shape {labels.shape}"
            )
        times, events = labels.T
        if not np.isfinite(times).all() or (times < 0).any():
            return "has a time that is negative or not finite: remove those samples"
        if not np.isin(events, (0, 1)).all():
            return "has an event that is neither 0 (censored) nor 1: correct it"
        return ""

    def strata(self, labels: Tensor) -> Tensor:
        """Return 1 for patients with an event and 0 for censored patients."""
        return labels[:, 1].long()

    def describe(self, names: Sequence[str]) -> str:
        """Describe the prediction by the event's name, as "the time to the event 'dead'"."""
        return f"the time to the event '{', '.join(names)}'"

    def answer_columns(self, predictions: Tensor, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return one column: "risk", the log hazards; a higher risk means an earlier event."""
        return {"risk": predictions[:, 0].tolist()}

    def truth_columns(self, labels: Tensor, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return the columns "time" and "event" (0 or 1) of the known labels."""
        return {"time": labels[:, 0].tolist(), "event": labels[:, 1].long().tolist()}

    def summarise(self, predictions: Tensor, names: Sequence[str]) -> str:
        """Summarise the predicted log hazards in a clause: "risks from -1.2 to 0.85, median 0.1".

        The numbers have three significant digits. Without predictions the clause is "no risk".

        Args:
            predictions: log hazards, (n, 1).
            names: ignored.
        """
        if not len(predictions):
            return "no risk"
        return f"risks {describe_range(predictions[:, 0])}"

    def stratum_names(self, names: Sequence[str]) -> list[str]:
        """Return "censored" and the name of the event, the only one in ``names``."""
        return ["censored", *names]

    def stand_in_labels(self, counts: Sequence[int], outputs: int) -> Tensor:
        """Make placeholder labels (n, 2), times and events, with given numbers of patients.

        All times are 1. The labels are float32.

        Args:
            counts: the number of censored patients (event 0), whose rows come first, and the number
                of patients with an event (1).
            outputs: ignored.
        """
        import torch

        events = torch.repeat_interleave(torch.arange(2.0), torch.tensor(list(counts)))
        return torch.stack([torch.ones_like(events), events], dim=1)


def partial_likelihood_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Compute minus Cox's log partial likelihood of a batch, divided by its number of events.

    At each event, the event's patient is compared with all patients of the batch whose time is not
    shorter. Events at the same time count by Breslow's method. The loss and its gradient are 0 if
    there is no event, or no event has another patient to compare with.

    Args:
        outputs: log hazards, (batch, 1).
        labels: (batch, 2): times, and 1 for an event or 0 if censored.

    Returns:
        A scalar.
    """
    import torch

    times, events = labels[:, 0], labels[:, 1]
    # Autocast leaves logcumsumexp in the outputs' type, and a sum in bf16 soon stops growing
    risks = outputs[:, 0].to(torch.promote_types(outputs.dtype, torch.float32))
    # All patients whose own time is not earlier are at risk
    order = torch.argsort(times, descending=True, stable=True)
    ordered = times[order]
    # The sum of hazards overflows for large risks, its logarithm does not
    totals = torch.logcumsumexp(risks[order], dim=0)
    # Patients of equal times are at risk together, so each takes the total of the last of them
    last = torch.searchsorted(-ordered, -ordered, right=True) - 1
    terms = (totals[last] - risks[order]) * events[order]
    return terms.sum() / events.sum().clamp_min(1.0)
