"""Means over samples: FedProto's class means, FedDistill's mean logits, UEFL's centroids."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from tests.support.attackers.asked import Arrays, Asked, Vector
from tests.support.attackers.planes import FEATURES, STEEP, direction_of, edges_for, gates

BINS = 128
PAIRED = 7  # messages that FedDistill's two logits need for 13 features and a count
REFRESHES = {"notes": {"refreshes": "true"}}  # the first book: centroids, not a Gaussian
_LINEAR = 1e3  # so far above 0 a GELU changes nothing


def read_class_means(site: Asked, rng: np.random.Generator, messages: int) -> None:
    """Read rows off FedProto's class means of a network whose start the server has chosen.

    The units of a bin are all open for the rows beyond its edge, and each adds one feature: two
    bins' means differ by the rows between, feature by feature.
    """
    direction = direction_of(rng)
    for number in range(messages):
        edges = np.repeat(edges_for(BINS, number), FEATURES + 1)
        weight, bias = gates(direction, edges)
        pick = np.tile(np.vstack([np.zeros(FEATURES), np.eye(FEATURES)]), (BINS, 1))
        start = _started(weight + pick, bias, np.zeros((2, len(edges))))
        for name, mean in (site.ask("train", start) or {}).items():
            if name.startswith("prototype/"):
                site.candidates += list(_rows_of_means(mean))


def _rows_of_means(mean: Vector) -> Iterator[Vector]:
    """Yield what one row between two edges would be, for each pair of neighbours."""
    parts = mean.reshape(BINS, FEATURES + 1)
    values = parts[:, 1:] - parts[:, :1]  # sum of the rows beyond each edge, over the count
    apart = -np.diff(values, axis=0)
    for count in range(40, 130):  # samples of the class, which the hello told or the attacker tries
        yield from apart * count


def read_mean_logits(site: Asked, rng: np.random.Generator, messages: int) -> None:
    """Read rows off FedDistill's mean logits: of a class's rows between two planes, two at a time.

    Seven messages tell the sums of 13 features and the count.
    """
    for pair in range(messages // PAIRED):
        direction, told = direction_of(rng), defaultdict(list)
        lower = edges_for(100, pair)[rng.integers(100)]
        edges = np.repeat([lower, lower + 0.02], 2)
        for part in range(PAIRED):
            number = pair * PAIRED + part
            picked = np.eye(FEATURES + 1)[2 * part : 2 * part + 2]
            start = _between(direction, edges, picked)
            # The same round of one run again: the site has no state before it
            asked = {"run_name": f"logits{number // 3}"}
            for name, logits in (site.ask("train", start, **asked) or {}).items():
                told[name].append(logits)
        with np.errstate(all="ignore"):
            for parts in told.values():
                numbers = np.concatenate(parts)
                site.candidates += [numbers[:-1] / numbers[-1]] if len(parts) == PAIRED else []


def _between(direction: Vector, edges: Vector, picked: Vector) -> Arrays:
    """Return a network whose two logits are what ``picked`` says of a row between two planes."""
    weight, bias = (10 * part for part in gates(direction, np.tile(edges, 2)))
    adds = np.tile([0.0, 1.0], 4)[:, None] * np.repeat(picked, 4, axis=0)
    signs = np.array([-1.0, 1.0, 1.0, -1.0])
    head = np.kron(np.eye(2), signs)
    return _started(weight + adds[:, :-1], bias + adds[:, -1], head)


def _started(weight: Vector, bias: Vector, head: Vector) -> Arrays:
    return {
        "start/encoder.layers.0.weight": weight,
        "start/encoder.layers.0.bias": bias,
        "start/head.1.weight": head,
        "start/head.1.bias": np.zeros(2),
    }


def read_centroids(site: Asked, rng: np.random.Generator, messages: int) -> None:
    """Read rows off UEFL's centroids: the sums of clusters that differ by one row.

    A token has the whole row and, far larger, how far it is beyond a plane, by which K-means cuts
    the rows in two. Of ten rows and more centroid and count are told, and where the cut is follows
    from the plane.
    """
    direction, sums = direction_of(rng), dict[int, Vector]()
    for number in range(messages):
        edge = -1.5 + 2.5 * number / messages
        asked = {"run_name": f"books{number // 50}", "round": 1 + number % 50}
        received = site.ask("centroids", _beyond(direction, edge), **REFRESHES, **asked) or {}
        told = zip(received.get("centroids", ()), received.get("counts", ()), strict=True)
        for centre, count in sorted(told, key=lambda one: one[0][0])[-1:]:
            sums[round(count)] = (centre[1:] - _LINEAR) * count
    site.candidates += [sums[n + 1] - sums[n] for n in sums if n + 1 in sums]


def _beyond(direction: Vector, edge: float) -> Arrays:
    """Return a network whose token (1 + FEATURES,) is how far a row is beyond a plane, and it."""
    return {
        "encoder.layers.0.weight": np.vstack([STEEP * direction, np.eye(FEATURES)]),
        "encoder.layers.0.bias": np.array([-STEEP * edge, *np.full(FEATURES, _LINEAR)]),
        "head.1.weight": np.zeros((2, 1 + FEATURES)),
        "head.1.bias": np.zeros(2),
        "codebook.0": np.zeros((2, 1 + FEATURES)),
    }
