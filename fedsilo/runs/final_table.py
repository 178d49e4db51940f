"""The final table of a finished run as a notebook shows it."""

from collections.abc import Sequence

from fedsilo.datasets.registry import DATA_SETS, data_set
from fedsilo.pages.notebook import html_of_lines
from fedsilo.runs.finished_run import Shown
from fedsilo.server_app.records.summary import summary_lines

# Metrics for a plugin's data set, because its code is not imported only to show a table
_METRICS = ("accuracy", "balanced-accuracy", "auc", "loss")


def final_table(run: Shown) -> str:
    """Build the HTML of a run's final metrics, with a sentence about metrics that are hidden."""
    name = run.summary["dataset"]
    metrics: Sequence[str] = _METRICS
    if name in DATA_SETS:
        metrics = data_set(name).headline
    lines = [*summary_lines(run.summary, run.silos, metrics)]
    if run.withheld:
        lines.append(
            f"Some metrics of {', '.join(run.withheld)} are not shown, because they rest on "
            f"fewer than {run.floor} patients, or would reveal a metric that does."
        )
    return html_of_lines([*lines, str(run.path)])
