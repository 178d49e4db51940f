"""Draw a run's learning curves (UEFL paper, figures 7 to 11), and all its other pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsilo.core.drawing.palette import BLACK, GREY, LIGHT, LineStyle, line_styles
from fedsilo.core.drawing.panels import line_legend
from fedsilo.core.errors import RunDirectoryError
from fedsilo.core.metric_names import UPDATE, best_direction
from fedsilo.core.one_line import as_word, reason_of
from fedsilo.models.tasks.task import Task, task_class
from fedsilo.pictures.documents import draw_buffer, draw_cross, draw_forgotten, draw_routing
from fedsilo.pictures.labels_and_evidence import draw_distribution, draw_evidence
from fedsilo.pictures.panel_grids import over_rounds, panel_grid
from fedsilo.pictures.picture_files import write_for_screen_and_paper
from fedsilo.pictures.survival import draw_survival
from fedsilo.pictures.topology import draw_edge_weights, draw_topology
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.records.summary import MANY, worst

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lines = Mapping[str, Mapping[int, float]]
Series = dict[str, dict[int, float]]
_BANDS = ((0.05, 0.95, LIGHT), (0.25, 0.75, GREY))


def draw_lines(
    axes: Axes, lines: Lines, styles: Mapping[str, LineStyle], *, high_is_worse: bool = False
) -> None:
    """Draw lines over rounds in a panel.

    If there are more than 20 lines, only their median, the bands that hold 90 % and 50 % of them,
    and the five lines with the worst last values are drawn. The panel then has its own legend, and
    ``styles`` is not used.

    Args:
        axes: the panel.
        lines: name of a line -> round -> value.
        styles: name of a line -> its style.
        high_is_worse: whether the lines with the highest last values are the worst.
    """
    many = len(lines) > MANY
    if many:
        _draw_spread(axes, lines)
        # A site may be missing in the last round: then its own last round counts
        last = {name: line[max(line)] for name, line in lines.items()}
        lines = {name: lines[name] for name in worst(last, high_is_worse=high_is_worse)}
        styles = line_styles(list(lines))
    for name, line in lines.items():
        style = styles[name].options()
        axes.plot(list(line), list(line.values()), label=name, markersize=4, **style)
    if many:
        axes.legend(fontsize="x-small")


def _draw_spread(axes: Axes, lines: Lines) -> None:
    """Draw the median of many lines per round, and the bands that hold 90 % and 50 % of the lines.

    A line without a value in a round is ignored in that round.
    """
    # A site that was away in a round has no value in it
    values_of: dict[int, list[float]] = {}
    for line in lines.values():
        for round_, value in line.items():
            values_of.setdefault(round_, []).append(value)
    rounds = sorted(values_of)
    for low, high, colour in _BANDS:
        edges = np.array([np.quantile(values_of[round_], (low, high)) for round_ in rounds])
        label = f"{low:.0%} to {high:.0%} of {len(lines)}"
        axes.fill_between(rounds, *edges.T, color=colour, alpha=0.6, linewidth=0, label=label)
    medians = [np.median(values_of[round_]) for round_ in rounds]
    axes.plot(rounds, medians, color=BLACK, label="median")


_CONTRIBUTIONS = {"norm": "norm of update", "cosine": "cosine to the model's step"}
_ONE_ROW = 4  # panels at most

# JSON file of a run -> function that draws it
_DRAWN_BY: Mapping[str, Callable[[Any], Mapping[str, Figure]]] = {
    "silos.json": draw_distribution,
    "cross.json": draw_cross,
    "topology.json": draw_topology,
    "closeness.json": draw_edge_weights,
    "forgotten.json": draw_forgotten,
    "buffer.json": draw_buffer,
    "routing.json": draw_routing,
    "evidence.json": draw_evidence,
}


def series(
    rows: Iterable[Mapping[str, str]],
    metric: str,
    distribution_of: Mapping[str, str],
    split: str = "test",
) -> Series:
    """Average a metric over the sites of each distribution, round by round.

    Args:
        rows: rows of metrics.csv, with round, site, split, metric and value.
        metric: the name of the metric. Rows of other metrics are ignored.
        distribution_of: site -> distribution, a name for the kind of its data. A site without an
            entry, such as 'all', gets its own name as its distribution.
        split: the split. Rows of other splits are ignored.

    Returns:
        Distribution -> round -> mean value, sorted by distribution and round; {} if all rows are
        ignored.
    """
    values_of: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["split"] == split and row["metric"] == metric:
            # A run at trust 'sums' has only the site 'all', which has no distribution
            name = distribution_of.get(row["site"], row["site"])
            values_of[name][int(row["round"])].append(float(row["value"]))
    lines: Series = {}
    for name, rounds in sorted(values_of.items()):
        lines[name] = {}
        for round_, values in sorted(rounds.items()):
            lines[name][round_] = sum(values) / len(values)
    return lines


def draw_run(directory: RunDirectory) -> Iterator[Path]:
    """Draw all pictures of a run that has ended, and yield the path of each written file.

    Each picture is written into the run directory, as a PNG and as a PDF.

    Raises:
        RunDirectoryError: the run has not ended, or one of its files has an unknown structure.
    """
    yield from draw_curves(directory)
    yield from draw_survival_curves(directory)
    yield from draw_documents(directory)


def draw_pictures(directory: RunDirectory, say: Callable[[str], None]) -> None:
    """Draw all pictures of a run that has ended, and continue if a picture cannot be drawn.

    No error is raised, because a run is complete without its pictures.

    Args:
        directory: the run.
        say: called with a line of text for each file that cannot be drawn.
    """
    drawing: dict[str, Callable[[], object]] = {
        "metrics.csv": partial(draw_curves, directory),
        "survival.png": partial(draw_survival_curves, directory),
    }
    for name in _DRAWN_BY:
        if (directory.path / name).is_file():
            drawing[name] = partial(_draw_document, directory, name)
    for name, draw in drawing.items():
        try:
            draw()
        except Exception as error:  # matplotlib's own, a full disk: the run has ended well
            say(
                f"cannot draw {name} ({reason_of(error)}); the run is complete without it; to try "
                f"again: fedsilo plot {as_word(directory.path)}"
            )


def draw_curves(directory: RunDirectory) -> list[Path]:
    """Draw ``curves.png``: test metrics over rounds, or validation metrics without test metrics.

    Each metric that the task names for this picture has a panel, with a line per distribution of
    the sites. If metrics.csv has measurements of the sites' updates, ``contributions.png`` is drawn
    too. It shows over the rounds the norm of each site's update, and the cosine between this update
    and the change of the shared model. Both pictures are also written as PDF.

    Returns:
        The paths of all files. If the run has none of the metrics that the task names, the list is
        empty and nothing is drawn.

    Raises:
        RunDirectoryError: the run has not ended.
    """
    run = FinishedRun(directory.path)
    summary, rows = run.summary, run.metric_rows
    distribution_of = {site: facts["distribution"] for site, facts in run.silos.items()}
    split = "val"
    if any(row["split"] == "test" for row in rows):
        split = "test"
    panels = {}
    task = task_class(run.task)
    for metric, name in task.curves.items():
        lines = series(rows, metric, distribution_of, split)
        if lines:
            panels[f"{split} {name}"] = lines
    if not panels:
        return []
    title = f"{summary['title']} on {summary['dataset']}, seed {summary['seed']}"
    marks = {int(round_): mark for round_, mark in summary["marks"].items()}
    pictures = {"curves.png": _draw_lines(title, panels, _better_high(task, split), marks)}
    # The updates of every site are drawn, not their means by distribution
    senders = {row["site"]: row["site"] for row in rows if row["split"] == UPDATE}
    if senders:
        updates = {}
        for metric, label in _CONTRIBUTIONS.items():
            updates[label] = series(rows, metric, senders, UPDATE)
        title = "Each site's update, round by round"
        pictures["contributions.png"] = _draw_lines(title, updates, [_CONTRIBUTIONS["cosine"]])
    return _write_pictures(directory, pictures)


def draw_survival_curves(directory: RunDirectory) -> list[Path]:
    """Draw ``survival.png`` of a run: the Kaplan-Meier curves that its sites have published.

    Returns:
        The paths of the PNG and the PDF. If no site has published a curve, for example because the
        run does not predict survival, the list is empty and nothing is drawn.

    Raises:
        RunDirectoryError: metrics.csv is damaged, or is missing because no round has ended yet.
    """
    return _write_pictures(directory, draw_survival(FinishedRun(directory.path).metric_rows))


def _better_high(task: type[Task], split: str) -> list[str]:
    """Return the labels of the panels in which a high value is good."""
    return [f"{split} {label}" for name, label in task.curves.items() if best_direction(name) > 0]


def _draw_lines(
    title: str,
    panels: Mapping[str, Series],
    better_high: Collection[str],
    marks: Mapping[int, str] | None = None,
) -> Figure:
    """Draw a figure with a panel of lines over rounds for each entry of ``panels``.

    Up to four panels stand in one row. More panels stand in rows of three. Lines with the same name
    have the same style in all panels. Of more than 20 lines, a panel names only the worst.

    Args:
        title: the title of the picture.
        panels: label of a panel -> name of a line -> round -> value.
        better_high: the labels of the panels where low values are the worst. In other panels, high
            values are the worst.
        marks: round -> a remark. Each gets a vertical line in every panel, and its text stands
            below all panels. None for no marks.
    """
    columns = len(panels)
    if len(panels) > _ONE_ROW:
        columns = 3
    figure, grid = panel_grid(len(panels), columns, (4.2, 3.2), (1.2, 0.4))
    # One style for each name, so that a site has the same colour in all panels
    names: set[str] = set()
    for lines in panels.values():
        names |= lines.keys()
    styles = line_styles(sorted(names))
    marks = marks or {}
    for axes, (label, lines) in zip(grid, panels.items(), strict=True):
        draw_lines(axes, lines, styles, high_is_worse=label not in better_high)
        for round_ in marks:
            axes.axvline(round_, linestyle="--", color=GREY, linewidth=1)
        over_rounds(axes)
        axes.set_xlabel("round")
        axes.set_ylabel(label)
    if len(styles) <= MANY:
        line_legend(figure, styles)
    mark_texts = [f"round {round_}: {mark}" for round_, mark in marks.items()]
    figure.supxlabel("\n".join(mark_texts), fontsize="small", color=GREY)
    figure.suptitle(title, fontsize="medium")
    return figure


def draw_documents(directory: RunDirectory) -> list[Path]:
    """Draw the pictures of those JSON files in a run directory that have one, such as routing.json.

    Each picture is written into the same directory, as a PNG and as a PDF.

    Returns:
        The paths of all written files.

    Raises:
        RunDirectoryError: a file cannot be read, or has an unknown structure.
    """
    paths: list[Path] = []
    for name in _DRAWN_BY:
        if (directory.path / name).is_file():
            paths += _draw_document(directory, name)
    return paths


def _draw_document(directory: RunDirectory, name: str) -> list[Path]:
    """Draw the pictures of one JSON file of a run, such as routing.json, and return their paths.

    Raises:
        RunDirectoryError: the file cannot be read, or has an unknown structure.
    """
    try:
        pictures = _DRAWN_BY[name](directory.read_json(name))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise RunDirectoryError(
            f"cannot draw {directory.path / name} ({type(error).__name__}): the file has another "
            "form; was it altered, or written by another version of fedsilo?"
        ) from None
    return _write_pictures(directory, pictures)


def _write_pictures(directory: RunDirectory, pictures: Mapping[str, Figure]) -> list[Path]:
    """Write each figure into the run directory, as a PNG and as a PDF.

    ``pictures`` maps the file name of each PNG to the figure. Existing files are replaced. The
    result has the paths of all written files.
    """
    paths: list[Path] = []
    for name, figure in pictures.items():
        paths += write_for_screen_and_paper(directory.path / name, figure)
    return paths
