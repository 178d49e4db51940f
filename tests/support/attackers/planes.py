"""Planes (Fowl et al. 2022): a layer whose units each see the rows beyond a plane.

A unit's gradient is summed over the rows beyond its plane; two neighbours differ by the rows
between their planes, and where there is one, weights over bias are that row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsilo.models.methods.moon import build_projection
from tests.support.attackers.asked import Arrays, Asked, Attack, Vector

FEATURES = 13
WIDTH = 512
STEEP = 3e2  # of a gate: it is open or shut but for one row in thousands
PLAN: dict[str, Any] = {
    "network": "mlp",
    "width": WIDTH,
    "optimiser": "sgd",
    "learning_rate": 2e-4,
    "batch_size": 4096,
    "local_steps": 2,
}


@dataclass(frozen=True)
class Way:
    """How a method trains weights that a server chose, and returns them.

    Attributes:
        run: what the attacker's run says beside ``PLAN``.
        to: before the names of the arrays that are sent.
        back: before the names of those that come.
        more: other arrays that the method wants.
        personal: whether the head is the site's own.
        asked: of the instruction: phase and notes.
        releases: of a private run's message, as the accountant counts them.
    """

    run: Mapping[str, Any] = field(default_factory=dict)
    to: str = ""
    back: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    personal: bool = False
    asked: Mapping[str, Any] = field(default_factory=dict)
    releases: int = 2


_PROJECTION = build_projection(0, WIDTH).state_dict()
_SHAPES = {
    "encoder.layers.0.weight": (WIDTH, FEATURES),
    "encoder.layers.0.bias": (WIDTH,),
    "head.1.weight": (2, WIDTH),
    "head.1.bias": (2,),
}
_CONTROL = {f"control/{name}": np.zeros(shape) for name, shape in _SHAPES.items()}
_FROM_START = Way(to="start/")
_FROM_THETA = Way(to="model/")
_PLAINLY = (
    *("apfl", "cyclic", "ditto", "fedadagrad", "fedadam", "fedavg", "fedavg-ft", "fedavgm"),
    *("fedbabu", "fedbn", "fedcross", "feddyn", "fednova", "fedprox", "fedswa", "fedyogi"),
)
# Every method that trains weights of the server's choice and sends them
WAYS: dict[str, Way] = {
    **dict.fromkeys(_PLAINLY, Way()),
    **dict.fromkeys(("cross", "ensemble"), _FROM_START),
    **dict.fromkeys(("cdl", "matcha", "ring", "star"), _FROM_THETA),
    "fedaligncl": Way(
        {"fedaligncl__align": False, "fedaligncl__noise_variance": 0.0, "local_steps": 0}
        | {"batch_size": 32, "epoch_steps": 2, "pace": 2}
    ),
    "feddbe": Way(more={"mean/tokens": np.zeros((1, WIDTH))}),
    "fedefm": Way(to="visitor/other/", back="visitor/other/", asked={"phase": "overseas"}),
    "fedpac": Way({"local_steps": 4, "fedpac__head_share": 0.5}, releases=4),
    "fedper": Way(personal=True),
    "fedrep": Way({"local_steps": 4}, personal=True, releases=4),
    "moon": Way(more={f"projection/{name}": a.numpy() for name, a in _PROJECTION.items()}),
    "picsr": Way(asked={"notes": {"stage": "warmup"}}),
    "scaffold": Way(more=_CONTROL),
    "uefl": Way(
        {"uefl__codes": 2, "uefl__codeword_start": "gaussian", "uefl__refresh": "none"}
        | {"dropout": 1e-6, "mc_passes": 1},
        more={"codebook.0": np.zeros((2, WIDTH))},
    ),
}
# The others, and what they send instead
NO_WEIGHTS = {
    "distrans": "takes images alone",
    "feddistill": "sends the mean logits of each class: two numbers a class and message",
    "fedevprompt": "takes a ViT of images alone, and sends prompts and attention maps",
    "fedproto": "sends class means, which have an attack of their own",
    "local": "sends nothing but measurements",
    "mix": "is a simulation's: no hospital answers",
}


def gates(direction: Vector, edges: Vector) -> tuple[Vector, Vector]:
    """Return weights and biases of units that open where a row's projection is above an edge."""
    return STEEP * np.tile(direction, (len(edges), 1)), -STEEP * edges


def edges_for(count: int, number: int) -> Vector:
    """Return the edges of one message: those of many messages lie between each other."""
    quantiles = (np.arange(count) + (number % 5) / 5 + 0.1) / (count + 1)
    # Of a normal variable, which projections of standardised rows nearly are
    return np.asarray(2.2 * np.log(quantiles / (1 - quantiles)) / 1.7)


def direction_of(rng: np.random.Generator, size: int = FEATURES) -> Vector:
    """Return a direction (size,), of length 1."""
    direction = rng.normal(size=size)
    return np.asarray(direction / np.linalg.norm(direction))


def planes(direction: Vector, number: int, width: int = WIDTH) -> Arrays:
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


def planes_by(way: Way, width: int = WIDTH) -> Attack:
    """Return the attack that reads rows off the trained planes of a method, ``width`` of them."""

    def attack(site: Asked, rng: np.random.Generator, messages: int) -> None:
        direction = direction_of(rng)
        for number in range(messages):
            sent = planes(direction, number, width)
            # A site with a part of its own starts from the server's too
            own = {f"start/{n}": a for n, a in sent.items() if way.personal and "head" in n}
            arrays = {f"{way.to}{n}": a for n, a in sent.items()} | own | dict(way.more)
            received = site.ask(**{"phase": "train", "arrays": arrays, **way.asked})
            if received is not None:
                site.candidates += rows_between(sent, received, way.back + "encoder.layers.0")

    return attack


def rows_between(sent: Arrays, received: Arrays, layer: str) -> list[Vector]:
    """Return what one row between each two planes would be."""
    own = "encoder.layers.0"
    weight, bias = (
        received[f"{layer}.{part}"] - sent[f"{own}.{part}"].astype(np.float32)
        for part in ("weight", "bias")
    )
    with np.errstate(all="ignore"):
        return list(np.diff(weight, axis=0) / np.diff(bias)[:, None])
