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
    try:
        metrics, traffic = (folder / "metrics.csv").stat(), (folder / "traffic.csv").stat()
        written = (metrics.st_mtime_ns, traffic.st_mtime_ns)
        return _draw_pictures(folder, written)
    except (OSError, RunDirectoryError):  # rows are being written: the next look has them
        return []


@lru_cache(maxsize=2)
def _draw_pictures(folder: Path, written: tuple[int, ...]) -> list[Picture]:
    """Draw the pictures of a run once a round, because the page is loaded every two seconds.

    Args:
        folder: the run directory.
        written: when its files were written; a new time means a new picture.
    """
    run = FinishedRun(folder)
    metrics = run.metric_rows
    # A hello belongs to no round of training
    answers = [row for row in run.traffic_rows if row["phase"] != "hello"]
    accuracy = {
        "val": _mean_by_round(metrics, "val", "accuracy"),
        "test": _mean_by_round(metrics, "test", "accuracy"),
    }
    loss = {
        "training": _mean_by_round(metrics, "train", "trained-loss"),
        "val": _mean_by_round(metrics, "val", "loss"),
        "test": _mean_by_round(metrics, "test", "loss"),
    }
    bytes_ = {
        "to the hospitals": _megabytes_by_round(answers, "bytes_down"),
        "from them": _megabytes_by_round(answers, "bytes_up"),
    }
    pictures = [
        _curve("accuracy", accuracy, "accuracy, mean over hospitals"),
        _curve("loss", loss, "loss in nats, mean over hospitals"),
        _curve("bytes", bytes_, "MB in a round"),
        _slowest(answers),
    ]
    return [picture for picture in pictures if picture]


def _mean_by_round(rows: list[Row], split: str, metric: str) -> dict[int, float]:
    chosen = [row for row in rows if row["split"] == split and row["metric"] == metric]
    means = {}
    for at, values in _group_values(chosen, "round", "value").items():
        means[int(at)] = sum(values) / len(values)
    return means


def _megabytes_by_round(answers: list[Row], column: str) -> dict[int, float]:
    sums = {}
    for at, values in _group_values(answers, "round", column).items():
        sums[int(at)] = sum(values) / 1e6
    return sums


def _group_values(rows: list[Row], key: str, column: str) -> dict[str, list[float]]:
    """Return cell of the column ``key`` -> the numbers in ``column`` of its rows."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(float(row[column]))
    return groups


def _curve(name: str, lines: Lines, label: str) -> Picture | None:
    """Draw the lines that have a value; None if no line has one."""
    drawn, ends = {}, []
    for title, line in lines.items():
        if line:
            drawn[title] = line
            ends.append(f"{title} {line[max(line)]:.3g}")
    if not drawn:
        return None
    svg = curves(f"watch-{name}", drawn, line_styles(list(drawn)), label)
    alt = f"{label} by round. Now: {'; '.join(ends)}."
    return Picture(svg, alt, f"{label[0].upper()}{label[1:]}.")


def _slowest(answers: list[Row]) -> Picture | None:
    """Draw the sites whose work took longest, by the seconds that they report."""
    worked = [row for row in answers if float(row["seconds"])]
    means = {}
    for site, seconds in _group_values(worked, "site", "seconds").items():
        means[site] = sum(seconds) / len(seconds)
    slowest = sorted(means, key=lambda site: -means[site])[:_SLOWEST]
    if not slowest:
        return None
    label = "seconds of work for an answer, mean"
    without = ""
    if len(means) > len(slowest):
        without = f", without {len(means) - len(slowest)} quicker hospitals"
    caption = f"The slowest first{without}: {label}."
    drawn, texts = {}, []
    for site in slowest:
        drawn[site] = Estimate(means[site])
        texts.append(f"{site} {means[site]:.2f}")
    svg = estimates("watch-slow", {"seconds": drawn}, label)
    return Picture(svg, f"{caption} {'; '.join(texts)}.", caption)
