"""Learning curves of a run as PNG, as in the UEFL paper's figures 7 to 11."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Mapping

from datasets.storage import write_atomically
from server_app.run_directory import RunDirectory

CURVES = {
    "accuracy": "accuracy",
    "entropy": "entropy (nats)",
    "perplexity": "codebook perplexity",
    "loss": "loss (nats)",
}

Series = dict[str, dict[int, float]]


def series(
    rows: Iterable[Mapping[str, str]], metric: str, distribution_of: Mapping[str, str]
) -> Series:
    """Return, per distribution, the mean test value over its sites by round."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["split"] == "test" and row["metric"] == metric:
            name = distribution_of[row["site"]]
            found[name][int(row["round"])].append(float(row["value"]))
    return {
        name: {round_: sum(values) / len(values) for round_, values in sorted(rounds.items())}
        for name, rounds in sorted(found.items())
    }


def draw_curves(directory: RunDirectory) -> None:
    """Draw ``curves.png`` from the run's own files.

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
    drawn = {metric: found for metric in CURVES if (found := series(rows, metric, distribution_of))}
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
        axes.set_ylabel(f"test {CURVES[metric]}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    marks = [f"round {round_}: {mark}" for round_, mark in summary["marks"].items()]
    figure.supxlabel("\n".join(marks), fontsize="small", color="grey")
    figure.suptitle(f"{summary['title']} on {summary['dataset']}, seed {summary['seed']}")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_atomically(directory.path / "curves.png", picture.getvalue())
