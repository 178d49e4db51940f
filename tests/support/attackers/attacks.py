"""The attacks by name, and a hospital under one of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.attackers import images, inversion, means
from tests.support.attackers.asked import SERVER, Asked, Attack, nobody
from tests.support.attackers.planes import FEATURES, PLAN, WAYS, planes_by
from tests.support.hospital import Hospital
from tests.support.setting_keys import as_keys

DATA = (
    "dataset",
    "data.standardise",
    "split.silos",
    "split.silo-train-size",
    "split.silo-test-size",
)
_STILL = {"network": "mlp", "optimiser": "sgd", "learning_rate": 1e-12} | {
    "local_steps": 2,
    "batch_size": 4096,
}
_HEART = {"dataset": "heart-synthetic", "standardise": "declared", "dropout": 0.0}


@dataclass(frozen=True)
class Planned:
    """An attack, and what the attacker's run says.

    Attributes:
        attack: asks a hospital and adds candidates.
        method: of the run, whatever the attacker's own command says of it.
        run: its settings.
        messages: for the page.
        releases: of a private run's message, as the accountant counts them.
        site: the hospital.
    """

    attack: Attack
    method: str = "fedavg"
    run: Mapping[str, Any] = field(default_factory=dict)
    messages: int = 6
    releases: int = 2
    site: str = "cleveland"


def _planes(method: str) -> Planned:
    way = WAYS[method]
    return Planned(planes_by(way), method, _HEART | PLAN | dict(way.run), releases=way.releases)


PLANES = {f"planes, {method}": _planes(method) for method in sorted(WAYS)}
PLANES["planes, fedavg"] = replace(PLANES["planes, fedavg"], messages=20)
MEANS = {
    "class means, fedproto": Planned(
        means.read_class_means,
        "fedproto",
        _HEART | _STILL | {"width": means.BINS * (FEATURES + 1)},
        messages=5,
        releases=3,
    ),
    "mean logits, feddistill": Planned(
        means.read_mean_logits,
        "feddistill",
        _HEART | _STILL | {"width": 8},
        messages=8 * means.PAIRED,
        releases=3,
    ),
    "centroids, uefl": Planned(
        means.read_centroids,
        "uefl",
        _HEART
        | _STILL
        | {"width": 1 + FEATURES, "uefl__codes": 2, "uefl__centroid_min_count": 1}
        | {"dropout": 1e-6, "mc_passes": 1},
        messages=90,
    ),
}
IMAGES = {
    "images by planes, fedavg": Planned(
        images.read_images,
        run=images.DIGITS | images.VIT | {"backbone_width": images.SIZES["planes"]},
        messages=5,
        site="s1a",
    ),
    "images by class means, fedproto": Planned(
        images.read_mean_images,
        "fedproto",
        images.DIGITS | images.VIT | {"backbone_width": images.SIZES["means"]},
        messages=6,
        releases=3,
        site="s1a",
    ),
}
HONEST = {
    "inversion of honest weights, fedavg": Planned(
        inversion.read_updates,
        run=_HEART | inversion.HONEST | inversion.SMALLEST,
        messages=2,
    ),
}
ATTACKS: dict[str, Planned] = PLANES | MEANS | IMAGES | HONEST


def attacked(name: str, budget: float, home: Path, messages: int = 0, seed: int = 0) -> Asked:
    """Return a hospital after an attack; without a budget it trusts the server."""
    planned = ATTACKS[name]
    messages = messages or planned.messages
    # One more release for the label counts
    level = nobody(budget, 1 + planned.releases * messages) if budget else SERVER
    run = {**planned.run, **level.run, "method": planned.method}
    named = as_keys(run)
    checked = {key: named.pop(key) for key in DATA if key in named} | {"network": "auto"}
    # The attacker's own command would refuse some of the rest: he does not use it
    site = Asked(Hospital(home, checked, planned.site, dict(level.node), named))
    planned.attack(site, np.random.default_rng(seed), messages)
    return site
