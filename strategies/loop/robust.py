"""Aggregations that limit the influence of a few faulty or hostile sites; see 'server.aggregation'.

Equations:
  (norm-clip) Sun et al. 2019, updates clipped to a norm, here the median -> norm_clipped_mean
  (median) Yin et al. 2018, the median of each number -> _combine
  (trimmed) Yin et al. 2018, the mean of each number without the f smallest and f largest
    -> _combine
  (multikrum) Blanchard et al. 2017, the mean of the n - f sites that are closest to their n - f - 2
    nearest other sites -> chosen_by_krum

Each reads one array of all sites at a time; multikrum and norm-clip read all arrays twice.
"""

from collections.abc import Mapping

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import compute_distances

from fedsilo.core.errors import SiteError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.strategies.loop.plausible import group_by_kind, update_norm
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Arrays, Reply

Replies = Mapping[str, Reply]
FAULTY = 1  # f, the number of sites that may be faulty


def fewest_sites(common: CommonSettings) -> int:
    """Return the fewest sites that 'server.aggregation' needs to tolerate ``FAULTY`` faulty sites.

    "trimmed" needs 3 sites, "multikrum" needs 5, and any other aggregation only 1.
    """
    return {"trimmed": 2 * FAULTY + 1, "multikrum": 2 * FAULTY + 3}.get(common.aggregation, 1)


def why_too_few(common: CommonSettings, sites: int) -> str | None:
    """Explain that ``sites`` is too few for 'server.aggregation', or return None if it is enough.

    "trimmed" needs at least 3 sites and "multikrum" at least 5. Any other aggregation works with
    one site.
    """
    needed = fewest_sites(common)
    if sites >= needed:
        return None
    return (
        f"'server.aggregation' '{common.aggregation}' needs at least {needed} sites, but there are "
        f"{sites}: choose 'median'"
    )


def robust_mean(
    common: CommonSettings, replies: Replies, before: Arrays, equal: bool = False
) -> dict[str, NDArray]:
    """Combine the sites' arrays by the setting 'server.aggregation'.

    It is "norm-clip", "median", "trimmed" or "multikrum". "trimmed" needs at least 3 replies, and
    "multikrum" at least 5.

    Args:
        common: the run's settings.
        replies: the replies by site.
        before: the arrays that the sites started from, by name.
        equal: whether "norm-clip" gives each site the same weight. The other aggregations always
            do.

    Returns:
        The combined arrays by name, float32.

    Raises:
        SiteError: too few sites replied for the aggregation.
    """
    reason = why_too_few(common, len(replies))
    if reason:
        raise SiteError(reason)
    ordered = dict(sorted(replies.items()))
    if common.aggregation == "norm-clip":
        return norm_clipped_mean(ordered, before, equal)
    if common.aggregation == "multikrum":
        chosen = chosen_by_krum(ordered, before, FAULTY)
        ordered = {site: ordered[site] for site in chosen}
    combined: dict[str, NDArray] = {}
    for name in sorted(before):
        stacked = np.stack([reply.arrays[name].astype(np.float64) for reply in ordered.values()])
        combined[name] = np.asarray(_combine(common, stacked), np.float32)
    return combined


def _combine(common: CommonSettings, stacked: NDArray) -> NDArray:
    """Combine one array of several sites, each with the same weight.

    ``stacked`` has the shape (sites, ...), and the result has the shape of the array. Each element
    is combined over the sites. The setting 'server.aggregation' decides how:

    - "median": the median. Of an even number of sites, it is the mean of the middle two.
    - "trimmed": the mean without the smallest and the largest value.
    - Any other: the mean. For "multikrum" the caller has already selected the sites.
    """
    combined: NDArray
    if common.aggregation == "median":
        combined = np.median(stacked, axis=0)
    elif common.aggregation == "trimmed":
        # trim_mean rounds down the number that it drops at each end; a quarter more prevents 0 of f
        combined = trim_mean(stacked, (FAULTY + 0.25) / len(stacked))
    else:
        combined = np.mean(stacked, axis=0)
    return combined


def norm_clipped_mean(replies: Replies, before: Arrays, equal: bool) -> dict[str, NDArray]:
    """Return ``before`` plus the mean of the sites' updates, after long updates are shortened.

    An update with a norm above the median over the sites is scaled down to this median. If the
    median is 0, all such updates become 0. Weights and batch norm's statistics have separate
    medians.

    Args:
        replies: the replies by site, at least one.
        before: the arrays that the sites started from, by name.
        equal: weigh all updates equally, and not by each site's number of samples.

    Returns:
        The arrays by name, float32.
    """
    counts = [reply.examples for reply in replies.values()]
    if equal:
        counts = [1] * len(replies)
    mean: dict[str, NDArray] = {}
    for names in group_by_kind(before).values():
        norms = [update_norm(reply, before, names) for reply in replies.values()]
        # Half of the updates are shorter, so a few faulty sites cannot raise this limit at will
        limit = float(np.median(norms))
        # A site's update counts by its share of the samples, shortened to the median norm
        factors = []
        for count, norm in zip(counts, norms, strict=True):
            factor = count / sum(counts)
            if norm > limit:
                factor *= limit / norm
            factors.append(factor)
        for name in names:
            total = before[name].astype(np.float64)
            for reply, factor in zip(replies.values(), factors, strict=True):
                update = reply.arrays[name].astype(np.float64) - before[name]
                total = total + update * factor
            mean[name] = np.asarray(total, np.float32)
    return mean


def chosen_by_krum(replies: Replies, before: Arrays, faulty: int) -> list[str]:
    """Return the sites that multikrum averages: the n - ``faulty`` sites with the lowest scores.

    A site's score is the sum of its distances to its n - ``faulty`` - 2 nearest other sites. A
    distance is the squared L2 distance between two sites' updates, over all arrays. With equal
    scores, earlier sites in ``replies`` are chosen.

    Args:
        replies: the replies of n sites, at least ``faulty`` + 3.
        before: the arrays that the sites started from, by name.
        faulty: the number of sites that may be faulty.

    Returns:
        The names of the chosen sites, sorted.
    """
    sites = list(replies)
    distances = np.zeros((len(sites), len(sites)))
    for name in sorted(before):
        records = []
        for reply in replies.values():
            update = reply.arrays[name].astype(np.float64) - before[name]
            records.append(ArrayRecord({name: Array(update)}))
        # Squared distances add up over the arrays
        distances += compute_distances(records)
    # A site is not its own neighbour
    np.fill_diagonal(distances, np.inf)
    # An honest site has n - f - 1 honest others, so its score need not count a faulty site
    nearest = np.sort(distances, axis=1)[:, : len(sites) - faulty - 2]
    ranking = np.argsort(nearest.sum(axis=1), kind="stable")[: len(sites) - faulty]
    return sorted(sites[place] for place in ranking)
