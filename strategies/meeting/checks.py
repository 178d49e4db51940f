"""Check sites before a run: each hello, and the values that sites must share.

Each check returns a fault in one line, or None; tuples list the checks in order. ``HELLO_CHECKS``
read one hello before the server knows who sent it, and require possible values. The operator's
terms (``terms.py``) come between. ``TOGETHER_CHECKS`` compare sites with one another and return the
sites to leave out.

If two sites claim the same data, the server cannot know who is right, so both are left out. If
sites must agree, the most frequent answer wins and the other sites are left out; ties go to the
answer of the first site by name. With three or more sites, a site is odd if the mean or standard
deviation of a feature is more than ``FAR`` times that of the median site: the site uses another
unit, or its numbers are untrue.
"""

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from fedsilo.core.files.site_names import is_visible, site_name_fault
from fedsilo.core.one_line import one_line
from fedsilo.core.site_facts import SPLITS, SiteFacts, Sums, Vector
from fedsilo.core.tasks import TASKS
from fedsilo.models.networks.kinds import NetworkShape

Facts = Mapping[str, SiteFacts]
Refused = dict[str, str]  # site name -> why it is left out, in one line

_SOFTWARE = 10  # the most entries of 'software'
_TEXT = 200  # the longest name, in characters
_CLASSES = 10_000
_MOST = 10**9  # the most samples of one class
_LENGTH, _NUMBERS = 2**20, 2**28  # the longest dimension of an input, and the most numbers in one
_DIMENSIONS = (1, 3)  # one for a row; three for channels, height and width
_SUM = 1e18  # a larger sum is refused, so that its square stays finite
# The relative error of sums over rows; and the size below which squares vanish
_ROUNDING, _TINY = 1e-9, 1e-300
_DIGEST = re.compile(r"[0-9a-f]{64}")
FAR = 1000.0
_FEW = 3  # sites; nobody can tell which one of only two sites is odd


# --- One hello: each check gets the facts, and may rely on their types only ---


def check_texts(facts: SiteFacts) -> str | None:
    """Return a fault if a text in a site's description is too long or not visible, otherwise None.

    The texts are ``distribution``, ``schema``, ``backbone``, ``features``, ``class_names``, and the
    keys and values of ``software``. Each may have at most 200 characters, all visible. A space
    counts as visible, and an empty text is valid. ``software``, the versions at the site, may have
    at most 10 entries.
    """
    if len(facts.software) > _SOFTWARE:
        return f"its 'software' has {len(facts.software)} entries, not at most {_SOFTWARE}"
    texts: dict[str, Sequence[str]] = {
        "distribution": [facts.distribution],
        "schema": [facts.schema],
        "backbone": [facts.backbone],
        "features": facts.features,
        "class-names": facts.class_names,
        "software": [*facts.software, *facts.software.values()],
    }
    for key, values in texts.items():
        if not all(len(value) <= _TEXT and is_visible(value) for value in values):
            return f"its '{key}' are not visible text of at most {_TEXT} characters"
    return None


def check_shown_names(facts: SiteFacts) -> str | None:
    """Return a fault if tables or plots cannot show a name in a site's description, otherwise None.

    The names are those of the classes, and of the ``distribution``, the group of similar sites. The
    group must not be called "all", because tables use this word for the mean over sites. No name
    may have a dollar sign or a backslash, because plots would show it as a formula.
    """
    if facts.distribution == "all":
        return "its 'distribution' is 'all', which stands for the mean over sites"
    # matplotlib reads these marks as formulas or styles
    for key, values in (("distribution", [facts.distribution]), ("class-names", facts.class_names)):
        if "$" in "".join(values) or "\\" in "".join(values):
            return f"its '{key}' have a '$' or a '\\', which plots read as a formula"
    return None


def check_fingerprints(facts: SiteFacts) -> str | None:
    """Return a fault if a fingerprint in a site's description is invalid, otherwise None.

    A fingerprint is a SHA-256 of the samples in one split, in hexadecimal with lower-case letters.
    The split must be "train", "val" or "test". A site without fingerprints has no fault.
    """
    if not facts.fingerprints.keys() <= set(SPLITS):
        return f"its 'fingerprints' may be only for {', '.join(SPLITS)}"
    if not all(map(_DIGEST.fullmatch, facts.fingerprints.values())):
        return "a fingerprint is not a SHA-256"
    return None


def check_inputs(facts: SiteFacts) -> str | None:
    """Return a fault if the shape of a site's inputs is impossible, otherwise None.

    A shape must have one dimension for a row of a table, or three for an image. Each length must be
    from 1 to 2^20, and the product of all lengths at most 2^28. If the site names a table's
    features, the shape must be one dimension with one value per feature.
    """
    shape = facts.input_shape
    # Only three lengths are looked at, because a hostile shape may have many, each of them huge
    are_lengths = all(0 < length <= _LENGTH for length in shape[:3])
    if len(shape) not in _DIMENSIONS or not are_lengths or math.prod(shape) > _NUMBERS:
        return f"an input's shape is {one_line(shape, 60)}, which is impossible"
    if facts.features and shape != (len(facts.features),):
        return f"it has {len(facts.features)} features, but inputs of shape {one_line(shape, 60)}"
    return None


def check_classes(facts: SiteFacts) -> str | None:
    """Return a fault if the number of a site's network outputs is impossible, otherwise None.

    The number is ``classes``, from 2 to 10,000. It may also be 1 if the task is regression,
    multi-label or survival. If the site names its classes, it must give one name for each output.
    """
    fewest = 1 if TASKS[facts.task].strata else 2
    if not fewest <= facts.classes <= _CLASSES:
        return f"it has {one_line(facts.classes, 30)} classes, not {fewest} to {_CLASSES}"
    if facts.class_names and len(facts.class_names) != facts.classes:
        return f"it names {len(facts.class_names)} of {one_line(facts.classes, 30)} classes"
    return None


def check_counts(facts: SiteFacts) -> str | None:
    """Return a fault if a count in a site's description is impossible, otherwise None.

    - ``label_counts``: only for the splits "train", "val" and "test", and at most 1e9 for each
      class. They may be missing, because a site hides them at trust 'sums'.
    - ``dropped``, the number of samples in no split: 0 to 1e9.
    - ``floor``, the smallest number of samples for which the site sends a mean: 1 to 1e9.
    """
    if not facts.label_counts.keys() <= set(SPLITS):
        return f"its 'label-counts' may be only for {', '.join(SPLITS)}"
    for counts in facts.label_counts.values():
        if max(counts, default=0) > _MOST:
            return f"a class has more than {_MOST} samples"
    if not 0 <= facts.dropped <= _MOST:
        return f"{one_line(facts.dropped, 30)} samples are left out"
    if not 1 <= facts.floor <= _MOST:
        return f"its 'floor' is {one_line(facts.floor, 30)}, not 1 to {_MOST}"
    return None


def check_sums(facts: SiteFacts) -> str | None:
    """Return a fault if a table's feature sums cannot come from its training rows, otherwise None.

    For each feature, a site may send the number of values, their sum, and the sum of their squares.
    The number must be whole, and at most that of the training rows. The sum must be from -1e18 to
    1e18, and the sum of squares at most 1e36, or 0 if there are no values. The squared sum must not
    exceed number * sum of squares, apart from rounding errors. Sums without feature names are a
    fault. Missing sums are not.
    """
    sums = facts.sums
    if sums is None:
        return None
    if not facts.columns():  # images have none, and statistics over no column would fail
        return "it sends 'sums-count' but names no 'features'"
    rows = facts.sizes.get("train", 0)
    if (sums.count != np.floor(sums.count)).any() or (sums.count > rows).any():
        return f"'sums-count' are not whole numbers of at most its {rows} training rows"
    if (abs(sums.total) > _SUM).any() or (sums.squares > _SUM**2).any():
        return f"'sums-total' are beyond {_SUM:g}"
    # 'find_odd_sums' does not see a feature without values, but the sites' sums include it
    if (sums.squares[sums.count == 0] != 0).any():
        return "'sums-squares' are not 0 for a feature without values"
    # Cauchy-Schwarz: n times the sum of squares is at least the square of the sum of n values
    known = sums.count * sums.squares
    if (known * (1 + _ROUNDING) + _TINY < sums.total**2 * (1 - _ROUNDING)).any():
        return "'sums-squares' are too small for 'sums-total': no values have such sums"
    return None


HELLO_CHECKS: tuple[Callable[[SiteFacts], str | None], ...] = (
    check_texts,
    check_shown_names,
    check_fingerprints,
    check_inputs,
    check_classes,
    check_counts,
    check_sums,
)


def find_hello_fault(facts: SiteFacts) -> str | None:
    """Return the first fault in a site's description of itself (hello), or None if it has no fault.

    The site's name is checked first. The checks in ``HELLO_CHECKS`` follow, for texts, inputs,
    classes, counts and sums. A fault is one sentence. It names the site if its name is valid.
    """
    # The name comes first, because the other sentences quote it
    fault = site_name_fault(facts.site)
    if fault:
        return f"{one_line(fault, 200)}: choose another 'site' in its node config"
    for check in HELLO_CHECKS:
        fault = check(facts)
        if fault:
            return f"site {facts.site} says that {fault}"
    return None


# --- Sites together: each check returns the sites to leave out, each with the reason. It gets the
# hellos by site, and whether the features' sums are pooled ---


def shape_of(facts: SiteFacts) -> NetworkShape:
    """Return the input shape and the number of classes of a site's data."""
    return NetworkShape(facts.input_shape, facts.classes)


def find_difference(site: str, facts: SiteFacts, other: str, other_facts: SiteFacts) -> str | None:
    """Describe the first difference between two sites in what all sites of a run must share.

    They must have equal tasks, shapes of inputs and outputs, features, schemas and starting
    weights. These are compared in this order. Two digests are used: ``schema`` of a table's schema
    or of images' classes and size, and ``backbone`` of the starting weights. If all are equal, the
    result is None.

    Args:
        site: the name of the first site.
        facts: the first site's description of itself and its data.
        other: the name of the second site.
        other_facts: the second site's description.
    """
    if facts.task != other_facts.task:
        return (
            f"the labels of site {site} are for task '{facts.task}', those of site {other} for "
            f"'{other_facts.task}': give all sites the same 'task' and schema"
        )
    if shape_of(facts) != shape_of(other_facts):
        return (
            f"site {site} holds {shape_of(facts)}, site {other} {shape_of(other_facts)}: all sites "
            "of a run need the same input shape and classes"
        )
    if facts.features != other_facts.features:
        odd = sorted(set(facts.features) ^ set(other_facts.features))
        how = "the same in another order"
        if odd:
            how = one_line(odd, 120)
        return (
            f"the features of sites {site} and {other} differ ({how}): give all sites the same "
            "schema"
        )
    if facts.schema != other_facts.schema:
        return (
            f"the schemas of sites {site} and {other} differ (levels, classes and their order, "
            "marks of missing values, policy or declared metrics): give all sites the same schema"
        )
    if facts.backbone != other_facts.backbone:
        both = f"{one_line(facts.backbone, 70)}; {one_line(other_facts.backbone, 70)}"
        return (
            f"the backbones of sites {site} and {other} differ ({both}): give all sites the same "
            "'vit.backbone-weights'"
        )
    return None


def find_shared_data(facts: Facts, pooled: bool) -> Refused:
    """Find the sites that have exactly the same training samples as another site.

    Such samples would count twice. Sites are compared by the fingerprint (hash) of their whole
    training split. Because the owner of the samples is unknown, all sites with an equal fingerprint
    are returned. A site without training samples, or without this fingerprint, is not compared.

    Args:
        facts: each site's description of itself and its data.
        pooled: not used. Every check that compares the sites has this argument.

    Returns:
        The reason to leave a site out, by site.
    """
    owners: dict[str, list[str]] = {}
    for site in sorted(facts):
        if facts[site].sizes.get("train") and "train" in facts[site].fingerprints:
            owners.setdefault(facts[site].fingerprints["train"], []).append(site)
    refused: Refused = {}
    for sites in owners.values():
        if len(sites) > 1:
            reason = (
                f"sites {_join_sites(sites)} hold the same training samples: one of them was given "
                "the other's data directory or volume, or its 'site' is not its own"
            )
            refused |= dict.fromkeys(sites, reason)
    return refused


def find_other_tasks(facts: Facts, pooled: bool) -> Refused:
    """Find the sites that differ from the most frequent task.

    Two sites share a task if their task, shape of inputs and outputs, features, schema and starting
    weights are equal. Of several equally frequent tasks, the one whose first site comes first by
    name counts. If all sites share one task, the result is empty.

    Args:
        facts: each site's description of itself and its data.
        pooled: not used. Every check that compares the sites has this argument.

    Returns:
        The difference from the most frequent task, as a reason to leave the site out, by site.
    """
    # The sites of each task; ties go to the task of the first site by name
    having: dict[Hashable, list[str]] = {}
    for site in sorted(facts):
        known = facts[site]
        task = (known.task, shape_of(known), known.features, known.schema, known.backbone)
        having.setdefault(task, []).append(site)
    if len(having) < 2:
        return {}
    usual = max(having.values(), key=len)[0]
    refused: Refused = {}
    for site in sorted(facts):
        difference = find_difference(site, facts[site], usual, facts[usual])
        if difference:
            refused[site] = difference
    return refused


def find_unwanted_sums(facts: Facts, pooled: bool) -> Refused:
    """Find the sites whose setting 'data.standardise' differs from that of the run.

    A site with a table sends sums over its features if its own setting is "pooled". ``pooled`` says
    whether the run's setting is "pooled". If True, the sites without sums are returned, and if
    False, the sites with sums. If no site sends sums, the result is always empty.

    Returns:
        The reason to leave a site out, by site.
    """
    if all(site.sums is None for site in facts.values()):
        return {}
    sent = "sums that nobody pools"
    if pooled:
        sent = "no sums to pool"
    refused: Refused = {}
    for site in sorted(facts):
        if (facts[site].sums is None) == pooled:
            refused[site] = (
                f"{site} sent {sent}: all sites of a run need the same 'data.standardise'"
            )
    return refused


def find_odd_sums(facts: Facts, pooled: bool) -> Refused:
    """Find the sites with a feature whose scale is more than 1000 times the median over the sites.

    A feature's scale at a site is the larger of its absolute mean and its standard deviation.
    ``_typical_scale`` gives the median, and skips features for which too few sites have values. A
    small scale is not a fault. If fewer than three sites send sums, the result is empty.

    Args:
        facts: each site's description of itself, with its sums over each feature's values.
        pooled: not used. Every check that compares the sites has this argument.

    Returns:
        The reason by site. It names the first such feature of the site.
    """
    scales: dict[str, Vector] = {}
    for site in sorted(facts):
        sums = facts[site].sums
        if sums is not None:
            scales[site] = _feature_scales(sums)
    if len(scales) < _FEW:
        return {}
    typical = np.apply_along_axis(_typical_scale, 0, np.stack(list(scales.values())))
    refused: Refused = {}
    for site, row in scales.items():
        far = np.flatnonzero(row > FAR * typical)
        if len(far):
            feature = one_line(facts[site].columns()[far[0]], 80)
            refused[site] = (
                f"site {site}: mean or standard deviation of '{feature}' is more than {FAR:g} "
                "times that of the median site: is it in another unit, or not its own?"
            )
    return refused


def _feature_scales(sums: Sums) -> Vector:
    """Return the scale of each feature at one site, as an array of shape (features,).

    The scale is the larger of the absolute mean and the standard deviation. It is NaN for a feature
    without values.

    Args:
        sums: three arrays of shape (features,): each feature's number of values, their sum, and the
            sum of their squares.
    """
    # NaN marks features without values, which must not count as 0 in a median
    known = np.where(sums.count > 0, sums.count, np.nan)
    mean = sums.total / known
    spread = np.sqrt(np.maximum(sums.squares / known - mean**2, 0.0))
    scales: Vector = np.fmax(abs(mean), spread)
    return scales


def _typical_scale(scales: Vector) -> float:
    """Return the median scale of one feature over sites, to which each site is compared.

    If the median is 0, as for a flag that is rarely set, it is taken over the sites with a scale
    above 0.

    Args:
        scales: the feature's scale at each site, an array of shape (sites,). NaN stands for no
            values.

    Returns:
        The median. It is infinity, which no scale exceeds, if fewer than three sites have values.
        It is also infinity if the median is 0 and fewer than two sites have a scale above 0.
    """
    known = scales[~np.isnan(scales)]
    if len(known) < _FEW:
        return np.inf
    median = float(np.median(known))
    if median > 0:
        return median
    positive = known[known > 0]
    if len(positive) < 2:
        return np.inf
    return float(np.median(positive))


def _join_sites(sites: Sequence[str]) -> str:
    """Join at least two site names by commas and "and".

    If there are more than four names, only the first three are shown, with the number of the
    remaining names, as in "a, b, c and 2 more".
    """
    shown = list(sites)
    if len(sites) > 4:
        shown = [*sites[:3], f"{len(sites) - 3} more"]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


# Sites that one check returns are left out before the next check runs
TOGETHER_CHECKS: tuple[Callable[[Facts, bool], Refused], ...] = (
    find_shared_data,
    find_other_tasks,
    find_unwanted_sums,
    find_odd_sums,
)
