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

    The table has the metrics that the run's data set chooses to show. For the data set of a plugin,
    these are accuracy, balanced accuracy, AUC and loss.

    Args:
        path: the run directory, which is printed below the table.
        summary: the content of summary.json, without hidden metrics.
        silos: the content of silos.json, without hidden counts.
        withheld: the sites with hidden metrics. If there are any, a sentence below the table names
            them.
        floor: the smallest number of patients whose metrics may be shown. The same sentence states
            it.
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
