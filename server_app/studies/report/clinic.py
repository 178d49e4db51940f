"""A report for the clinic: who took part, what is found and what is missed, how sure it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from fedsilo.models.maths.intervals import Interval, wilson
from fedsilo.models.maths.outcome_counts import CONFIDENCE, UNCERTAINTY
from fedsilo.server_app.studies.report.numbers import NONE, counted, share, with_interval
from fedsilo.server_app.studies.report.outcomes import (
    Bin,
    ClassOutcome,
    bins,
    class_outcomes,
    final_figures,
)
from fedsilo.server_app.studies.report.page import (
    Block,
    Items,
    Picture,
    Pictures,
    Section,
    Table,
    Text,
)
from fedsilo.server_app.studies.report.pictures import Estimate, Point, certainty, estimates
from fedsilo.server_app.studies.report.runs import ReportedRun
from fedsilo.server_app.studies.report.taking_part import failures, who_took_part

TITLE = "Not for clinical use"
WARNING = (
    "This is the result of research software, and no medical device: nobody has examined whether "
    "decisions that rest on it are good for patients."
)
_INTERVALS = (
    "In brackets: 95 % intervals, of shares Wilson's, of AUC by Hanley and McNeil's standard error "
    "in Newcombe's form, on the logit scale. They hold for patients like these of the same site, "
    "each counted once."
)
_DRAWN_CLASSES = 6
_LIMITS = (
    "Every figure is of test samples that no site trained on, at the sites that trained. How the "
    "model does at another hospital, on another device or in another year, none of them says.",
    "Sites are small: where an interval is wide, the figure in front of it says little.",
    "Groups of patients, by age or sex for example, were not looked at.",
    "The class that a sample gets is that of the largest probability. No threshold was chosen for "
    "what a miss or a false alarm costs.",
)

Figures = Mapping[str, Mapping[str, float]]


def clinic_sections(run: ReportedRun) -> list[Section]:
    """Return the sections about one run."""
    figures = final_figures(run)
    outcomes = {
        site: class_outcomes(by_name, run.class_names(site), _test_counts(run, site))
        for site, by_name in figures.items()
    }
    return [
        Section("Who took part", who_took_part(run)),
        Section("How often it is right", [*_overall(run, figures)]),
        Section("What is found and what is missed, by class", [*_by_class(run.name, outcomes)]),
        Section("Whether its certainty can be trusted", [*_certainty(run.name, figures)]),
        Section("What failed", failures(run)),
        Section("What this report does not say", [Items(_LIMITS)]),
    ]


def _test_counts(run: ReportedRun, site: str) -> list[int]:
    return [int(count) for count in run.run.silos[site]["label_counts"]["test"]]


def _overall(run: ReportedRun, figures: Figures) -> Iterator[Block]:
    if not figures:
        yield Text(["No site measured the model on test samples in this run."])
        return
    rows, drawn = [], dict[str, Estimate]()
    for site, by_name in figures.items():
        samples = sum(_test_counts(run, site))
        accuracy = by_name.get("accuracy")
        interval = _accuracy_interval(accuracy, samples)
        rows.append(
            [
                site,
                f"{samples:,}",
                with_interval(accuracy, interval),
                *(share(by_name.get(name)) for name in ("balanced-accuracy", "auc")),
            ]
        )
        if accuracy is not None:
            drawn[site] = Estimate(accuracy, interval)
    columns = ["site", "test samples", "accuracy", "balanced accuracy", "AUC"]
    yield Table("Test samples, by site", columns, rows, _INTERVALS)
    alt = "; ".join(f"{row[0]}: {row[2]}, {row[1]} samples" for row in rows if row[0] in drawn)
    svg = estimates(_id(run.name, "accuracy"), {"accuracy": drawn}, "accuracy on test samples")
    yield Pictures([Picture(svg, f"Accuracy by site. {alt}.", "Accuracy by site, 95 % intervals.")])


def _accuracy_interval(accuracy: float | None, samples: int) -> Interval | None:
    if accuracy is None or not samples:
        return None
    return wilson(min(samples, max(0, round(accuracy * samples))), samples)


def _by_class(run: str, outcomes: Mapping[str, Sequence[ClassOutcome]]) -> Iterator[Block]:
    told = [o for by_class in outcomes.values() for o in by_class]
    if not any(o.right is not None or o.false is not None for o in told):
        yield Text(
            [
                "The run did not record counts by class: it is of an older version of fedsilo, its "
                "sites have fewer test samples than 'sums-min-count', or hospitals keep such "
                "counts to themselves. Run it again, or ask the hospitals for their own figures."
            ]
        )
        return
    yield Text(
        [
            "Sensitivity: the share of a class that is found. Specificity: the share of the others "
            "that is not taken for it. AUC: how often a sample of the class gets a higher "
            "probability of it than one of another class."
        ]
    )
    for site, by_class in outcomes.items():
        yield _class_table(site, by_class)
    yield Text([_INTERVALS])
    yield Pictures([*_class_pictures(run, outcomes)])


def _class_table(site: str, by_class: Sequence[ClassOutcome]) -> Table:
    rows = [
        [
            outcome.name,
            f"{outcome.samples:,}",
            *(_cell(figure) for figure in _figures_of(outcome)),
        ]
        for outcome in by_class
    ]
    hidden = any(_cell(figure) == NONE for o in by_class for figure in _figures_of(o))
    return Table(
        f"{site}, {counted(sum(o.samples for o in by_class), 'test sample')}",
        ["class", "samples", "sensitivity", "specificity", "AUC"],
        rows,
        f"{NONE}: too few samples stand behind the figure, and the site did not tell it."
        if hidden
        else "",
    )


def _figures_of(outcome: ClassOutcome) -> list[tuple[float, Interval | None] | None]:
    return [outcome.sensitivity(), outcome.specificity(), outcome.area()]


def _cell(figure: tuple[float, Interval | None] | None) -> str:
    return NONE if figure is None else with_interval(*figure)


def _class_pictures(run: str, outcomes: Mapping[str, Sequence[ClassOutcome]]) -> Iterator[Picture]:
    """Yield a picture a class, of the first classes; of two classes one says all."""
    names = list(dict.fromkeys(o.name for by_class in outcomes.values() for o in by_class))
    chosen = names[1:] if len(names) == 2 else names[:_DRAWN_CLASSES]
    figures: dict[str, Callable[[ClassOutcome], tuple[float, Interval] | None]] = {
        "sensitivity": ClassOutcome.sensitivity,
        "specificity": ClassOutcome.specificity,
    }
    for name in chosen:
        here = {
            site: outcome
            for site, by_class in outcomes.items()
            for outcome in by_class
            if outcome.name == name
        }
        series = {
            title: {
                site: Estimate(*found)
                for site, outcome in here.items()
                if (found := figure(outcome)) is not None
            }
            for title, figure in figures.items()
        }
        if not any(series.values()):
            continue
        said = [
            f"{site}: {title} {with_interval(e.value, e.interval)}"
            for title, by_site in series.items()
            for site, e in by_site.items()
        ]
        svg = estimates(_id(run, f"class-{name}"), series, "share, with 95 % interval")
        yield Picture(svg, f"Class {name} by site. {'; '.join(said)}.", f"Class {name}: by site.")


def _certainty(run: str, figures: Figures) -> Iterator[Block]:
    sure, doubtful = (bins(figures.values(), family) for family in (CONFIDENCE, UNCERTAINTY))
    vacant = bins(figures.values(), "certainty")
    if not sure:
        yield Text(
            [
                "The run did not record how often the model is right by how sure it is: it is of "
                "an older version of fedsilo, its sites have fewer test samples than "
                "'sums-min-count', or hospitals keep such counts to themselves."
            ]
        )
        return
    yield Text(
        [
            "A model whose probabilities can be trusted is right in seven of ten samples of which "
            "it says 0.7: its points lie on the dashed line. Points below it are too sure.",
            "Uncertainty is the entropy of the probabilities, as a share of the largest there is. "
            "Where it tells anything, the model is less often right the higher it is.",
        ]
    )
    drawn = [
        _diagram(
            _id(run, "reliability"), sure, "confidence: the largest probability", diagonal=True
        ),
        _diagram(_id(run, "uncertainty"), doubtful, "uncertainty", diagonal=False),
    ]
    if vacant:
        drawn.append(
            _diagram(_id(run, "vacuity"), vacant, "vacuity (1: no evidence)", diagonal=False)
        )
    yield Pictures(drawn)
    yield _bin_table("By confidence, all sites together", "confidence, mean", sure)
    yield _bin_table("By uncertainty, all sites together", "uncertainty, mean", doubtful)
    rows = [[site, share(f.get("calibration-error"))] for site, f in figures.items()]
    yield Table(
        "Calibration error, by site",
        ["site", "calibration error"],
        rows,
        "The mean distance of confidence and share of right answers, over 15 bins; 0 is best. Of "
        "few samples it is above 0 whatever the model.",
    )


def _diagram(name: str, found: Sequence[Bin], label: str, *, diagonal: bool) -> Picture:
    points = [Point(b.mean, b.right / b.count, wilson(b.right, b.count), b.count) for b in found]
    said = "; ".join(f"at {p.x:.2f} right {p.y:.2f} of {p.samples}" for p in points)
    return Picture(
        certainty(name, points, label, diagonal=diagonal),
        f"Share of right answers by {label}, all sites together: {said}.",
        f"Right answers by {label}; numbers: samples; bars: 95 % intervals.",
    )


def _bin_table(caption: str, column: str, found: Sequence[Bin]) -> Table:
    rows = [
        [
            f"{b.mean:.3f}",
            f"{b.count:,}",
            with_interval(b.right / b.count, wilson(b.right, b.count)),
        ]
        for b in found
    ]
    return Table(caption, [column, "samples", "right"], rows)


def _id(run: str, picture: str) -> str:
    """Return a picture's name that is one in its page, whichever runs stand there."""
    return re.sub(r"[^a-z0-9]+", "-", f"{run}-{picture}".lower()).strip("-")
