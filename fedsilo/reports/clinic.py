"""A report for the clinic: who took part, what is found and what is missed, how sure it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsilo.comparison.results import SiteMetrics
from fedsilo.core.metric_names import CERTAINTY, CLASS, CONFIDENCE, UNCERTAINTY
from fedsilo.models.measures.intervals import Estimate, of_auc, of_share, wilson
from fedsilo.models.measures.outcome_counts import Bin, bins, merge_bins
from fedsilo.pages.number_texts import NONE, share, with_interval
from fedsilo.pages.page import Picture, Table
from fedsilo.pages.page_pictures import certainty, estimates
from fedsilo.reports.headline import head_of
from fedsilo.reports.runs import taking_part
from fedsilo.runs.finished_run import Shown

TITLE = "Not for clinical use"
WARNING = (
    "This is the result of research software, not a medical device: nobody has examined whether "
    "decisions that rest on it are good for patients."
)
INTERVALS = (
    "In brackets: 95 % intervals, of shares Wilson's, of AUC by Hanley and McNeil's standard error "
    "in Newcombe's form, on the logit scale. They hold for patients like these of the same site, "
    "each counted once."
)
_DRAWN_CLASSES = 6


@dataclass(frozen=True)
class Examination:
    """A section on one question about a run that only the sites' data answer.

    Such as the accuracy by group of patients. A question without an answer has only sentences.
    """

    title: str
    sentences: Sequence[str] = ()  # a paragraph each
    picture: Picture | None = None
    tables: Sequence[Table] = ()


def clinic_data(run: Shown, examinations: Sequence[Examination] = ()) -> dict[str, Any]:
    """Build the template variables of ``clinic.html`` for a run.

    Args:
        run: the run, without what its pages must not show.
        examinations: further sections, which needed the sites' data; none by default.
    """
    metrics = final_metrics(run)
    outcomes = {
        site: class_outcomes(by_name, run.class_names(site), *_test_counts(run, site))
        for site, by_name in metrics.items()
        if _test_counts(run, site)[0]
    }
    return {
        **taking_part(run),
        "head": head_of(run),
        "examinations": examinations,
        "withheld": ", ".join(run.withheld),
        **_overall(run, metrics),
        **_by_class(run, outcomes),
        **_certainty(run, metrics),
    }


def _test_counts(run: Shown, site: str) -> tuple[list[int | None], int]:
    """Return a site's test samples by class, hidden ones as None, and how many they are."""
    known = run.silos.get(site, {"label_counts": {}, "sizes": {}})
    return known["label_counts"].get("test", []), known["sizes"].get("test") or 0


def _overall(run: Shown, metrics: SiteMetrics) -> dict[str, Any]:
    rows, drawn = [], dict[str, Estimate]()
    for site, by_name in metrics.items():
        samples, accuracy = _test_counts(run, site)[1], by_name.get("accuracy")
        if accuracy is not None:
            drawn[site] = Estimate(accuracy)
        if accuracy is not None and samples:
            right = min(samples, max(0, round(accuracy * samples)))
            drawn[site] = Estimate(accuracy, wilson(right, samples))
        others = (share(by_name.get(name)) for name in ("balanced-accuracy", "auc"))
        size = f"{samples:,}" if samples else NONE
        rows.append([site, size, with_interval(drawn.get(site)), *others])
    if not drawn:
        return {"overall": rows, "accuracy": []}
    alt = "; ".join(f"{row[0]}: {row[2]}, {row[1]} samples" for row in rows if row[0] in drawn)
    label = f"share of test {run.noun(2)} that is right"
    svg = estimates(f"{run.name}-accuracy", {"accuracy": drawn}, label)
    picture = Picture(svg, f"Accuracy by site. {alt}.", "Accuracy by site, 95 % intervals.")
    return {"overall": rows, "accuracy": [picture]}


def _by_class(run: Shown, outcomes: Mapping[str, Sequence[ClassOutcome]]) -> dict[str, Any]:
    known = [o for by_class in outcomes.values() for o in by_class]
    if not any(o.right is not None or o.false is not None for o in known):
        return {"classes": []}
    tables = [_class_table(run, site, by_class) for site, by_class in outcomes.items() if by_class]
    return {"classes": tables, "class_pictures": [*_class_pictures(run.name, outcomes)]}


def _class_table(run: Shown, site: str, by_class: Sequence[ClassOutcome]) -> dict[str, Any]:
    rows = [[outcome.name, *outcome.cells()] for outcome in by_class]
    samples = _test_counts(run, site)[1]
    return {
        "caption": f"{site}, {samples:,} test {run.noun(samples)}",
        "rows": rows,
        "hidden": any(NONE in row for row in rows),
    }


def _class_pictures(run: str, outcomes: Mapping[str, Sequence[ClassOutcome]]) -> Iterator[Picture]:
    """Yield a picture per class, of the first classes; for two classes one shows all."""
    names = list(dict.fromkeys(o.name for by_class in outcomes.values() for o in by_class))
    metrics: dict[str, Callable[[ClassOutcome], Estimate | None]] = {
        "sensitivity": ClassOutcome.sensitivity,
        "specificity": ClassOutcome.specificity,
    }
    for name in names[1:] if len(names) == 2 else names[:_DRAWN_CLASSES]:
        here = {s: o for s, by_class in outcomes.items() for o in by_class if o.name == name}
        series = {
            title: {s: found for s, o in here.items() if (found := metric(o))}
            for title, metric in metrics.items()
        }
        if any(series.values()):
            said = [
                f"{site}: {title} {with_interval(found)}"
                for title, by_site in series.items()
                for site, found in by_site.items()
            ]
            svg = estimates(f"{run}-class-{name}", series, "share, with 95 % interval")
            alt = f"Class {name} by site. {'; '.join(said)}."
            yield Picture(svg, alt, f"Class {name}: by site.")


def _certainty(run: Shown, metrics: SiteMetrics) -> dict[str, Any]:
    families = {
        CONFIDENCE: ("reliability", "confidence: the largest probability"),
        UNCERTAINTY: ("uncertainty", "uncertainty"),
        CERTAINTY: ("vacuity", "vacuity (1: no evidence)"),
    }
    found = {family: merge_bins(bins(metrics.values(), family), run.floor) for family in families}
    return {
        "confidence": _bin_rows(found[CONFIDENCE]),
        "uncertainty": _bin_rows(found[UNCERTAINTY]),
        "calibration": [
            [site, share(f["calibration-error"])]
            for site, f in metrics.items()
            if "calibration-error" in f
        ],
        "diagrams": [
            _diagram(f"{run.name}-{name}", found[family], label, diagonal=family == CONFIDENCE)
            for family, (name, label) in families.items()
            if found[CONFIDENCE] and (found[family] or family == UNCERTAINTY)
        ],
    }


def _diagram(name: str, found: Sequence[Bin], label: str, *, diagonal: bool) -> Picture:
    said = "; ".join(f"at {b.mean:.2f} right {b.right / b.count:.2f} of {b.count}" for b in found)
    return Picture(
        certainty(name, found, label, diagonal=diagonal),
        f"Share of right answers by {label}, all sites together: {said}.",
        f"Right answers by {label}; numbers: samples; bars: 95 % intervals.",
    )


def _bin_rows(found: Sequence[Bin]) -> list[list[str]]:
    return [[f"{b.mean:.3f}", f"{b.count:,}", with_interval(b.share())] for b in found]


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

    def sensitivity(self) -> Estimate | None:
        """Return the share of the class that is found."""
        if self.right is None or not self.samples:
            return None
        return of_share(self.right, self.samples)

    def specificity(self) -> Estimate | None:
        """Return the share of the others that is not taken for the class."""
        if self.false is None or not self.others:
            return None
        return of_share(self.others - self.false, self.others)

    def area(self) -> Estimate | None:
        """Return the AUC of the class against all others."""
        if self.auc is None:
            return None
        return Estimate(self.auc, of_auc(self.auc, self.samples, self.others))

    def cells(self) -> list[str]:
        """Return its samples, sensitivity, specificity and AUC as people read them."""
        metrics = (self.sensitivity(), self.specificity(), self.area())
        return [f"{self.samples:,}", *map(with_interval, metrics)]


def final_metrics(run: Shown) -> dict[str, dict[str, float]]:
    """Return site -> metric -> test metric of the last round, those by class and bin too."""
    return {
        site: {name: value for name, value in by_name.items() if not name.startswith("trained-")}
        for site, by_name in run.last_metrics("test").items()
    }


def class_outcomes(
    metrics: Mapping[str, float], names: Sequence[str], counts: Sequence[int | None], total: int
) -> list[ClassOutcome]:
    """Return a site's classes of which it has test samples whose number may be shown.

    ``metrics`` are the site's of ``final_metrics``. ``counts`` are its test samples by class, None
    where hidden, and ``total`` those of all classes.
    """
    outcomes = []
    for label, (name, samples) in enumerate(zip(names, counts, strict=True)):
        right, false, auc = (
            metrics.get(f"{CLASS}.{label}.{part}") for part in ("right", "false", "auc")
        )
        if samples:
            others = total - samples
            # A hospital rounds what it reports, so that a count may exceed its samples
            found = None if right is None else min(int(right), samples)
            wrong = None if false is None else min(int(false), others)
            outcomes.append(ClassOutcome(name, samples, others, found, wrong, auc))
    return outcomes
