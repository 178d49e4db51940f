"""Learning curves of a run as PNG, as in the UEFL paper's figures 7 to 11."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets.io.atomic_files import write_atomically
from server_app.figures.calibration import draw_distribution, draw_evidence
from server_app.records.run_directory import RunDirectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES = {
    "accuracy": "accuracy",
    "entropy": "entropy (nats)",
    "perplexity": "codebook perplexity",
    "loss": "loss (nats)",
}

Series = dict[str, dict[int, float]]


def series(
    rows: Iterable[Mapping[str, str]],
    metric: str,
    distribution_of: Mapping[str, str],
    split: str = "test",
) -> Series:
    """Return, per distribution, the mean value on ``split`` over its sites by round."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["split"] == split and row["metric"] == metric:
            name = distribution_of[row["site"]]
            found[name][int(row["round"])].append(float(row["value"]))
    return {
        name: {round_: sum(values) / len(values) for round_, values in sorted(rounds.items())}
        for name, rounds in sorted(found.items())
    }


def draw_curves(directory: RunDirectory) -> None:
    """Draw ``curves.png`` from the run's own files: test figures, without such validation ones.

    Raises:
        RunDirectoryError: the run has not ended.
    """
    # A figure without pyplot: no global state, no display
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    summary = directory.read_json("summary.json")
    silos = directory.read_json("silos.json")
    distribution_of = {site: facts["distribution"] for site, facts in silos.items()}
    rows = directory.read_csv("metrics.csv")
    split = "test" if any(row["split"] == "test" for row in rows) else "val"
    found = {metric: series(rows, metric, distribution_of, split) for metric in CURVES}
    drawn = {metric: lines for metric, lines in found.items() if lines}
    if not drawn:
        return
    figure = Figure(figsize=(4.2 * len(drawn), 3.6), layout="constrained")
    for axes, (metric, lines) in zip(
        figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True
    ):
        for name, line in lines.items():
            axes.plot(list(line), list(line.values()), label=name, marker=".", markersize=4)
        for round_ in summary["marks"]:
            axes.axvline(int(round_), linestyle="--", color="grey", linewidth=1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("round")
        axes.set_ylabel(f"{split} {CURVES[metric]}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    marks = [f"round {round_}: {mark}" for round_, mark in summary["marks"].items()]
    figure.supxlabel("\n".join(marks), fontsize="small", color="grey")
    figure.suptitle(f"{summary['title']} on {summary['dataset']}, seed {summary['seed']}")
    write_picture(directory.path / "curves.png", figure)


def draw_pictures(
    directory: RunDirectory, pictures: Callable[[Mapping[str, Any]], Mapping[str, Figure]]
) -> list[Path]:
    """Draw what the JSON files of a run hold, its method's own and all runs'; return the files."""
    documents = {
        path.name: directory.read_json(path.name) for path in directory.path.glob("*.json")
    }
    drawn = dict(pictures(documents)) | draw_distribution(documents["silos.json"])
    if "evidence.json" in documents:
        drawn |= draw_evidence(documents["evidence.json"])
    for name, figure in drawn.items():
        write_picture(directory.path / name, figure)
    return [directory.path / name for name in drawn]


def write_picture(path: Path, figure: Figure) -> None:
    """Write a figure as PNG, whole or not at all."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_atomically(path, picture.getvalue())
