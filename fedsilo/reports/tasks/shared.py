"""The sentences that reports of all tasks share: which values a result is about, and its limit."""

from collections.abc import Mapping

from fedsilo.core.one_line import format_count
from fedsilo.core.settings.common_settings import SERVER
from fedsilo.datasets.registry import data_set
from fedsilo.runs.finished_run import Shown


def values_of(run: Shown, site: str | None) -> tuple[Mapping[str, float], str]:
    """Return the final test metrics of one site, or their means over all sites.

    If ``site`` is None or empty, the means are returned. The second element names the source of the
    values, such as "the mean over 3 hospitals". If the run has no metrics of the site, the mapping
    is empty.
    """
    if site:
        return run.summary["sites"].get(site, {}), site
    return run.summary["mean"], f"the mean over {format_count(len(run.silos), 'hospital')}"


def limit_of(run: Shown, unknown: str) -> str:
    """State the main reason for caution about a run's result, in one sentence.

    The first reason that applies is given:

    1. The data are made up.
    2. At trust levels other than ``server``, only the loss is known. This sentence contains
       ``unknown``, such as "no AUC is known".
    3. Only the hospitals that trained the model measured it.
    """
    if data_set(str(run.summary["dataset"])).origin == "made-up":
        return "The data are made up: the result says nothing about patients."
    if run.trust != SERVER:
        return f"At 'trust: {run.trust}' {unknown}, only the loss."
    return "It was measured only at the hospitals that trained it."
