"""Computes balanced accuracy over the samples of all sites, from the metrics of each site.

A mean of balanced accuracy over sites leaves out a site with one class; a mean of accuracy rewards
a model that always predicts this class there. Pooled, each sample counts within its class.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedsilo.runs.finished_run import FinishedRun

POOLED = "pooled-balanced-accuracy"


@dataclass(frozen=True)
class TwoClassMetrics:
    """A site's number of samples in each of two classes, and its metrics on them.

    ``balanced`` is the balanced accuracy; None if all samples are of one class.
    """

    counts: Sequence[int]
    accuracy: float
    balanced: float | None

    def count_correct(self) -> tuple[int, int] | None:
        """Solve for the number of correct predictions in each class; None if not determined.

        With n samples and r correct ones per class, accuracy is (r0 + r1) / (n0 + n1) and balanced
        accuracy is (r0 / n0 + r1 / n1) / 2. If n0 equals n1, the two equations are the same one, so
        they have no single solution.
        """
        first, second = self.counts
        right = round(self.accuracy * (first + second))
        if not second:
            return right, 0
        if not first:
            return 0, right
        if first == second or self.balanced is None:
            return None
        of_second = (2 * self.balanced - right / first) / (1 / second - 1 / first)
        return right - round(of_second), round(of_second)


def pooled_balanced_accuracy(sites: Iterable[TwoClassMetrics]) -> float | None:
    """Compute the balanced accuracy over all sites' samples together.

    None if some site has equally many samples of both classes, or all samples are of one class.
    """
    counts = [0, 0]
    correct = [0, 0]
    for site in sites:
        correct_here = site.count_correct()
        if correct_here is None:
            return None
        for label in (0, 1):
            counts[label] += site.counts[label]
            correct[label] += correct_here[label]
    if not all(counts):
        return None
    return statistics.fmean((correct[0] / counts[0], correct[1] / counts[1]))


def pooled_metric(run: FinishedRun, split: str) -> dict[str, float]:
    """Return ``POOLED`` for a run's samples in ``split``; empty if it cannot be computed.

    The computation needs two classes, and sites that report their label counts.
    """
    own: dict[str, dict[str, float]] = {}
    # Later rows overwrite earlier ones, so the last measured round stays
    for row in run.metric_rows:
        if row["split"] == split and row["site"] in run.silos:
            own.setdefault(row["site"], {})[row["metric"]] = float(row["value"])
    counts = {site: run.silos[site]["label_counts"].get(split, []) for site in own}
    if any(len(labels) != 2 for labels in counts.values()):
        return {}
    measured = []
    for site, values in own.items():
        if "accuracy" in values:
            balanced = values.get("balanced-accuracy")
            measured.append(TwoClassMetrics(counts[site], values["accuracy"], balanced))
    pooled = pooled_balanced_accuracy(measured)
    if pooled is None:
        return {}
    return {POOLED: pooled}
