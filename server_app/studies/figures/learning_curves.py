"""Learning curves of a run as PNG, as in the UEFL paper's figures 7 to 11."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.models.contract.errors import RunDirectoryError
from fedsilo.models.figures.palette import GREY, LineStyle, line_styles
from fedsilo.models.figures.panels import line_legend
from fedsilo.server_app.records.many_sites import MANY
from fedsilo.server_app.records.recorders import UPDATE
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.studies.figures.calibration import draw_distribution, draw_evidence
from fedsilo.server_app.studies.figures.documents import draw_buffer, draw_cross, draw_forgotten
from fedsilo.server_app.studies.figures.many_lines import draw_lines
from fedsilo.server_app.studies.figures.panels import over_rounds, panel_grid
from fedsilo.server_app.studies.figures.routing import draw_routing
from fedsilo.server_app.studies.figures.topology import draw_edge_weights, draw_topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = {
    "accuracy": "accuracy",
    "entropy": "entropy (nats)",
    "perplexity": "codebook perplexity",
    "codebook-loss": "codebook loss (eq. 6)",
    "loss": "loss (nats)",
}

_CONTRIBUTIONS = {"norm": "norm of update", "cosine": "cosine to the model's step"}
_ONE_ROW = 4  # panels at most

# JSON file of a run -> what draws it
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

Series = dict[str, dict[int, float]]


def series(
    rows: Iterable[Mapping[str, str]],
    metric: str,
    distribution_of: Mapping[str, str],
    split: str = "test",
) -> Series:
    """Return, per distribution, the mean value on ``split`` over its sites by round."""
    values_of: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["split"] == split and row["metric"] == metric:
            name = distribution_of[row["site"]]
            values_of[name][int(row["round"])].append(float(row["value"]))
    return {
        name: {round_: sum(values) / len(values) for round_, values in sorted(rounds.items())}
        for name, rounds in sorted(values_of.items())
    }


def draw_run(directory: RunDirectory, summary: Mapping[str, Any]) -> None:
    """Draw the pictures of a run whose summary.json is still to be written."""
    draw_curves(directory, summary)
    draw_documents(directory)


def redraw(run_dir: Path) -> Iterator[Path]:
    """Draw all pictures of a finished run again; yield the place of each.

    Raises:
        RunDirectoryError: the run has not ended.
    """
    directory = RunDirectory(run_dir)
    draw_curves(directory)
    yield directory.path / "curves.png"
    if (contributions := directory.path / "contributions.png").is_file():
        yield contributions
    yield from draw_documents(directory)


def draw_curves(directory: RunDirectory, summary: Mapping[str, Any] | None = None) -> None:
    """Draw ``curves.png`` from the run's own files: test figures, without such validation ones.

    Args:
        directory: the run's.
        summary: the content of a summary.json that is still to be written, or None to read it.

    Raises:
        RunDirectoryError: the run has not ended.
    """
    summary = summary or directory.read_json("summary.json")
    silos = directory.read_json("silos.json")
    distribution_of = {site: facts["distribution"] for site, facts in silos.items()}
    rows = directory.read_csv("metrics.csv")
    split = "test" if any(row["split"] == "test" for row in rows) else "val"
    curves = {metric: series(rows, metric, distribution_of, split) for metric in CURVES}
    drawn = {metric: lines for metric, lines in curves.items() if lines}
    if not drawn:
        return
    figure, panels = _panels(len(drawn))
    styles = line_styles(sorted({name for lines in drawn.values() for name in lines}))
    for axes, (metric, lines) in zip(panels, drawn.items(), strict=True):
        marked = [int(round_) for round_ in summary["marks"]]
        _draw_panel(axes, lines, styles, marked, high_is_worse=metric != "accuracy")
        axes.set_ylabel(f"{split} {CURVES[metric]}")
    if len(styles) <= MANY:
        line_legend(figure, styles)
    marks = [f"round {round_}: {mark}" for round_, mark in summary["marks"].items()]
    figure.supxlabel("\n".join(marks), fontsize="small", color=GREY)
    figure.suptitle(f"{summary['title']} on {summary['dataset']}, seed {summary['seed']}")
    write_picture(directory.path / "curves.png", figure)
    _draw_contributions(directory, rows)


def _draw_contributions(directory: RunDirectory, rows: Iterable[Mapping[str, str]]) -> None:
    """Draw ``contributions.png``, of a run whose sites send updates: each site's in each round."""
    sites = {row["site"]: row["site"] for row in rows if row["split"] == UPDATE}
    if not sites:
        return
    figure, panels = _panels(len(_CONTRIBUTIONS))
    styles = line_styles(sorted(sites))
    for axes, (metric, label) in zip(panels, _CONTRIBUTIONS.items(), strict=True):
        lines = series(rows, metric, sites, UPDATE)
        _draw_panel(axes, lines, styles, high_is_worse=metric == "norm")
        axes.set_ylabel(label)
    if len(styles) <= MANY:
        line_legend(figure, styles)
    figure.suptitle("Each site's update, round by round", fontsize="medium")
    write_picture(directory.path / "contributions.png", figure)


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure of up to four panels in a row, or of more in rows of three."""
    return panel_grid(count, count if count <= _ONE_ROW else 3, (4.2, 3.2), (1.2, 0.4))


def _draw_panel(
    axes: Axes,
    lines: Series,
    styles: Mapping[str, LineStyle],
    marked_rounds: Iterable[int] = (),
    *,
    high_is_worse: bool = False,
) -> None:
    draw_lines(axes, lines, styles, high_is_worse=high_is_worse)
    for round_ in marked_rounds:
        axes.axvline(round_, linestyle="--", color=GREY, linewidth=1)
    over_rounds(axes)
    axes.set_xlabel("round")


def draw_documents(directory: RunDirectory) -> list[Path]:
    """Draw each JSON file of a run that has a picture; return the pictures' files.

    Raises:
        RunDirectoryError: one of them is of another form.
    """
    drawn: dict[str, Figure] = {}
    for name, draw in _DRAWN_BY.items():
        if not (directory.path / name).is_file():
            continue
        try:
            drawn |= draw(directory.read_json(name))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise RunDirectoryError(
                f"{directory.path / name} cannot be drawn ({type(error).__name__}): it is not of "
                "this version's form; was it altered, or written by another version?"
            ) from None
    for name, figure in drawn.items():
        write_picture(directory.path / name, figure)
    return [directory.path / name for name in drawn]


def write_picture(path: Path, figure: Figure) -> None:
    """Write a figure as PNG, completely or not at all."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_atomically(path, picture.getvalue())
