"""Ways to combine weights that a few faulty or hostile sites cannot turn; see 'aggregation'.

Equations:
  (norm-clip) Sun et al. 2019, updates cut to a norm, here the median -> norm_clipped_mean
  (median) Yin et al. 2018, of each number -> _combined
  (trimmed) Yin et al. 2018, mean of each number without the f least and f largest -> _combined
  (multikrum) Blanchard et al. 2017, mean of the n - f sites of which each has the nearest
    n - f - 2 others -> chosen_by_krum

Each reads one array of all sites at a time, and multikrum and norm-clip all arrays twice.
"""

from collections.abc import Mapping

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import compute_distances

from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.strategies.loop.plausible import in_kinds, update_norm
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Arrays, Reply

Replies = Mapping[str, Reply]
FAULTY = 1  # f, the sites that may be faulty


def fewest_sites(common: CommonSettings) -> int:
    """Return how many sites 'aggregation' needs for ``FAULTY`` of them to be bad."""
    return {"trimmed": 2 * FAULTY + 1, "multikrum": 2 * FAULTY + 3}.get(common.aggregation, 1)


def why_too_few(common: CommonSettings, sites: int) -> str | None:
    """Say why so many sites are too few for 'aggregation', if they are."""
    if sites >= (needed := fewest_sites(common)):
        return None
    return (
        f"'aggregation' '{common.aggregation}' needs at least {needed} sites, but there are "
        f"{sites}: choose 'median'"
    )


def robust_mean(
    common: CommonSettings, replies: Replies, before: Arrays, equal: bool = False
) -> dict[str, NDArray]:
    """Return arrays as 'aggregation', any but "mean", makes them of ``replies``, float32.

    ``before`` is what the sites began with; with ``equal`` sites weigh the same in 'norm-clip', as
    they do in all others.

    Raises:
        SiteError: too few sites have answered.
    """
    if reason := why_too_few(common, len(replies)):
        raise SiteError(reason)
    ordered = dict(sorted(replies.items()))
    if common.aggregation == "norm-clip":
        return norm_clipped_mean(ordered, before, equal)
    if common.aggregation == "multikrum":
        chosen = chosen_by_krum(ordered, before, FAULTY)
        ordered = {site: ordered[site] for site in chosen}
    return {
        name: np.asarray(_combined(common, _stacked(ordered, name)), np.float32)
        for name in sorted(before)
    }


def _combined(common: CommonSettings, stacked: NDArray) -> NDArray:
    """Return an array of what all sites have, ``stacked`` (sites, *shape), each weighing the same.

    The trimmed mean is Flower's own; multikrum's is the mean of the sites that it has chosen.
    """
    combined: NDArray
    if common.aggregation == "median":
        combined = np.median(stacked, axis=0)
    elif common.aggregation == "trimmed":
        # trim_mean rounds down how many it drops at each end: a quarter more outweighs rounding
        combined = trim_mean(stacked, (FAULTY + 0.25) / len(stacked))
    else:
        combined = np.mean(stacked, axis=0)
    return combined


def norm_clipped_mean(replies: Replies, before: Arrays, equal: bool) -> dict[str, NDArray]:
    """Return ``before`` and the weighted mean of updates, none longer than their median.

    Weights and running statistics are measured and cut apart.
    """
    counts = [1 if equal else reply.examples for reply in replies.values()]
    weights, mean = [count / sum(counts) for count in counts], dict[str, NDArray]()
    for names in in_kinds(before).values():
        norms = [update_norm(reply, before, names) for reply in replies.values()]
        limit = float(np.median(norms))
        cuts = [limit / norm if norm > limit else 1.0 for norm in norms]
        for name in names:
            total = before[name].astype(np.float64)
            for reply, weight, cut in zip(replies.values(), weights, cuts, strict=True):
                update = reply.arrays[name].astype(np.float64) - before[name]
                total = total + update * (weight * cut)
            mean[name] = np.asarray(total, np.float32)
    return mean


def chosen_by_krum(replies: Replies, before: Arrays, faulty: int) -> list[str]:
    """Return all but ``faulty`` sites: those with the nearest n - f - 2 others, by Flower's own.

    Distances are squared L2, of the updates of all arrays together.
    """
    sites = list(replies)
    distances = np.zeros((len(sites), len(sites)))
    for name in sorted(before):
        records = [
            ArrayRecord({name: Array(reply.arrays[name].astype(np.float64) - before[name])})
            for reply in replies.values()
        ]
        distances += compute_distances(records)
    np.fill_diagonal(distances, np.inf)
    nearest = np.sort(distances, axis=1)[:, : len(sites) - faulty - 2]
    ranking = np.argsort(nearest.sum(axis=1), kind="stable")[: len(sites) - faulty]
    return sorted(sites[place] for place in ranking)


def _stacked(replies: Replies, name: str) -> NDArray:
    """Return array ``name`` of all sites, (sites, *shape), float64."""
    return np.stack([reply.arrays[name].astype(np.float64) for reply in replies.values()])
