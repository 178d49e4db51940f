"""Check that sites fit together: names, data, tasks and sums must agree.

If two sites claim the same data, the server cannot know who is right, so both are left out. Where
sites must agree, the most frequent answer is taken and the others are left out; of equally frequent
answers the one of the first site by name is taken. With three or more sites, a site is odd if the
mean or standard deviation of a feature is more than ``FAR`` times that of the median site: it uses
another unit, or its numbers are untrue.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from fedsilo.models.contract.one_line import one_line
from fedsilo.models.contract.site_facts import SiteFacts, Sums, Vector
from fedsilo.models.networks.kinds import Task

Facts = Mapping[str, SiteFacts]
Refused = dict[str, str]  # site name -> why it is left out, in one line
FAR = 1000.0
_FEW = 3  # between two sites nobody can tell which one is odd


def task_of(facts: SiteFacts) -> Task:
    """Return the input shape and the number of classes of a site's data."""
    return Task(facts.input_shape, facts.classes)


def unlike(site: str, facts: SiteFacts, other: str, others: SiteFacts) -> str | None:
    """Return the first difference between two sites in what all sites must share, or None."""
    if (task := task_of(facts)) != (first := task_of(others)):
        return (
            f"site {site} holds {task}, site {other} {first}: all sites of a run need the same "
            "input shape and classes"
        )
    if facts.features != others.features:
        odd = sorted(set(facts.features) ^ set(others.features))
        how = one_line(odd, 120) if odd else "the same in another order"
        return (
            f"the features of sites {site} and {other} differ ({how}): give all sites the same "
            "schema"
        )
    if facts.schema != others.schema:
        return (
            f"the schemas of sites {site} and {other} differ (levels, classes and their order, "
            "marks of missing values, policy or declared figures): give all sites the same schema"
        )
    if facts.backbone != others.backbone:
        both = f"{one_line(facts.backbone, 70)}; {one_line(others.backbone, 70)}"
        return (
            f"the backbones of sites {site} and {other} differ ({both}): give all sites the same "
            "'vit.backbone-weights'"
        )
    return None


def shared_data(facts: Facts) -> Refused:
    """Return the sites that hold the same training samples, because these count twice."""
    owners: dict[str, list[str]] = {}
    for site in sorted(facts):
        if facts[site].sizes().get("train") and "train" in facts[site].fingerprints:
            owners.setdefault(facts[site].fingerprints["train"], []).append(site)
    return {
        site: (
            f"sites {_and(sites)} hold the same training samples: one of them was given the "
            "other's data directory or volume, or its 'site' is not its own"
        )
        for sites in owners.values()
        if len(sites) > 1
        for site in sites
    }


def other_tasks(facts: Facts) -> Refused:
    """Return the sites whose task is not the most frequent one, each with the difference."""

    def answer(one: SiteFacts) -> Hashable:
        return (one.input_shape, one.classes, one.features, one.schema, one.backbone)

    if not facts:
        return {}
    ordered = [facts[site] for site in sorted(facts)]
    # Ties go to the task of the first site by name
    ((most, _),) = Counter(map(answer, ordered)).most_common(1)
    usual = next(one for one in ordered if answer(one) == most)
    faults = {site: unlike(site, facts[site], usual.site, usual) for site in sorted(facts)}
    return {site: fault for site, fault in faults.items() if fault}


def odd_sums(facts: Facts, pooled: bool) -> Refused:
    """Return the sites that lack sums, send unwanted ones, or send odd ones.

    Args:
        facts: the hellos by site.
        pooled: whether 'data.standardise' is "pooled". If it is, a site without sums is refused; if
            not, a site with sums is.
    """
    said = {site: facts[site].sums for site in sorted(facts)}
    if not any(said.values()):
        return {}
    refused = {
        site: f"{site} sent {'no sums to pool' if pooled else 'sums that nobody pools'}: all sites "
        "of a run need the same 'data.standardise'"
        for site, sums in said.items()
        if (sums is None) == pooled
    }
    sums = {site: one for site, one in said.items() if one is not None and site not in refused}
    return refused | (_far(sums, facts) if len(sums) >= _FEW else {})


def _far(sums: Mapping[str, Sums], facts: Facts) -> Refused:
    """Return the sites with a feature whose scale is far above the median site's."""
    scales = np.stack([_scales(one) for one in sums.values()])
    typical = np.array([_typical(column) for column in scales.T])
    refused: Refused = {}
    for site, row in zip(sums, scales, strict=True):
        far = np.flatnonzero(row > FAR * typical)
        if len(far):
            feature = one_line(facts[site].features[far[0]], 80)
            refused[site] = (
                f"site {site}: mean or standard deviation of '{feature}' is more than {FAR:g} "
                "times that of the median site: is it in another unit, or not its own?"
            )
    return refused


def _scales(sums: Sums) -> Vector:
    """Return the magnitude of each feature's values, (features,); NaN for a feature without values.

    It is the larger of the absolute mean and the standard deviation.
    """
    # NaN marks features without values, which must not count as 0 in a median
    known = np.where(sums.count > 0, sums.count, np.nan)
    mean = sums.total / known
    spread = np.sqrt(np.maximum(sums.squares / known - mean**2, 0.0))
    scales: Vector = np.fmax(abs(mean), spread)
    return scales


def _typical(scales: Vector) -> float:
    """Return the median site's scale of one feature, or infinity if no site can be odd.

    For a rare flag that is 0 at most sites it is the median over the sites with other values. If
    only one site has such values, there is nothing to compare it with.
    """
    known = scales[~np.isnan(scales)]
    if len(known) < _FEW:
        return np.inf
    if (median := float(np.median(known))) > 0:
        return median
    return float(np.median(known[known > 0])) if (known > 0).sum() > 1 else np.inf


def _and(sites: Sequence[str]) -> str:
    shown = [*sites[:3], f"{len(sites) - 3} more"] if len(sites) > 4 else sites
    return f"{', '.join(shown[:-1])} and {shown[-1]}"
