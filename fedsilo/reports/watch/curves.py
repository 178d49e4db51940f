"""The curves of the watch page: how good the model is, what the rounds cost, and who is slow."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from fedsilo.core.drawing.palette import line_styles
from fedsilo.core.errors import RunDirectoryError
from fedsilo.models.measures.intervals import Estimate
from fedsilo.pages.page import Picture
from fedsilo.pages.page_pictures import curves, estimates
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.runs.shown import Row

_SLOWEST = 10  # sites that are drawn
Lines = Mapping[str, Mapping[int, float]]


def run_curves(folder: Path) -> list[Picture]:
    """Return the curves of a run so far; none before its first round has been written."""
    files = [folder / name for name in ("metrics.csv", "traffic.csv")]
    try:
        written = tuple(file.stat().st_mtime_ns for file in files)
        return _draw_pictures(folder, written)
    except (OSError, RunDirectoryError):  # rows are being written: the next look has them
        return []


@lru_cache(maxsize=2)
def _draw_pictures(folder: Path, written: tuple[int, ...]) -> list[Picture]:
    """Draw once a round: the page is loaded every two seconds."""
    run = FinishedRun(folder)
    metrics, answers = run.metric_rows, [row for row in run.traffic_rows if row["phase"] != "hello"]
    accuracy = {s: _mean(metrics, s, "accuracy") for s in ("val", "test")}
    loss = {"training": _mean(metrics, "train", "trained-loss")}
    loss |= {split: _mean(metrics, split, "loss") for split in ("val", "test")}
    bytes_ = {
        "to the hospitals": _megabytes(answers, "bytes_down"),
        "from them": _megabytes(answers, "bytes_up"),
    }
    pictures = [
        _curve("accuracy", accuracy, "accuracy, mean over hospitals"),
        _curve("loss", loss, "loss in nats, mean over hospitals"),
        _curve("bytes", bytes_, "MB in a round"),
        _slowest(answers),
    ]
    return [picture for picture in pictures if picture]


def _mean(rows: list[Row], split: str, metric: str) -> dict[int, float]:
    chosen = [row for row in rows if row["split"] == split and row["metric"] == metric]
    values = _group_values(chosen, "round", "value")
    return {int(at): sum(found) / len(found) for at, found in values.items()}


def _megabytes(answers: list[Row], column: str) -> dict[int, float]:
    values = _group_values(answers, "round", column)
    return {int(at): sum(found) / 1e6 for at, found in values.items()}


def _group_values(rows: list[Row], key: str, column: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row[key], []).append(float(row[column]))
    return found


def _curve(name: str, lines: Lines, label: str) -> Picture | None:
    drawn = {title: line for title, line in lines.items() if line}
    if not drawn:
        return None
    said = "; ".join(f"{title} {line[max(line)]:.3g}" for title, line in drawn.items())
    svg = curves(f"watch-{name}", drawn, line_styles(list(drawn)), label)
    return Picture(svg, f"{label} by round. Now: {said}.", f"{label[0].upper()}{label[1:]}.")


def _slowest(answers: list[Row]) -> Picture | None:
    """Return a picture of the sites whose work took longest, by the seconds that they report."""
    worked = [row for row in answers if float(row["seconds"])]
    seconds = _group_values(worked, "site", "seconds")
    means = {site: sum(found) / len(found) for site, found in seconds.items()}
    slowest = sorted(means, key=lambda site: -means[site])[:_SLOWEST]
    if not slowest:
        return None
    drawn = {"seconds": {site: Estimate(means[site]) for site in slowest}}
    label = "seconds of work for an answer, mean"
    left = len(means) - len(slowest)
    without = f", without {left} quicker hospitals" if left else ""
    caption = f"The slowest first{without}: {label}."
    said = "; ".join(f"{site} {means[site]:.2f}" for site in slowest)
    return Picture(estimates("watch-slow", drawn, label), f"{caption} {said}.", caption)
