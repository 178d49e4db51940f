"""The sentences that reports of all tasks share: which values a result is about, and its limit."""

from collections.abc import Mapping

from fedsilo.core.one_line import format_count
from fedsilo.core.settings.common_settings import SERVER
from fedsilo.datasets.registry import data_set
from fedsilo.runs.finished_run import Shown


def values_of(run: Shown, site: str | None) -> tuple[Mapping[str, float], str]:
    """Return the final test metrics of one site, or their means over all sites.

    Args:
        run: the run.
        site: the site's name; None or empty for the means.

    Returns:
        A pair. The first element maps each metric to its value. This mapping is empty if the run
        has no such site, or if the site has no metrics. The second element names the source of the
        values: the site's name, or a phrase such as "the mean over 3 hospitals".
    """
    if site:
        return run.summary["sites"].get(site, {}), site
    return run.summary["mean"], f"the mean over {format_count(len(run.silos), 'hospital')}"


def limit_of(run: Shown, unknown: str) -> str:
    """State the main reason for caution about a run's result, in one sentence.

    The sentence gives the first of these reasons that applies:

    1. The data are made up, so the result says nothing about patients.
    2. The run's setting ``trust`` is not ``server``, so only the loss is known. This sentence
       contains the text ``unknown``.
    3. The result was measured only at the hospitals that trained the model.

    Args:
        run: the run.
        unknown: a clause about a metric that only a trusted server gets, such as "no AUC is known".
    """
    if data_set(str(run.summary["dataset"])).origin == "made-up":
        return "The data are made up: the result says nothing about patients."
    if run.trust != SERVER:
        return f"At 'trust: {run.trust}' {unknown}, only the loss."
    return "It was measured only at the hospitals that trained it."
