"""What a malicious server asks a hospital for, and the rows that it reads from the answers.

Each attack asks as a malicious server can: any weights, any settings, the app as it is. It returns
candidates for rows; ``Hospital.recovered`` says how many are right.

    python -m tests.support.attackers CSV      # the table of docs/results/trust-levels.md
"""

import csv
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedsilo.models.contract.messages import ARRAYS, START
from fedsilo.models.privacy.accountant import noise_for
from fedsilo.server_app.run.inline_engine import flower_identity
from tests.support.hospital import Hospital

Vector = np.ndarray[Any, Any]
FEATURES = 13
STEEP = 3e2  # of a gate: it is open or shut but for one row in thousands
DELTA = 1e-5


@dataclass
class Asked:
    """A hospital under attack.

    Attributes:
        hospital: the hospital.
        messages: how many it was sent.
        answered: how many it answered.
    """

    hospital: Hospital
    messages: int = 0
    answered: int = 0
    candidates: list[Vector] = field(default_factory=list)


@dataclass(frozen=True)
class Level:
    """A level of trust as a hospital states it and an attacker's run meets it.

    Attributes:
        name: of the level.
        node: what the hospital's site file adds.
        run: what a run must say, so that the hospital answers at all.
    """

    name: str
    node: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)


def nobody(budget: float, releases: int) -> Level:
    """Return the level that trusts nobody; the attacker spreads the budget over all releases."""
    noise = noise_for(budget, DELTA, lambda z: {(z, 1.0): releases})
    run = {
        "trust": "nobody",
        "standardise": "declared",
        "sample_clip_norm": 1.0,
        "noise_multiplier": noise,
        "statistics_clip_norm": 1e3,
    }
    return Level("nobody", {"trust": "nobody", "max-epsilon": budget, "delta": DELTA}, run)


SERVER = Level("server", run={"standardise": "declared"})


def gates(direction: Vector, edges: Vector) -> tuple[Vector, Vector]:
    """Return weights and biases of units that open where a row's projection is above an edge."""
    return STEEP * np.tile(direction, (len(edges), 1)), -STEEP * edges


def edges_for(count: int, number: int) -> Vector:
    """Return the edges of one message: those of many messages lie between each other."""
    quantiles = (np.arange(count) + (number % 5) / 5 + 0.1) / (count + 1)
    # Of a normal variable, which projections of standardised rows nearly are
    return np.asarray(2.2 * np.log(quantiles / (1 - quantiles)) / 1.7)


def read_planes(site: Asked, rng: np.random.Generator, messages: int, width: int = 512) -> None:
    """Read rows off a first layer whose units each see the rows beyond a plane (Fowl et al. 2022).

    A unit's gradient is summed over the rows beyond its plane; two neighbours differ by the rows
    between their planes, and where there is one, weights over bias are that row.
    """
    direction = rng.normal(size=FEATURES)
    direction /= np.linalg.norm(direction)
    for number in range(messages):
        arrays = planes(direction, number, width)
        site.messages += 1
        change = site.hospital.train(arrays, round=number + 1)
        if change is None:
            continue
        site.answered += 1
        with np.errstate(all="ignore"):
            rows = np.diff(change["encoder.layers.0.weight"], axis=0)
            sums = np.diff(change["encoder.layers.0.bias"])
            site.candidates += list(rows / sums[:, None])


def planes(direction: Vector, number: int, width: int) -> dict[str, Vector]:
    """Return the network of a message: a unit for each of ``width`` planes."""
    weight, bias = gates(direction, edges_for(width, number))
    return {
        "encoder.layers.0.weight": weight,
        "encoder.layers.0.bias": bias,
        # Everybody gets the same answer with certainty, and whoever has the other label a
        # gradient of 1; beside so large weights the steps hardly move them
        "head.1.weight": np.stack([np.zeros(width), np.full(width, (-1) ** number * 1e4)]),
        "head.1.bias": np.zeros(2),
    }


def read_class_means(site: Asked, rng: np.random.Generator, messages: int, bins: int = 128) -> None:
    """Read rows off FedProto's class means of a network whose start the server has chosen.

    The units of a bin are all open for the rows beyond its edge, and each adds one feature: two
    bins' means differ by the rows between, feature by feature.
    """
    direction = rng.normal(size=FEATURES)
    direction /= np.linalg.norm(direction)
    for number in range(messages):
        edges = np.repeat(edges_for(bins, number), FEATURES + 1)
        weight, bias = gates(direction, edges)
        pick = np.tile(np.vstack([np.zeros(FEATURES), np.eye(FEATURES)]), (bins, 1))
        width = len(edges)
        start = {
            "encoder.layers.0.weight": weight + pick,
            "encoder.layers.0.bias": bias,
            "head.1.weight": np.zeros((2, width)),
            "head.1.bias": np.zeros(2),
        }
        site.messages += 1
        named = {f"{START}{name}": array for name, array in start.items()}
        reply = site.hospital.send("train", named, evaluate=False, run_name=f"means{number}")
        if reply is None or ARRAYS not in reply:
            continue
        site.answered += 1
        for name, array in reply[ARRAYS].items():
            if name.startswith("prototype/"):
                site.candidates += list(_rows_of_means(array.numpy().astype(np.float64), bins))


def _rows_of_means(mean: Vector, bins: int) -> Iterator[Vector]:
    """Yield what one row between two edges would be, for each pair of neighbours."""
    parts = mean.reshape(bins, FEATURES + 1)
    values = parts[:, 1:] - parts[:, :1]  # sum of the rows beyond each edge, over the count
    apart = -np.diff(values, axis=0)
    for count in range(40, 130):  # samples of the class, which the hello told or the attacker tries
        yield from apart * count


Attack = Callable[[Asked, np.random.Generator, int], None]
# Settings, messages, and releases of each message: steps, and class means
ATTACKS: dict[str, tuple[Attack, dict[str, Any], int, int]] = {
    "planes, FedAvg": (
        read_planes,
        {"network": "mlp", "width": 512, "optimiser": "sgd", "learning_rate": 2e-4}
        | {"batch_size": 4096, "local_steps": 2},
        20,
        2,
    ),
    "class means, FedProto": (
        read_class_means,
        {"method": "fedproto", "network": "mlp", "width": 128 * (FEATURES + 1)}
        | {"learning_rate": 1e-12, "optimiser": "sgd", "local_steps": 2, "batch_size": 4096},
        5,
        3,
    ),
}


def attacked(name: str, budget: float, home: Path, messages: int, seed: int = 0) -> Asked:
    """Return a hospital after an attack; without a budget it trusts the server."""
    attack, run, _, each = ATTACKS[name]
    # One more release for the label counts
    level = nobody(budget, 1 + each * messages) if budget else SERVER
    run = {**run, "dropout": 0.0, **level.run}
    named = {key.replace("_", "-"): value for key, value in run.items()}
    site = Asked(Hospital(home, named, "cleveland", dict(level.node)))
    attack(site, np.random.default_rng(seed), messages)
    return site


def main(path: str) -> None:
    """Write a line for each attack, level and budget."""
    with flower_identity(), open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["attack", "trust", "epsilon", "messages", "answered", "rows read", "rows"])
        for name, (_, _, messages, _) in ATTACKS.items():
            for budget in (0.0, 1.0, 8.0, 64.0):
                with tempfile.TemporaryDirectory() as home:
                    site = attacked(name, budget, Path(home), messages)
                    hospital = site.hospital
                    trust = "nobody" if budget else "server"
                    row = [name, trust, budget or "", site.messages, site.answered]
                    row += [hospital.recovered(site.candidates), len(hospital.rows())]
                table.writerow(row)
                print(row, hospital.refusals[:1], flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
