"""Metrics of several findings per sample: AUC and average precision by finding, and their means."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedsilo.core.metric_names import FINDING
from fedsilo.models.measures.classification_metrics import average_precision, roc_auc


def mean_over_findings(probabilities: Tensor, present: Tensor) -> dict[str, float]:
    """Average the AUC and the average precision over the findings.

    A finding is a label that each sample has or lacks. The mean leaves out findings that all
    samples have and findings that no sample has, because both metrics are undefined for them.

    Args:
        probabilities: the probability of each finding, (n, findings).
        present: True where a sample has a finding, (n, findings) bool.

    Returns:
        The two means under the names ``auc`` and ``average-precision``. The result is empty if all
        findings are left out.
    """
    areas, precisions = [], []
    for place in range(present.shape[1]):
        has = present[:, place]
        if has.any() and not has.all():
            areas.append(roc_auc(probabilities[:, place], has).item())
            precisions.append(average_precision(probabilities[:, place], has))
    if not areas:
        return {}
    return {
        "auc": sum(areas) / len(areas),
        "average-precision": sum(precisions) / len(precisions),
    }


def finding_counts(probabilities: Tensor, present: Tensor, minimum: int) -> dict[str, float]:
    """Compute the number of samples with each finding and the finding's AUC.

    A finding is a label that each sample has or lacks. Small counts could reveal patients, so the
    finding is left out if too few samples have it or too few lack it.

    Args:
        probabilities: the probability of each finding, (n, findings).
        present: True where a sample has a finding, (n, findings) bool.
        minimum: the smallest number of samples that must have a finding. As many must lack it. 0
            counts as 1.

    Returns:
        ``finding.<k>.count`` and ``finding.<k>.auc`` for finding k, numbered from 0.
    """
    found = {}
    for place in range(present.shape[1]):
        has = present[:, place]
        positives = int(has.sum())
        if min(positives, len(has) - positives) >= max(minimum, 1):
            found[f"{FINDING}.{place}.count"] = float(positives)
            found[f"{FINDING}.{place}.auc"] = roc_auc(probabilities[:, place], has).item()
    return found


@dataclass(frozen=True)
class FindingOutcome:
    """A finding at a site: its name, the samples that have it, and its AUC.

    Both are None if too few samples have the finding, or too few lack it.
    """

    name: str
    count: int | None
    auc: float | None


def finding_outcomes(metrics: Mapping[str, float], names: list[str]) -> list[FindingOutcome]:
    """Read each finding's number of samples and AUC from a site's final test metrics.

    Finding k, numbered from 0, has the metrics ``finding.<k>.count`` and ``finding.<k>.auc``. Where
    a metric is missing, the result has None.

    Args:
        metrics: metric -> value.
        names: the names of the findings, whose order the result keeps.
    """
    outcomes = []
    for place, name in enumerate(names):
        count = metrics.get(f"{FINDING}.{place}.count")
        number = None if count is None else int(count)
        outcomes.append(FindingOutcome(name, number, metrics.get(f"{FINDING}.{place}.auc")))
    return outcomes
