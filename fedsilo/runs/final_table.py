"""The final table of a finished run as a notebook shows it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsilo.datasets.registry import DATA_SETS, shown_of
from fedsilo.pages.notebook import html_of_lines
from fedsilo.server_app.records.summary import summary_lines

# Metrics for a plugin's data set, because its code is not imported only to show a table
_METRICS = ("accuracy", "balanced-accuracy", "auc", "loss")


def final_table(
    path: Path,
    summary: Mapping[str, Any],
    silos: Mapping[str, Any],
    withheld: Sequence[str],
    floor: int,
) -> str:
    """Build the HTML of a run's final metrics, as notebooks show it.

    The data set chooses the metrics. ``summary`` and ``silos`` are the contents of summary.json and
    silos.json, without hidden numbers. If there are ``withheld`` sites, a sentence names them and
    states ``floor``, the smallest number of patients.
    """
    name = summary["dataset"]
    metrics: Sequence[str] = _METRICS
    if name in DATA_SETS:
        metrics = shown_of(summary)
    lines = [*summary_lines(summary, silos, metrics)]
    if withheld:
        lines.append(
            f"Some metrics of {', '.join(withheld)} are not shown, because they rest on "
            f"fewer than {floor} patients, or would reveal a metric that does."
        )
    return html_of_lines([*lines, str(path)])
