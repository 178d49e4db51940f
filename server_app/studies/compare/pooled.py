"""Balanced accuracy over the samples of all sites, from what each site measured of its own.

The mean over sites leaves a site of one class out, or, as accuracy, rewards a model that answers
that class there. Pooled, each of its samples counts as one of its class.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedsilo.server_app.studies.finished_run import FinishedRun

POOLED = "pooled-balanced-accuracy"


@dataclass(frozen=True)
class Measured:
    """A site's samples of each of two classes, and what it measured of them.

    ``balanced`` is None where all samples are of one class.
    """

    counts: Sequence[int]
    accuracy: float
    balanced: float | None

    def right(self) -> tuple[int, int] | None:
        """Return how many samples of each class were answered rightly.

        With n samples of each class and r right ones, accuracy is (r0 + r1) / (n0 + n1) and
        balanced accuracy (r0 / n0 + r1 / n1) / 2: two equations, which are one if n0 is n1. Then
        it is None.
        """
        first, second = self.counts
        right = round(self.accuracy * (first + second))
        if not first or not second:
            return (right, 0) if first else (0, right)
        if first == second or self.balanced is None:
            return None
        of_second = (2 * self.balanced - right / first) / (1 / second - 1 / first)
        return right - round(of_second), round(of_second)


def pooled_balanced_accuracy(sites: Iterable[Measured]) -> float | None:
    """Return the mean over two classes of the share of all sites' samples that are right.

    It is None where some site has as many samples of both classes, or all are of one class.
    """
    measured = list(sites)
    found = [site.right() for site in measured]
    counts = [sum(numbers) for numbers in zip(*(site.counts for site in measured), strict=True)]
    if not counts or not all(counts) or None in found:
        return None
    right = [sum(numbers) for numbers in zip(*(one for one in found if one), strict=True)]
    return statistics.fmean(a / b for a, b in zip(right, counts, strict=True))


def pooled_figure(run: FinishedRun, split: str) -> dict[str, float]:
    """Return ``POOLED`` of a run's samples of ``split``, or nothing if it cannot be worked out.

    That needs two classes, and sites that tell their label counts.
    """
    own: dict[str, dict[str, float]] = {}
    for row in run.metrics:  # of the last round that measured
        if row["split"] == split and row["site"] in run.silos:
            own.setdefault(row["site"], {})[row["metric"]] = float(row["value"])
    counts = {site: run.silos[site]["label_counts"].get(split, []) for site in own}
    if any(len(labels) != 2 for labels in counts.values()):
        return {}
    pooled = pooled_balanced_accuracy(
        Measured(counts[site], values["accuracy"], values.get("balanced-accuracy"))
        for site, values in own.items()
        if "accuracy" in values
    )
    return {} if pooled is None else {POOLED: pooled}
