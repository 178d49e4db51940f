"""Names the sites that a mean over sites is over, if some sites have no value, and says why.

A reader would otherwise take a mean over some hospitals for one over all of them. The terminal,
``fedsilo compare`` and the reports use these sentences.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedsilo.core.settings.common_settings import NOBODY, CommonSettings
from fedsilo.server_app.records.summary import join_names

Summary = Mapping[str, Any]
SiteMetrics = Mapping[str, Mapping[str, float]]  # site -> metric -> value

ALL_SITES = "over sites"  # the text for a mean that leaves out no site
_NAMED = 5  # largest number of sites that a sentence names


def sites_without(metrics: SiteMetrics, sites: Sequence[str]) -> dict[str, list[str]]:
    """Find the metrics that only some of the sites have: metric -> the sites that lack it.

    Metrics that every site in ``sites`` has are left out. Rows of ``metrics`` for names outside
    ``sites``, such as "all", are ignored. The metrics are in the order of their first occurrence,
    site by site. The sites of a metric are in the order of ``sites``.
    """
    known: dict[str, None] = {}
    for site in sites:  # not 'all', the only row of a run at trust 'sums'
        known |= dict.fromkeys(metrics.get(site, {}))
    lacking: dict[str, list[str]] = {}
    for metric in known:
        without = [site for site in sites if metric not in metrics.get(site, {})]
        if without:
            lacking[metric] = without
    return lacking


def over_sites(summaries: Iterable[Summary], metric: str) -> str:
    """Describe which sites a metric's mean covers, such as "over 3 of 4 sites, without north".

    A site is left out of the mean if it lacks the metric in at least one summary. If more than five
    sites are left out, they are counted but not named.

    Args:
        summaries: the summaries of runs on one data set. Each has ``lacking`` (metric -> the sites
            without it) and ``site_count`` (the number of all sites). The largest ``site_count`` is
            used.
        metric: the metric's name.

    Returns:
        The description. It is "over sites" if no site is left out, or if there are no summaries.
    """
    without: dict[str, None] = {}
    most_sites = 0
    for summary in summaries:
        without |= dict.fromkeys(summary["lacking"].get(metric, ()))
        most_sites = max(most_sites, summary["site_count"])
    if not without:
        return ALL_SITES
    text = f"over {most_sites - len(without)} of {most_sites} sites"
    if len(without) <= _NAMED:
        text += f", without {', '.join(without)}"
    return text


def describe_partial_means(summaries: Sequence[Summary], metrics: Sequence[str]) -> list[str]:
    """Build a sentence for each group of metrics whose means leave out the same sites.

    An example is "'all' of auc, loss is the mean over 3 of 4 sites, without north". The name 'all'
    is that of the row of means in a table. Metrics are grouped for each data set separately, and
    equal sentences are listed once. The list is empty if no mean leaves out a site.

    Args:
        summaries: the summaries of runs, each with ``dataset``, ``lacking`` (metric -> sites
            without it) and ``site_count`` (the number of all sites).
        metrics: the metrics to describe, in order.
    """
    by_data: dict[str, list[Summary]] = {}
    for summary in summaries:
        by_data.setdefault(str(summary["dataset"]), []).append(summary)
    sentences: dict[str, None] = {}
    for on_data in by_data.values():
        metrics_of: dict[str, list[str]] = {}
        for metric in metrics:
            metrics_of.setdefault(over_sites(on_data, metric), []).append(metric)
        for text, partial in metrics_of.items():
            if text != ALL_SITES:
                sentences[f"'all' of {', '.join(partial)} is the mean {text}"] = None
    return list(sentences)


def find_hidden(
    metrics: SiteMetrics, shown: SiteMetrics, chosen: Sequence[str]
) -> dict[str, list[str]]:
    """Find the sites at which a metric's value exists but must not be shown.

    Args:
        metrics: all values, site -> metric -> value.
        shown: the values in ``metrics`` that are allowed to be shown.
        chosen: the names of the metrics to look at.

    Returns:
        Chosen metric -> the sites that have it in ``metrics`` but not in ``shown``. A metric
        without such a site is left out.
    """
    hidden: dict[str, list[str]] = {}
    for metric in chosen:
        for site, row in metrics.items():
            if metric in row and metric not in shown.get(site, {}):
                hidden.setdefault(metric, []).append(site)
    return hidden


def describe_hidden(hidden: Mapping[str, Sequence[str]], common: CommonSettings) -> list[str]:
    """Build a sentence for each group of metrics that are hidden at the same sites.

    The sentence begins with, for example, "n/a at north, south: auc", and gives the possible
    reasons in brackets. Without hidden metrics the list is empty.

    Args:
        hidden: metric -> the sites at which it is hidden.
        common: the run's settings. The setting 'privacy.sums-min-count', the fewest samples of a
            shown metric, is named as a reason. The level of trust "nobody" adds another reason.
    """
    metrics_at: dict[str, list[str]] = {}
    for metric, sites in hidden.items():
        metrics_at.setdefault(join_names(sites), []).append(metric)
    why = f"on fewer than {common.sums_min_count} samples, or revealing a value that is"
    if common.trust == NOBODY:
        why += ", or not sent at 'trust: nobody'"
    sentences = []
    for sites_text, metrics in metrics_at.items():
        sentences.append(f"n/a at {sites_text}: {', '.join(metrics)} ({why})")
    return sentences
