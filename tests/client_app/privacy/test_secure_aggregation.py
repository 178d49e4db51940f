"""Sites of one round, each with its folder; a test hands on what a server would."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsilo.client_app.privacy.secure_aggregation import SECRETS, SUMS, SecureSite
from fedsilo.models.contract.errors import CheckpointError, RefusedError, SiteError
from fedsilo.models.contract.messages import SECURE_KEYS, SECURE_SHARES, SECURE_UNMASK
from fedsilo.models.contract.settings import CommonSettings

NAMES = ["a", "b", "c", "d"]
COMMON = CommonSettings(clip_norm=2.0, secure_aggregation="secagg")
SENT = {"w": torch.zeros(2)}


@dataclass
class Round:
    """Four sites in round 3, and what they have answered."""

    folder: Path
    keys: dict[str, Any] = field(default_factory=dict)
    shares: dict[str, Any] = field(default_factory=dict)

    def site(self, name: str, round_: int = 3, **asked: Any) -> SecureSite:
        return SecureSite(name, round_, COMMON, self.folder / name, asked)

    def make_keys(self) -> None:
        self.keys = {name: self.site(name).answer(SECURE_KEYS) for name in NAMES}

    def all_keys(self, **changes: Any) -> dict[str, Any]:
        return {
            "sites": NAMES,
            "mask-keys": [self.keys[name]["mask-key"] for name in NAMES],
            "seal-keys": [self.keys[name]["seal-key"] for name in NAMES],
            "threshold": 3,
            **changes,
        }

    def share(self) -> None:
        asked = self.all_keys()
        self.shares = {name: self.site(name, **asked).answer(SECURE_SHARES) for name in NAMES}

    def sealed_for(self, name: str) -> dict[str, Any]:
        senders = [other for other in NAMES if other != name]
        return {
            "from": senders,
            "sealed": [self.shares[s]["sealed"][self.shares[s]["to"].index(name)] for s in senders],
        }

    def masked(self, name: str, values: list[float], **changes: Any) -> Any:
        site = self.site(name, **{"sites": NAMES, "weight": 1.0, **changes})
        return site.masked({"w": torch.tensor(values)}, SENT)["w"]


@pytest.fixture
def ready(tmp_path: Path) -> Round:
    round_ = Round(tmp_path)
    round_.make_keys()
    round_.share()
    return round_


def test_what_leaves_looks_like_no_weights_and_differs_with_the_keys(tmp_path: Path) -> None:
    left = []
    for attempt in ("one", "two"):
        round_ = Round(tmp_path / attempt)
        round_.make_keys()
        round_.share()
        left.append(round_.masked("a", [0.5, 0.5]))
    assert left[0].dtype == np.uint32
    assert left[0][0] != left[0][1]
    assert (left[0] != left[1]).all()


def test_the_same_masks_never_hide_two_updates(ready: Round) -> None:
    ready.masked("a", [0.5, 0.5])
    with pytest.raises(RefusedError, match=r"left already.* begin the round again"):
        ready.masked("a", [0.25, 0.5])
    ready.make_keys()  # the fix
    ready.share()
    assert len(ready.masked("a", [0.25, 0.5])) == 2


def test_of_a_site_one_kind_of_share_leaves(ready: Round) -> None:
    for name in NAMES:
        ready.masked(name, [0.5, 0.5])
    asked = ready.sealed_for("a")
    told = ready.site("a", answered=["a", "b", "c"], **asked).answer(SECURE_UNMASK)
    again = ready.site("a", answered=["a", "b", "c"], **asked).answer(SECURE_UNMASK)
    assert dict(told) == dict(again)
    assert told["of"] == NAMES
    with pytest.raises(RefusedError, match=r"the sum of a, b, c was opened .* single sites'"):
        ready.site("a", answered=["a", "b", "d"], **asked).answer(SECURE_UNMASK)
    secrets = json.loads((ready.folder / "a" / SECRETS).read_text())
    assert secrets["masking"] == secrets["own_mask"] == "", "no longer needed"


def test_a_round_that_is_begun_anew_opens_no_other_sum(ready: Round) -> None:
    for name in NAMES:
        ready.masked(name, [0.5, 0.5])
    ready.site("a", answered=["a", "b", "c"], **ready.sealed_for("a")).answer(SECURE_UNMASK)
    ready.make_keys()
    ready.share()
    with pytest.raises(RefusedError, match=r"the sum of a, b, c was opened .* same sites answer"):
        ready.masked("a", [0.5, 0.5], sites=["a", "b", "d"])
    ready.masked("a", [0.5, 0.5])
    asked = ready.sealed_for("a")
    with pytest.raises(RefusedError, match="the sum of a, b, c was opened in this round before"):
        ready.site("a", answered=NAMES, **asked).answer(SECURE_UNMASK)
    told = ready.site("a", answered=["a", "b", "c"], **asked).answer(SECURE_UNMASK)  # the fix
    assert told["of"] == NAMES
    (ready.folder / "a" / SUMS).write_text("[]")
    with pytest.raises(CheckpointError, match=r"secure-sums.json is damaged .* bring it back"):
        ready.site("a", answered=["a", "b", "c"], **asked).answer(SECURE_UNMASK)


def test_sums_of_the_newest_rounds_are_remembered(tmp_path: Path) -> None:
    site = SecureSite("a", 1, COMMON, tmp_path, {})
    for number in range(1, 6):
        dataclasses.replace(site, round=number)._note_sum(["a", "b", "c"])
    assert list(json.loads((tmp_path / SUMS).read_text())) == ["3", "4", "5"]


def test_sums_of_few_sites_are_not_helped_with(ready: Round) -> None:
    with pytest.raises(RefusedError, match=r"2 sites share their keys, and 3 are needed"):
        ready.masked("a", [0.5, 0.5], sites=["a", "b"])
    ready.masked("a", [0.5, 0.5], sites=["a", "b", "c"])
    with pytest.raises(RefusedError, match=r"2 sites have sent their weights, and 3 are needed"):
        ready.site("a", answered=["a", "b"], **ready.sealed_for("a")).answer(SECURE_UNMASK)
    with pytest.raises(RefusedError, match="that masks no weights is said to have sent some"):
        ready.site("a", answered=["a", "b", "d"], **ready.sealed_for("a")).answer(SECURE_UNMASK)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"threshold": 2}, "threshold 2 is not the one of the run's settings"),
        ({"sites": ["a", "b"]}, "not one key of each kind for each site"),
        ({"sites": ["b", "c", "d", "e"]}, "no sorted list of sites with this one in it"),
        ({"sites": ["b", "a", "c", "d"]}, "no sorted list of sites"),
        ({"sites": 3}, "no list of texts 'sites'"),
        ({"mask-keys": [b"x" * 2000] * 4}, "no list 'mask-keys' of at most 1024 bytes"),
        ({"mask-keys": [b"x"] * 4}, "two sites have the same key"),
        (
            {"seal-keys": [b"w", b"x", b"y", b"z"]},
            "the keys under this site's name are not its own",
        ),
    ],
)
def test_keys_that_cannot_be_of_four_sites_are_refused(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    round_ = Round(tmp_path)
    round_.make_keys()
    with pytest.raises(SiteError, match=told):
        round_.site("a", **round_.all_keys(**changes)).answer(SECURE_SHARES)
    assert round_.site("a", **round_.all_keys()).answer(SECURE_SHARES)["to"] == ["b", "c", "d"]
    with pytest.raises(RefusedError, match="shared already: begin the round again"):
        round_.site("a", **round_.all_keys()).answer(SECURE_SHARES)


def test_shares_of_another_round_do_not_open(ready: Round) -> None:
    old = ready.sealed_for("a")
    ready.make_keys()
    ready.share()
    for name in NAMES:
        ready.masked(name, [0.5, 0.5])
    with pytest.raises(SiteError, match="sealed by another key: of another round"):
        ready.site("a", answered=NAMES, **old).answer(SECURE_UNMASK)
    with pytest.raises(SiteError, match="the shares of site b did not come"):
        ready.site("a", answered=NAMES, sealed=[], **{"from": []}).answer(SECURE_UNMASK)


@pytest.mark.parametrize("weight", [None, 0.0, 1.5, "1", 1, float("nan")])
def test_a_weight_is_a_part_of_one(weight: Any, ready: Round) -> None:
    with pytest.raises(SiteError, match="no 'weight' above 0 and at most 1"):
        ready.masked("a", [0.5, 0.5], weight=weight)


@pytest.mark.parametrize(
    ("alter", "kind", "told"),
    [
        (lambda p: p.unlink(), SiteError, "it has no keys .* begin the round again"),
        (lambda p: p.write_text("{"), CheckpointError, "is damaged .* remove it"),
        (lambda p: p.write_text("[]"), CheckpointError, "is damaged"),
        (
            lambda p: p.write_text(json.dumps({**json.loads(p.read_text()), "own_mask": "zz"})),
            CheckpointError,
            "is damaged",
        ),
    ],
)
def test_keys_that_are_gone_or_damaged_are_told(
    alter: Callable[[Path], Any], kind: type[Exception], told: str, ready: Round
) -> None:
    alter(ready.folder / "a" / SECRETS)
    with pytest.raises(kind, match=told):
        ready.masked("a", [0.5, 0.5])


def test_keys_are_of_one_round_and_their_files_the_owners_alone(ready: Round) -> None:
    assert (ready.folder / "a" / SECRETS).stat().st_mode & 0o777 == 0o600
    with pytest.raises(SiteError, match="are of round 3, and round 4 is asked for"):
        ready.site("a", 4, sites=NAMES, weight=1.0).masked(SENT, SENT)
