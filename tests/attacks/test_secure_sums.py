"""A server, alone or with hospitals, against a secure sum: docs/secure-aggregation.md's bounds.

The hospitals are the app's own code; of those that work with the server it also reads the disk.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsilo.client_app.privacy.round_secrets import RoundSecrets, read_secrets
from fedsilo.client_app.privacy.summand import Summand
from fedsilo.core.errors import RefusedError, SiteError
from fedsilo.core.messages import SECURE_KEYS, SECURE_SHARES, SECURE_UNMASK
from fedsilo.models.privacy.secure_sum import (
    mask_arrays,
    needed_sites,
    quantisation,
    tolerated_colluders,
)
from fedsilo.strategies.wire.secure_keys import (
    Shares,
    join_shares,
    mask_key,
    new_key_pair,
    open_shares,
)
from fedsilo.strategies.wire.signatures import (
    bound_to,
    key_words,
    public_text,
    sign_text,
    simulated_key,
    words,
)
from tests.support.errors import refuses
from tests.support.hospital import Hospital
from tests.support.secure_round import CAME, COMMON, SAMPLES, Round

SUMS: dict[str, Any] = {
    "trust": "sums",
    "secure_aggregation": "secagg",
    "clip_norm": 5.0,
    "standardise": "declared",
    "rounds": 10,
}
VICTIM = [1.25, -0.5]


def a_round(folder: Path, sites: int, threshold: int) -> Round:
    """Return a round whose first site is the victim and whose weights have all come."""
    names = [f"s{number}" for number in range(sites)]
    round_ = Round(folder, names, replace(COMMON, secure_threshold=threshold))
    round_.begin()
    return round_


def disk(round_: Round, name: str) -> RoundSecrets:
    return read_secrets(round_.folder / name, 3)


class Attacker:
    """The server, and the sites that work with it.

    Attributes:
        round: that is attacked; the victim is its first site.
        with_it: the colluding sites.
        came: what every site has sent, by site.
    """

    def __init__(self, round_: Round, colluding: int) -> None:
        self.round = round_
        self.victim, *others = round_.names
        self.with_it = others[len(others) - colluding :]
        self.honest = [name for name in round_.names if name not in self.with_it]
        self.disks = {name: disk(round_, name) for name in self.with_it}
        self.received = {
            name: round_.site(name, counts={"train": 10}, sites=list(round_.names)).mask(
                {"w": torch.tensor(VICTIM if name == self.victim else [0.5, 0.5])}, CAME, {}
            )
            for name in round_.names
        }
        self.context = disk(round_, self.victim).context

    def signatures(self, group: Sequence[str], listed: Sequence[str]) -> dict[str, Any]:
        """Return the signatures of a group and of all that collude under one list."""
        said = words("answered", self.context, list(listed))
        own = {
            name: sign_text(simulated_key(self.round.common.seed, name), said)
            for name in self.with_it
        }
        for name in group:
            own[name] = self.round.signed(name, listed)
        signers = sorted(set(own) & set(listed))
        return {"signers": signers, "signatures": [own[name] for name in signers]}

    def shares(self, group: Sequence[str], listed: Sequence[str]) -> dict[str, list[bytes]]:
        """Return the shares that a group gives of each site once it is told one list."""
        agreed = self.signatures(group, listed)
        given: dict[str, list[bytes]] = {}
        for name in group:
            with contextlib.suppress(RefusedError):
                told = self.round.unmask(name, agreed)
                for site, share in zip(told["of"], told["shares"], strict=True):
                    given.setdefault(site, []).append(share)
        return given

    def own_shares(self, site: str) -> list[Shares]:
        """Return the shares of ``site`` that those who collude hold themselves."""
        held = []
        for name, secrets in self.disks.items():
            token = self.round.shares[site]["sealed"][self.round.shares[site]["to"].index(name)]
            way = secrets.sites.index(site), secrets.sites.index(name)
            held.append(open_shares(token, secrets.seal_key_with(site), way))
        return held

    def splits_the_honest(self, told_all: int) -> list[float] | None:
        """Tell some that the victim's weights came and others not; return its update, if it opens.

        Args:
            told_all: honest sites, the victim first, that are told that all weights came.
        """
        groups = self.honest[:told_all], self.honest[told_all:]
        everyone = list(self.round.names)
        without = [name for name in everyone if name != self.victim]
        own_masks = self.shares(groups[0], everyone).get(self.victim, [])
        mask_keys = self.shares(groups[1], without).get(self.victim, [])
        own = self.own_shares(self.victim)
        own_masks += [shares.own_mask for shares in own]
        mask_keys += [shares.mask_key for shares in own]
        threshold = needed_sites(self.round.common, len(everyone))
        if min(len(own_masks), len(mask_keys)) < threshold:
            return None
        return self.unmasked(join_shares(own_masks[:threshold]), join_shares(mask_keys[:threshold]))

    def unmasked(self, own_mask: bytes, private: bytes) -> list[float]:
        """Return the victim's update from both of its secrets."""
        bound = bound_to(self.context, CAME, ["secure/counts", "w"])
        plus, minus = [], [own_mask]
        for other in self.round.names[1:]:  # all come after the victim: it has added their masks
            minus.append(mask_key(private, bytes(self.round.keys[other]["mask-key"]), bound))
        left = mask_arrays(self.received[self.victim], plus, minus)["w"]
        way = quantisation(self.round.common, len(self.round.names), SAMPLES)
        return way.total(left, 1).tolist()


def opened_by(folder: Path, sites: int, threshold: int, colluding: int) -> list[list[float]]:
    """Return what every way of telling sites different things opens."""
    found = []
    for told_all in range(1, sites - colluding):
        attacker = Attacker(a_round(folder / str(told_all), sites, threshold), colluding)
        if (update := attacker.splits_the_honest(told_all)) is not None:
            found.append(update)
    return found


@pytest.mark.parametrize(("sites", "threshold"), [(6, 4), (6, 5), (5, 4), (4, 3)])
def test_one_site_fewer_than_the_theorem_allows_opens_nothing(
    sites: int, threshold: int, tmp_path: Path
) -> None:
    assert opened_by(tmp_path, sites, threshold, 2 * threshold - sites - 1) == []


@pytest.mark.parametrize(("sites", "threshold"), [(6, 4), (5, 3), (4, 3)])
def test_as_many_sites_as_the_theorem_excludes_open_the_victim(
    sites: int, threshold: int, tmp_path: Path
) -> None:
    """2t = n + c: the bound is tight, so the page must not promise more."""
    found = opened_by(tmp_path, sites, threshold, 2 * threshold - sites)
    assert found
    assert all(update == pytest.approx(VICTIM, abs=1e-6) for update in found)


def test_default_threshold_bears_just_under_a_third() -> None:
    borne = {n: tolerated_colluders(needed_sites(COMMON, n), n) for n in (3, 4, 5, 6, 7, 9, 10)}
    assert borne == {3: 1, 4: 1, 5: 2, 6: 3, 7: 2, 9: 4, 10: 3}
    assert all(borne[n] >= (n - 1) // 3 for n in borne)


def test_the_smallest_sum_hides_a_site_among_those_that_do_not_collude(tmp_path: Path) -> None:
    """With t - 1 colluding sites a sum of t sites is the victim's own, so t - 2 are tolerated."""
    attacker = Attacker(a_round(tmp_path, 3, 3), 1)
    assert tolerated_colluders(3, 3) == 1
    listed = list(attacker.round.names)
    assert attacker.shares(attacker.honest, listed).keys() == set(listed), "the whole sum"
    few = Attacker(a_round(tmp_path / "few", 4, 3), 1)
    with refuses(RefusedError, 2, 3):
        few.round.signed("s0", ["s0", "s3"])


@pytest.mark.parametrize(("borne", "refused"), [(1, False), (2, True)])
def test_a_hospital_refuses_sums_that_bear_fewer_than_it_fears(
    borne: int, refused: bool, tmp_path: Path
) -> None:
    round_ = replace(a_round(tmp_path, 4, 3), colluding=borne)
    round_.make_keys()
    site = round_.site("s0", **round_.all_keys())
    if refused:
        with refuses(RefusedError, 1, 2):
            site.answer(SECURE_SHARES)
    else:
        assert site.answer(SECURE_SHARES)["to"] == ["s1", "s2", "s3"]


def forged(round_: Round, site: str, signer: str) -> dict[str, Any]:
    """Return keys of the server's own, said to be those of ``site``, signed by ``signer``'s key."""
    pairs, private = [new_key_pair() for _ in range(2)], simulated_key(99, signer)
    public = pairs[0].public, pairs[1].public
    said = key_words(round_.run, 3, site, public, round_.terms, "")
    return {
        "mask-key": public[0],
        "seal-key": public[1],
        "public": public_text(private),
        "signature": sign_text(private, said),
        "splits": "",
    }


def test_a_server_cannot_stand_in_the_middle(tmp_path: Path) -> None:
    round_ = Round(tmp_path)
    round_.make_keys()
    round_.keys["b"] = forged(round_, "b", "b")
    with pytest.raises(RefusedError, match=r"site b signs with key .* ask that hospital"):
        round_.site("a", **round_.all_keys()).answer(SECURE_SHARES)
    round_.keys["b"] |= {key: round_.site("b").answer(SECURE_KEYS)[key] for key in ("public",)}
    with pytest.raises(RefusedError, match="the signature of site b does not match its keys"):
        round_.site("a", **round_.all_keys()).answer(SECURE_SHARES)


def test_a_server_cannot_invent_sites(tmp_path: Path) -> None:
    round_ = Round(tmp_path, ("a", "x", "y"))
    round_.keys = {"a": round_.site("a").answer(SECURE_KEYS)}
    round_.keys |= {name: forged(round_, name, name) for name in ("x", "y")}
    with pytest.raises(RefusedError, match="site x signs with key"):
        round_.site("a", **round_.all_keys()).answer(SECURE_SHARES)


def test_keys_of_an_earlier_attempt_open_nothing(tmp_path: Path) -> None:
    """The server knows the masking key of a site that dropped out, and shows it again."""
    round_ = Round(tmp_path)
    round_.begin()
    old = round_.keys["b"]
    round_.make_keys()
    round_.keys["b"] = old  # signed by b, for this run and round
    asked = round_.all_keys()
    round_.shares = {n: round_.site(n, **asked).answer(SECURE_SHARES) for n in ("a", "c", "d")}
    with pytest.raises(RefusedError, match="the keys under this site's name are not its own"):
        round_.site("b", **asked).answer(SECURE_SHARES)
    for name in ("a", "c", "d"):
        round_.masked(name, [0.5, 0.5])
    agreed = round_.agree(["a", "c", "d"])
    sealed = round_.sealed_for("a") if "b" in round_.shares else {"from": [], "sealed": []}
    told = round_.site("a", **agreed, **sealed).answer(SECURE_UNMASK)
    assert told["of"] == ["a"], "of b no share of this attempt is with anybody"


def test_a_server_cannot_choose_weights(tmp_path: Path) -> None:
    """A weight that comes with the message changes nothing: each site counts its own samples."""
    sums = []
    for number, weight in enumerate((1.0, 1e-9)):
        round_ = a_round(tmp_path / str(number), 3, 3)
        total = np.zeros(2, np.uint32)
        own = []
        for name in round_.names:
            total += round_.masked(name, [0.5, -0.5], weight=weight)
            own.append(disk(round_, name).own_mask)
        zeros = {"secure/counts": np.zeros(2, np.uint32), "w": total}
        sums.append(
            quantisation(round_.common, 3, SAMPLES)
            .total(mask_arrays(zeros, [], own)["w"], 3)
            .tolist()
        )
    assert sums[0] == sums[1] == pytest.approx([1.5, -1.5], abs=1e-6)


def test_a_server_cannot_change_the_settings_once_keys_are_signed(tmp_path: Path) -> None:
    """By a 'secure.clip-norm' of their own all but the victim would hardly count in the sum."""
    round_ = a_round(tmp_path, 3, 3)
    round_.masked("s0", VICTIM)
    altered = replace(round_.common, clip_norm=1e-6)
    others = replace(round_, common=altered, terms=b"other terms")
    with pytest.raises(RefusedError, match="the run's settings changed after the keys"):
        others.masked("s1", [0.5, 0.5])


def test_what_one_site_alone_is_asked_to_train_is_in_no_sum(tmp_path: Path) -> None:
    """The others only measure: their counts are where the victim's first weights are."""
    round_ = a_round(tmp_path, 3, 3)
    total, own = np.zeros(2, np.uint32), []
    for name in round_.names:
        site = round_.site(name, sites=list(round_.names))
        updates = {"a": torch.tensor(VICTIM)} if name == "s0" else {}
        masks = site.mask(updates, CAME, {})
        total = total + masks["a" if name == "s0" else "secure/counts"]
        own.append(disk(round_, name).own_mask)
    read = quantisation(round_.common, 3, SAMPLES).total(mask_arrays({"w": total}, [], own)["w"], 1)
    assert read != pytest.approx(VICTIM, abs=1e-6)


def test_of_two_messages_at_once_one_alone_is_masked_by_the_keys(tmp_path: Path) -> None:
    round_ = a_round(tmp_path, 3, 3)
    both = threading.Barrier(2)

    class Slow(Summand):
        def numbers(self, *arguments: Any) -> dict[str, Any]:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(1)  # each has found the keys unused, if both come here
            return super().numbers(*arguments)

    def answer(number: int) -> bool:
        site = round_.site("s0", sites=list(round_.names))
        slow = Slow(site.common, {"train": 10})
        try:
            replace(site, summand=slow).mask({"w": torch.tensor(VICTIM)}, CAME, {})
        except RefusedError:
            return False
        return True

    with ThreadPoolExecutor() as pool:
        assert sorted(pool.map(answer, range(2))) == [False, True]


def test_a_server_cannot_sum_the_measurement_of_one_site(tmp_path: Path) -> None:
    measures = {"a": ("test", "val"), "b": ("val",), "c": ("val",), "d": ("val",)}
    round_ = Round(tmp_path, measures=measures)
    round_.begin()
    site = round_.site("a", counts={"train": 10, "val": 5, "test": 5}, sites=list(round_.names))
    with pytest.raises(RefusedError, match="belongs to a split that not all sites measure"):
        site.mask({}, CAME, {"incoming.test.accuracy": 0.5})
    left = site.mask({}, CAME, {"incoming.val.accuracy": 0.5})
    assert {name: array.shape for name, array in left.items()} == {
        "secure/counts": (2,),
        "secure/metrics": (1,),
        "secure/measured": (1,),
    }


def test_splits_that_are_said_for_a_site_are_signed_by_it(tmp_path: Path) -> None:
    round_ = Round(tmp_path)
    round_.make_keys()
    with pytest.raises(SiteError, match="the signature of site b does not match its keys"):
        round_.site("a", **round_.all_keys(splits=["", "test", "", ""])).answer(SECURE_SHARES)


@pytest.mark.parametrize("least", [199, 200])
def test_no_method_that_needs_more_than_sums_tells_how_many_patients_there_are(
    hospital: Callable[..., Hospital], least: int
) -> None:
    """PICSR's hello is refused below a number that the run names; in 16 hellos it is found."""
    named = {"method": "picsr", "picsr.prototype-min-count": least}
    site = hospital(node={"trust": "sums"}, unchecked=named, **SUMS)
    assert site.send("query.hello") is None
    assert "method 'picsr' needs more than the sum of the sites' arrays" in site.refusals[0]
