"""The report for the clinic: the sites, the model's errors by class, and its certainty."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsilo.core.metric_names import CERTAINTY, CLASS, CONFIDENCE, TRAINED_PREFIX, UNCERTAINTY
from fedsilo.core.settings.common_settings import SERVER
from fedsilo.models.measures.intervals import Estimate, of_auc, of_share, wilson
from fedsilo.models.measures.outcome_counts import Bin, bins, merge_bins
from fedsilo.pages.page import NONE, Picture, Table, hide_small_count, share, with_interval
from fedsilo.pages.page_pictures import certainty, estimates
from fedsilo.reports.run_facts import head_of, taking_part, task_parts
from fedsilo.runs.finished_run import Shown
from fedsilo.server_app.records.partial_means import SiteMetrics

TITLE = "Not for clinical use"
WARNING = (
    "This is the result of research software, not a medical device: nobody has examined whether "
    "decisions that rest on it are good for patients."
)
INTERVALS = (
    "In brackets: 95 % intervals. For shares they are Wilson's. For AUC they use Hanley and "
    "McNeil's standard error in Newcombe's form, on the logit scale. They hold for patients like "
    "these at the same site, if each patient is counted once."
)
COLUMNS = ("sensitivity", "specificity", "PPV", "NPV", "AUC")  # of ``ClassOutcome.cells``
_DRAWN_CLASSES = 6


@dataclass(frozen=True)
class Examination:
    """A section of the clinic report that needs the sites' data, such as accuracy by group.

    If it cannot be computed, it has only sentences that explain why.
    """

    title: str
    sentences: Sequence[str] = ()  # a paragraph each
    picture: Picture | None = None
    tables: Sequence[Table] = ()


def clinic_data(run: Shown, examinations: Sequence[Examination] = ()) -> dict[str, Any]:
    """Build the template variables of a run's section in ``clinic.html``, the page for the clinic.

    Every run has variables on the sites, the main result and its main limitation. A run of
    classification also has tables and pictures by site, by class and by certainty. Any other run
    has the sections of its task's module instead, such as one on survival.

    Args:
        run: the run; metrics and counts of too few patients are already hidden.
        examinations: further sections, which were built from the sites' data.
    """
    metrics = final_metrics(run)
    parts = task_parts(run.task)
    if parts:
        return {
            **taking_part(run),
            "head": _head(run),
            "has_classes": False,
            "examinations": [*parts.sections(run), *examinations],
            "groups": bool(examinations),
            "withheld": ", ".join(run.withheld),
        }
    outcomes = {}
    for site, by_name in metrics.items():
        counts, samples = _test_counts(run, site)
        if counts:
            outcomes[site] = class_outcomes(by_name, run.class_names(site), counts, samples)
    return {
        **taking_part(run),
        "head": _head(run),
        "has_classes": True,
        "examinations": examinations,
        "groups": bool(examinations),
        "withheld": ", ".join(run.withheld),
        **_overall(run, metrics),
        **_by_class(run, outcomes),
        **_certainty(run, metrics),
    }


def _head(run: Shown) -> dict[str, Any]:
    """Build the template variables for the head of the clinic's page.

    They are the variables of ``head_of``: facts, the main result and its main limitation. One more
    fact is named "without a result". It has up to two parts, and is left out without either:

    - At trust level ``server``, the number of samples that each site left out because of an
      unusable value. Numbers below the run's floor are hidden.
    - The names of the sites with hidden results.
    """
    head = head_of(run)
    missing = []
    if run.trust == SERVER:
        # A hidden number is None; whether it is 0 must not be told either
        left_out = [
            f"{site} {hide_small_count(known['dropped'], run.floor)}"
            for site, known in run.silos.items()
        ]
        missing.append(
            f"left out for a missing, impossible or unreadable value: {', '.join(left_out)}"
        )
    if run.withheld:
        missing.append(
            f"not shown: some results of {', '.join(run.withheld)}, which cover fewer than "
            f"{run.floor} {run.noun(2)}, or would reveal a result that does"
        )
    if missing:
        head["facts"] = [*head["facts"], ("without a result", "; ".join(missing))]
    return head


def _test_counts(run: Shown, site: str) -> tuple[list[int | None], int]:
    """Return a site's number of test samples in each class, and their total.

    The numbers are in the order of the classes. A number that is too small to be shown is None. A
    total that is hidden or unknown is 0. If the site does not report counts by class, the list is
    empty. A site that is not part of the run gets an empty list and 0.
    """
    if site not in run.silos:
        return [], 0
    facts = run.silos[site]
    return facts["label_counts"].get("test", []), facts["sizes"].get("test") or 0


def _overall(run: Shown, metrics: SiteMetrics) -> dict[str, Any]:
    """Build the template variables for the accuracy at each site: a table and a picture.

    ``overall`` has a row per site. Its cells are the site's name, the number of test samples, the
    accuracy with its 95 % interval, the balanced accuracy, and the AUC. ``accuracy`` is a list with
    one picture of all accuracies. The list is empty if no site has an accuracy.
    """
    rows, descriptions = [], []
    drawn: dict[str, Estimate] = {}
    for site, by_name in metrics.items():
        samples = _test_counts(run, site)[1]
        size = f"{samples:,}" if samples else NONE
        accuracy = _accuracy(by_name, samples)
        cell = with_interval(accuracy)
        balanced, auc = share(by_name.get("balanced-accuracy")), share(by_name.get("auc"))
        # Only accuracy has an interval here; the tables by class have intervals of their own
        rows.append([site, size, cell, balanced, auc])
        if accuracy:
            drawn[site] = accuracy
            descriptions.append(f"{site}: {cell}, {size} samples")
    if not drawn:
        return {"overall": rows, "accuracy": []}
    label = f"share of test {run.noun(2)} that is right"
    svg = estimates(f"{run.name}-accuracy", {"accuracy": drawn}, label)
    alt = f"Accuracy by site. {'; '.join(descriptions)}."
    return {
        "overall": rows,
        "accuracy": [Picture(svg, alt, "Accuracy by site, 95 % intervals.")],
    }


def _accuracy(metrics: Mapping[str, float], samples: int) -> Estimate | None:
    """Return a site's accuracy with its 95 % Wilson interval; None if ``accuracy`` is missing.

    ``samples`` is the site's number of test samples. A number of 0 means that the number is unknown
    or must not be shown. The estimate then has no interval.
    """
    accuracy = metrics.get("accuracy")
    if accuracy is None:
        return None
    if not samples:
        return Estimate(accuracy)
    # A hospital's noise may move an accuracy out of [0, 1]
    right = min(samples, max(0, round(accuracy * samples)))
    return Estimate(accuracy, wilson(right, samples))


Outcomes = Mapping[str, Sequence["ClassOutcome"]]  # site -> its classes


def _by_class(run: Shown, outcomes: Outcomes) -> dict[str, Any]:
    """Build the template variables that show how well the model recognises each class.

    ``classes`` has a table for each site that has outcomes, with a row per class. ``class_columns``
    has the headings, such as "sensitivity". ``class_pictures`` has pictures, each of which compares
    the sites for one class. If no site reports how many predictions of a class are right or false,
    ``classes`` is empty and the other keys are missing.

    Args:
        run: the run, for its name in the pictures and the number of test samples in the tables.
        outcomes: site -> the outcomes of its classes.
    """
    tables = []
    is_reported = False
    for site, by_class in outcomes.items():
        if by_class:
            tables.append(_class_table(run, site, by_class))
        for outcome in by_class:
            if outcome.right is not None or outcome.false is not None:
                is_reported = True
    if not is_reported:
        return {"classes": []}
    return {
        "classes": tables,
        "class_columns": list(COLUMNS),
        "class_pictures": list(_class_pictures(run.name, outcomes)),
    }


def _class_table(run: Shown, site: str, by_class: Sequence[ClassOutcome]) -> dict[str, Any]:
    """Build the template variables for the table of a site's classes.

    ``caption`` names the site and its number of test samples. ``rows`` has a row for each class in
    ``by_class``, with its name and its measures. ``hidden`` tells whether some cell is "n/a",
    because the page then explains the term.
    """
    rows = []
    is_hidden = False
    for outcome in by_class:
        cells = outcome.cells()
        # A note below the table explains "n/a", and only a table with one needs it
        is_hidden |= NONE in cells
        rows.append([outcome.name, *cells])
    samples = _test_counts(run, site)[1]
    return {
        "caption": f"{site}, {samples:,} test {run.noun(samples)}",
        "rows": rows,
        "hidden": is_hidden,
    }


def _class_pictures(run: str, outcomes: Outcomes) -> Iterator[Picture]:
    """Draw a picture for each class that shows how well the sites recognise the class.

    A picture shows the sensitivity and the specificity at each site, with 95 % intervals. Of more
    than six classes, only the first six are drawn. Of two classes, only the second is drawn,
    because the sensitivity of one class is the specificity of the other. A class is skipped if no
    site has either measure.

    Args:
        run: the run's name. The names of the pictures begin with it.
        outcomes: site -> the outcomes of its classes.
    """
    names: dict[str, None] = {}
    for by_class in outcomes.values():
        names |= dict.fromkeys(outcome.name for outcome in by_class)
    # Nobody would read a page with more pictures to its end
    drawn = list(names)[:_DRAWN_CLASSES]
    if len(names) == 2:
        drawn = drawn[1:]
    for name in drawn:
        sensitivity, specificity = {}, {}
        for site, by_class in outcomes.items():
            for outcome in by_class:
                if outcome.name == name:
                    sensitivity[site] = outcome.sensitivity()
                    specificity[site] = outcome.specificity()
        series = {
            "sensitivity": _drop_missing(sensitivity),
            "specificity": _drop_missing(specificity),
        }
        descriptions = []
        for title, by_site in series.items():
            for site, estimate in by_site.items():
                descriptions.append(f"{site}: {title} {with_interval(estimate)}")
        if descriptions:
            svg = estimates(f"{run}-class-{name}", series, "share, with 95 % interval")
            alt = f"Class {name} by site. {'; '.join(descriptions)}."
            yield Picture(svg, alt, f"Class {name}: by site.")


def _drop_missing(by_site: Mapping[str, Estimate | None]) -> dict[str, Estimate]:
    """Return the sites whose estimate is not None."""
    return {site: estimate for site, estimate in by_site.items() if estimate}


def _certainty(run: Shown, metrics: SiteMetrics) -> dict[str, Any]:
    """Build the template variables that show whether a more certain model is more often right.

    Test samples of all sites are grouped into bins, once by confidence (the largest probability)
    and once by uncertainty. Evidential networks add bins by vacuity (lack of evidence). Bins with
    too few samples to be shown are joined with their neighbours.

    ``confidence`` and ``uncertainty`` are tables of bins. ``calibration`` has each site's
    calibration error. ``diagrams`` has a picture for each kind of bins, and is empty without bins
    of confidence.
    """
    # Bins with fewer samples than the floor are joined with their neighbours
    sites = metrics.values()
    # Counts by bin are added over sites, because a single site fills few bins
    confidence = merge_bins(bins(sites, CONFIDENCE), run.floor)
    uncertainty = merge_bins(bins(sites, UNCERTAINTY), run.floor)
    vacuity = merge_bins(bins(sites, CERTAINTY), run.floor)
    diagrams = []
    if confidence:
        label = "confidence: the largest probability"
        diagrams = [
            _diagram(f"{run.name}-reliability", confidence, label, diagonal=True),
            _diagram(f"{run.name}-uncertainty", uncertainty, "uncertainty"),
        ]
        if vacuity:
            diagrams.append(_diagram(f"{run.name}-vacuity", vacuity, "vacuity (1: no evidence)"))
    calibration = []
    for site, by_name in metrics.items():
        if "calibration-error" in by_name:
            calibration.append([site, share(by_name["calibration-error"])])
    return {
        "confidence": _bin_rows(confidence),
        "uncertainty": _bin_rows(uncertainty),
        "calibration": calibration,
        "diagrams": diagrams,
    }


def _diagram(name: str, filled: Sequence[Bin], label: str, *, diagonal: bool = False) -> Picture:
    """Draw the share of right predictions in each bin of certainty, with 95 % intervals.

    Args:
        name: the picture's name, unique on its page.
        filled: the bins; each must have samples.
        label: the name of the measure by which samples are binned, such as "uncertainty".
        diagonal: whether to draw the line of perfect calibration.
    """
    descriptions = []
    for one in filled:
        descriptions.append(f"at {one.mean:.2f} right {one.right / one.count:.2f} of {one.count}")
    return Picture(
        certainty(name, filled, label, diagonal=diagonal),
        f"Share of right answers by {label}, all sites together: {'; '.join(descriptions)}.",
        f"Right answers by {label}; numbers: samples; bars: 95 % intervals.",
    )


def _bin_rows(filled: Sequence[Bin]) -> list[list[str]]:
    """Build a row per bin: its mean, its number of samples, and its share of right predictions."""
    rows = []
    for one in filled:
        rows.append([share(one.mean), f"{one.count:,}", with_interval(one.share())])
    return rows


@dataclass(frozen=True)
class ClassOutcome:
    """The test samples of one class at one site, and how well the model recognises the class.

    ``right``, ``false`` and ``auc`` are None if the site has too few samples to report them.
    """

    name: str
    samples: int  # samples of the class
    others: int  # samples of all other classes
    right: int | None  # samples of the class that are predicted as the class
    false: int | None  # samples of other classes that are predicted as the class
    auc: float | None

    def sensitivity(self) -> Estimate | None:
        """Return the share of the class's samples that are predicted as the class.

        The result is None if the count of right predictions is not reported, or if the number of
        the class's samples is 0.
        """
        if self.right is None or not self.samples:
            return None
        return of_share(self.right, self.samples)

    def specificity(self) -> Estimate | None:
        """Return the share of the other classes' samples that are not predicted as the class.

        The result is None if all samples are of the class, or if the metrics lack its false
        predictions.
        """
        if self.false is None or not self.others:
            return None
        return of_share(self.others - self.false, self.others)

    def positive_predictive_value(self) -> Estimate | None:
        """Return the share of the samples predicted as the class that belong to it.

        The result is None if nothing is predicted as the class, or if the metrics lack its right or
        its false predictions.
        """
        if self.right is None or self.false is None or not self.right + self.false:
            return None
        return of_share(self.right, self.right + self.false)

    def negative_predictive_value(self) -> Estimate | None:
        """Return the share of the samples predicted as other classes that are not of this class.

        The result is None if all samples are predicted as this class. It is also None if the number
        of right predictions of this class is unknown, or the number of false ones.
        """
        if self.right is None or self.false is None:
            return None
        missed = self.samples - self.right
        rejected = self.others - self.false
        if not missed + rejected:
            return None
        return of_share(rejected, missed + rejected)

    def area(self) -> Estimate | None:
        """Return the AUC of the class against all other classes, with interval; None if unknown."""
        if self.auc is None:
            return None
        return Estimate(self.auc, of_auc(self.auc, self.samples, self.others))

    def cells(self) -> list[str]:
        """Format the class's cells in the table: its number of samples, then five estimates.

        The estimates are the sensitivity, the specificity, both predictive values and the AUC. Each
        has its 95 % interval. A missing estimate is "n/a".
        """
        return [
            f"{self.samples:,}",
            with_interval(self.sensitivity()),
            with_interval(self.specificity()),
            with_interval(self.positive_predictive_value()),
            with_interval(self.negative_predictive_value()),
            with_interval(self.area()),
        ]


def final_metrics(run: Shown) -> dict[str, dict[str, float]]:
    """Collect the metrics on test samples in the last round: site -> metric -> value.

    The metrics include counts, such as the right predictions of a class. Metrics of a model that a
    site trained only on its own data are left out.
    """
    metrics: dict[str, dict[str, float]] = {}
    for site, by_name in run.last_metrics("test").items():
        metrics[site] = {}
        for name, value in by_name.items():
            # A site's own trained model is not the run's result
            if not name.startswith(TRAINED_PREFIX):
                metrics[site][name] = value
    return metrics


def class_outcomes(
    metrics: Mapping[str, float], names: Sequence[str], counts: Sequence[int | None], total: int
) -> list[ClassOutcome]:
    """Collect for each class of a site how many test samples it has and how well it is recognised.

    A class is left out if its number of samples is 0 or hidden. A measure that the metrics lack is
    None. False predictions of a class are samples of another class that are predicted as this
    class. If ``names`` and ``counts`` differ in length, the result is empty, because ``counts`` is
    then not about classes.

    Args:
        metrics: the site's metrics from ``final_metrics``.
        names: the names of the classes.
        counts: the site's test samples of each class; None for a hidden number.
        total: the site's test samples of all classes together.
    """
    outcomes: list[ClassOutcome] = []
    if len(names) != len(counts):
        return outcomes
    # Metrics are named by the class's number, such as class.1.right
    for label, (name, samples) in enumerate(zip(names, counts, strict=True)):
        if not samples:
            continue
        others = total - samples
        right = _count(metrics.get(f"{CLASS}.{label}.right"), samples)
        false = _count(metrics.get(f"{CLASS}.{label}.false"), others)
        auc = metrics.get(f"{CLASS}.{label}.auc")
        outcomes.append(ClassOutcome(name, samples, others, right, false, auc))
    return outcomes


def _count(reported: float | None, most: int) -> int | None:
    """Round a reported count down to a whole number of at most ``most``; None stays None."""
    if reported is None:
        return None
    # A hospital rounds what it reports, so a count may exceed its samples
    return min(int(reported), most)
