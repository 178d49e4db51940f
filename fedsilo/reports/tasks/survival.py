"""A survival run's parts of reports: how well risks order patients, and survival by site."""

import math
from collections.abc import Mapping, Sequence

from fedsilo.core.drawing.palette import line_styles
from fedsilo.core.settings.common_settings import SERVER
from fedsilo.models.measures.intervals import Estimate, Interval
from fedsilo.models.measures.survival_curves import CurvePoint, read_curve
from fedsilo.pages.page import Picture, Table, share, with_interval
from fedsilo.pages.page_pictures import Band, bands
from fedsilo.reports.clinic import Examination, final_metrics
from fedsilo.reports.tasks.shared import limit_of, values_of
from fedsilo.runs.finished_run import Shown

_METRICS = {"c-index": "C-index", "brier": "integrated Brier score"}
_MEANING = (
    "C-index: take two patients of a hospital, of whom one is known to have had the event earlier; "
    "the C-index says how often the model gives this patient the higher risk. 1 is perfect, and "
    "0.5 is chance. Integrated Brier score: the squared error of the predicted survival, averaged "
    "over time; 0 is perfect, and 0.25 is always saying one half."
)
_ROWS = 6  # largest number of points of a curve in a table


def result(run: Shown, site: str | None) -> str:
    """Describe the main result of a survival run, the C-index on test samples, in two sentences.

    The C-index is that of ``site``, or the mean over all sites if ``site`` is None or empty. The
    text explains it as the share of pairs in which the patient with the earlier event has the
    higher risk. If the run shows no C-index, for example because of too few patients, one sentence
    says so.
    """
    values, where = values_of(run, site)
    if "c-index" not in values:
        return "No C-index on test data may be shown for this run."
    index = values["c-index"]
    return (
        f"The C-index is {index:.2f} ({where}): of two {run.noun(2)} of a hospital, the one with "
        f"the earlier event has the higher risk in {100 * index:.0f} % of the pairs. Chance is "
        "50 %."
    )


def limit(run: Shown, site: str | None) -> str:
    """Describe the main limit of ``result`` in one sentence; ``site`` is not used."""
    return limit_of(run, "no C-index is known")


def sections(run: Shown) -> list[Examination]:
    """Build the sections of the clinic's report: metrics by site, and Kaplan-Meier curves."""
    metrics = final_metrics(run)
    return [_order(run, metrics), _curves(run, metrics)]


def meaning(run: Shown) -> str:
    """Explain the metrics to a reader who does not know them; ``run`` is not used."""
    return _MEANING


def _order(run: Shown, metrics: Mapping[str, Mapping[str, float]]) -> Examination:
    """Build the section of the clinic's page on how well predicted risks order the patients.

    The table has a row for each site. Its columns are the C-index and the integrated Brier score. A
    metric that no site has gets no column. If no site has either metric, the section has only a
    sentence that says so. ``metrics`` maps each site to its metrics on test samples.
    """
    title = "How well it tells high risk from low"
    shown = [name for name in _METRICS if any(name in found for found in metrics.values())]
    if not shown:
        return Examination(title, ["No C-index on test samples may be shown."])
    rows = []
    for site, by_name in metrics.items():
        rows.append([site, *(share(by_name.get(name)) for name in shown)])
    columns = ["site", *(_METRICS[name] for name in shown)]
    table = Table(f"On test {run.noun(2)}, by site", columns, rows)
    return Examination(title, [meaning(run)], tables=[table])


def _curves(run: Shown, metrics: Mapping[str, Mapping[str, float]]) -> Examination:
    """Build the section of the clinic's page with the Kaplan-Meier curves of the sites.

    The picture has a line for each site that published points of a curve. Each of these sites also
    has a table of at most six points, evenly spaced back from the last point. Without curves, the
    section has only a sentence with the reason:

    - If the run's setting ``trust`` is not ``server``, curves do not leave the hospitals.
    - Otherwise, all sites have too few patients.

    Args:
        run: the run.
        metrics: site -> its metrics on test samples, which include the points.
    """
    title = f"How long test {run.noun(2)} stayed without the event"
    if run.trust != SERVER:
        sentence = f"At 'trust: {run.trust}' Kaplan-Meier curves do not leave the hospitals."
        return Examination(title, [sentence])
    found: dict[str, Sequence[CurvePoint]] = {}
    for site, by_name in metrics.items():
        curve = read_curve(by_name)
        if curve:
            found[site] = curve
    if not found:
        sentence = (
            f"No Kaplan-Meier curve may be shown: no site has {run.floor} test {run.noun(2)} with "
            "the event and as many who were followed longer."
        )
        return Examination(title, [sentence])
    sentences = [
        "Kaplan-Meier estimates of the share without the event, with 95 % intervals. A point needs "
        f"{run.floor} {run.noun(2)} with the event since the point before, and as many who are "
        "still followed. The curves describe the patients and do not depend on the model."
    ]
    tables = []
    for site, points in found.items():
        # Counted from the end, because the last point must not be left out
        every = math.ceil(len(points) / _ROWS)
        chosen = list(points)[::-every][::-1]
        columns = ["time", "share without the event", "still followed"]
        tables.append(Table(f"Site {site}", columns, [_point_cells(point) for point in chosen]))
    return Examination(title, sentences, _picture(run, found), tables)


def _point_cells(point: CurvePoint) -> list[str]:
    """Format a point of a curve: its time, its share with the interval, and who is followed."""
    share = Estimate(point.share, Interval(point.low, point.high))
    return [f"{point.time:g}", with_interval(share), f"{point.followed:,}"]


def _picture(run: Shown, found: Mapping[str, Sequence[CurvePoint]]) -> Picture:
    """Draw the Kaplan-Meier curves of the sites with their 95 % intervals in one picture.

    A curve shows the share of patients without the event. It begins at time 0 with a share of 1.
    The alternative text has the last point of each curve.
    """
    lines, texts = {}, []
    for site, points in found.items():
        line = [Band(0.0, 1.0, 1.0, 1.0)]
        for point in points:
            line.append(Band(point.time, point.share, point.low, point.high))
        lines[site] = line
        texts.append(f"{site}: {points[-1].share:.2f} at {points[-1].time:g}")
    label = "share without the event"
    svg = bands(f"{run.name}-survival", lines, line_styles(sorted(lines)), label, "time")
    alt = f"Share without the event over time, by site. At the last point, {'; '.join(texts)}."
    return Picture(svg, alt, "Kaplan-Meier curves of the test samples, 95 % intervals.")
