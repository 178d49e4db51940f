"""What sites counted at the end of a run, by class and by certainty, as ``metrics.csv`` has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedsilo.models.maths.intervals import Interval, of_auc, wilson
from fedsilo.models.maths.outcome_counts import CLASS
from fedsilo.server_app.studies.report.runs import ReportedRun


@dataclass(frozen=True)
class ClassOutcome:
    """One class at one site: how many samples of it and of others, and what became of them.

    ``right``, ``false`` and ``auc`` are None if the site has too few samples to report them.
    """

    name: str
    samples: int
    others: int
    right: int | None
    false: int | None
    auc: float | None

    def sensitivity(self) -> tuple[float, Interval] | None:
        """Return the share of the class that is found, and Wilson's interval."""
        if self.right is None or not self.samples:
            return None
        return self.right / self.samples, wilson(self.right, self.samples)

    def specificity(self) -> tuple[float, Interval] | None:
        """Return the share of the others that is not taken for the class."""
        if self.false is None or not self.others:
            return None
        spared = self.others - self.false
        return spared / self.others, wilson(spared, self.others)

    def area(self) -> tuple[float, Interval | None] | None:
        """Return the AUC of the class against all others, and its interval."""
        if self.auc is None:
            return None
        return self.auc, of_auc(self.auc, self.samples, self.others)


@dataclass(frozen=True)
class Bin:
    """Test samples of about the same certainty: how many, how many right, their mean."""

    count: int
    right: int
    mean: float


def final_figures(run: ReportedRun) -> dict[str, dict[str, float]]:
    """Return site -> metric -> test figure of the last round, those by class and bin too."""
    last, figures = str(run.summary["rounds"]), dict[str, dict[str, float]]()
    for row in run.run.metrics:
        if row["round"] == last and row["split"] == "test":
            figures.setdefault(row["site"], {})[row["metric"]] = float(row["value"])
    return {
        site: {name: value for name, value in by_name.items() if not name.startswith("trained-")}
        for site, by_name in figures.items()
    }


def class_outcomes(
    figures: Mapping[str, float], names: Sequence[str], counts: Sequence[int]
) -> list[ClassOutcome]:
    """Return a site's classes of which it has test samples.

    Args:
        figures: the site's of ``final_figures``.
        names: of the classes.
        counts: test samples of each class.
    """
    outcomes = []
    for label, (name, samples) in enumerate(zip(names, counts, strict=True)):
        right, false, auc = (
            figures.get(f"{CLASS}.{label}.{part}") for part in ("right", "false", "auc")
        )
        if samples:
            others = sum(counts) - samples
            # A hospital rounds what it reports, so that a count may exceed its samples
            found = None if right is None else min(int(right), samples)
            wrong = None if false is None else min(int(false), others)
            outcomes.append(ClassOutcome(name, samples, others, found, wrong, auc))
    return outcomes


def bins(figures: Iterable[Mapping[str, float]], family: str) -> list[Bin]:
    """Return the bins of a family over all sites together, of the lowest tenth first."""
    total: dict[int, tuple[int, int, float]] = {}
    for by_name in figures:
        for name, count in by_name.items():
            kind, _, rest = name.partition(".")
            place, _, part = rest.partition(".")
            if kind == family and part == "count" and count:
                right, mean = (by_name[f"{kind}.{place}.{p}"] for p in ("right", "mean"))
                n, k, weighted = total.get(int(place), (0, 0, 0.0))
                total[int(place)] = (n + int(count), k + int(right), weighted + count * mean)
    return [Bin(n, min(k, n), w / n) for _, (n, k, w) in sorted(total.items())]
