"""What a site answers and refuses in one round of secure aggregation."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsilo.client_app.privacy.round_secrets import SECRETS
from fedsilo.client_app.privacy.unmasked_sums import SUMS, RoundSum, SummedBefore, UnmaskedSums
from fedsilo.core.errors import CheckpointError, RefusedError, SiteError
from fedsilo.core.messages import SECURE_KEYS, SECURE_SHARES
from tests.support.errors import refuses
from tests.support.secure_round import CAME, NAMES, SENT, Round

THREE = ["a", "b", "c"]


@pytest.fixture
def ready(tmp_path: Path) -> Round:
    round_ = Round(tmp_path)
    round_.begin()
    return round_


def test_masked_looks_like_no_weights_and_differs_with_the_keys(tmp_path: Path) -> None:
    left = []
    for attempt in ("one", "two"):
        round_ = Round(tmp_path / attempt)
        round_.begin()
        left.append(round_.masked("a", [0.5, 0.5]))
    assert left[0].dtype == np.uint32
    assert left[0][0] != left[0][1]
    assert (left[0] != left[1]).all()


def test_masked_refuses_the_same_keys_for_two_updates(ready: Round) -> None:
    ready.masked("a", [0.5, 0.5])
    with pytest.raises(RefusedError, match=r"already left.* begin the round again"):
        ready.masked("a", [0.25, 0.5])
    ready.begin()  # the fix
    assert len(ready.masked("a", [0.25, 0.5])) == 2


def test_masked_does_not_tell_that_a_site_has_more_samples_than_the_bound(ready: Round) -> None:
    assert len(ready.masked("a", [0.5, 0.5], samples=11)) == 2


def test_unmask_gives_one_kind_of_share_of_each_site_once(ready: Round) -> None:
    ready.all_masked()
    told = ready.unmask("a", agreed := ready.agree(THREE))
    assert told["of"] == NAMES
    assert not (ready.folder / "a" / SECRETS).exists(), "keys and own shares are erased"
    with pytest.raises(SiteError, match="it has no keys for secure aggregation"):
        ready.unmask("a", agreed)


def test_agree_signs_one_list_by_the_keys_of_a_round(ready: Round) -> None:
    ready.all_masked()
    ready.signed("a", THREE)
    ready.signed("a", THREE)
    with pytest.raises(RefusedError, match="another list of sites is already signed"):
        ready.signed("a", NAMES)


def test_unmask_refuses_before_enough_sites_have_signed_the_same_list(ready: Round) -> None:
    ready.all_masked()
    with pytest.raises(RefusedError, match="signed no list of sites yet"):
        ready.unmask("a", {"signers": [], "signatures": []})
    of_three = {name: ready.signed(name, THREE) for name in ("a", "b")}
    of_four = {name: ready.signed(name, NAMES) for name in ("c", "d")}
    said = {"signers": THREE, "signatures": [*of_three.values(), of_four["c"]]}
    with refuses(RefusedError, 2, 3):
        ready.unmask("a", said)
    with pytest.raises(SiteError, match="sites that have signed must be sorted"):
        ready.unmask("a", {"signers": NAMES, "signatures": [*said["signatures"], of_four["d"]]})


def test_unmask_refuses_signatures_of_an_earlier_attempt(ready: Round) -> None:
    ready.all_masked()
    before = {name: ready.signed(name, THREE) for name in ("b", "c")}
    ready.begin()
    ready.all_masked()
    signatures = [ready.signed("a", THREE), *before.values()]
    with pytest.raises(RefusedError, match="1 sites have signed the same list"):
        ready.unmask("a", {"signers": THREE, "signatures": signatures})


def test_a_round_that_is_begun_again_opens_no_other_sum(ready: Round) -> None:
    ready.all_masked()
    ready.unmask("a", ready.agree(THREE))
    ready.begin()
    with pytest.raises(RefusedError, match=r"the sum of a, b, c was already .* same sites"):
        ready.masked("a", [0.5, 0.5], sites=["a", "b", "d"])
    with pytest.raises(RefusedError, match="already unmasked with a different part"):
        ready.masked("a", [0.5, 0.25])
    with pytest.raises(RefusedError, match="already unmasked with a different part"):
        ready.masked("a", [0.5, 0.5], samples=9)
    ready.all_masked()
    with pytest.raises(RefusedError, match="the sum of a, b, c was already unmasked in this round"):
        ready.signed("a", NAMES)
    assert ready.unmask("a", ready.agree(THREE))["of"] == NAMES  # the fix
    (ready.folder / "a" / SUMS).write_text("[]")
    ready.begin()
    with refuses(CheckpointError, "secure-sums.json"):
        ready.masked("a", [0.5, 0.5])


def test_opened_sums_remember_the_newest_rounds(tmp_path: Path) -> None:
    for number in range(1, 6):
        UnmaskedSums(tmp_path, number).note(RoundSum(THREE, "digest"))
    assert list(json.loads((tmp_path / SUMS).read_text())) == ["3", "4", "5"]


def test_sums_of_few_sites_are_refused(ready: Round) -> None:
    with refuses(RefusedError, 2, 3):
        ready.masked("a", [0.5, 0.5], sites=["a", "b"])
    ready.masked("a", [0.5, 0.5], sites=THREE)
    with refuses(RefusedError, 2, 3):
        ready.signed("a", ["a", "b"])
    with pytest.raises(RefusedError, match="that did not take part in masking"):
        ready.signed("a", ["a", "b", "d"])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"threshold": 2}, "threshold 2 differs from the one of the run's settings"),
        ({"sites": ["a", "b"]}, "one key of each kind for each site"),
        (
            {"sites": ["b", "c", "d", "e"]},
            "sites that make keys must be sorted.* include this site",
        ),
        ({"sites": ["b", "a", "c", "d"]}, "sites that make keys must be sorted"),
        ({"sites": 3}, "no list of texts 'sites'"),
        ({"mask-keys": [b"x" * 2000] * 4}, "no list 'mask-keys' of at most 1024 bytes"),
        ({"mask-keys": [b"x"] * 4}, "two sites have the same key"),
        (
            {"seal-keys": [b"w", b"x", b"y", b"z"]},
            "the keys under this site's name are not its own",
        ),
        ({"signatures": [b"x"] * 4}, "the signature of site a does not match its keys"),
        ({"publics": [b"x"] * 4}, "a received public key is not in OpenSSH's form"),
    ],
)
def test_shared_refuses_keys_that_cannot_be_of_four_sites(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    round_ = Round(tmp_path)
    round_.make_keys()
    with pytest.raises(SiteError, match=told):
        round_.site("a", **round_.all_keys(**changes)).answer(SECURE_SHARES)
    assert round_.site("a", **round_.all_keys()).answer(SECURE_SHARES)["to"] == ["b", "c", "d"]
    with pytest.raises(RefusedError, match="already shared: begin the round again"):
        round_.site("a", **round_.all_keys()).answer(SECURE_SHARES)


def test_unmask_skips_shares_of_another_round(ready: Round) -> None:
    old = ready.sealed_for("a")
    ready.begin()
    ready.all_masked()
    agreed = ready.agree(NAMES)
    told = ready.site("a", **agreed, **old).answer("secure-unmask")
    assert told["of"] == ["a"], "its own alone"


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
def test_keys_that_are_gone_or_damaged_are_reported(
    alter: Callable[[Path], Any], kind: type[Exception], told: str, ready: Round
) -> None:
    alter(ready.folder / "a" / SECRETS)
    with pytest.raises(kind, match=told):
        ready.masked("a", [0.5, 0.5])


def test_keys_are_of_one_round_and_their_file_the_owners_alone(ready: Round) -> None:
    assert (ready.folder / "a" / SECRETS).stat().st_mode & 0o777 == 0o600
    with refuses(SiteError, 3, 4):
        ready.site("a", 4, sites=NAMES).mask(SENT, CAME, {})


@pytest.mark.parametrize("change", [{"run": "other"}, {"terms": b"other"}])
def test_keys_of_another_run_or_of_other_settings_are_refused(
    change: dict[str, Any], tmp_path: Path
) -> None:
    round_ = Round(tmp_path)
    round_.make_keys()
    other = dataclasses.replace(round_, **change)
    round_.keys["b"] = other.site("b").answer(SECURE_KEYS)
    with pytest.raises(RefusedError, match="signature of site b does not match its keys in this"):
        round_.share()


def test_masks_cancel_only_for_sites_that_were_sent_the_same(ready: Round) -> None:
    """Two sites mask with each other; what is left of both sums tells whether they cancelled."""

    def left_of(came_b: Any) -> int:
        ready.begin()
        site = ready.site("a", sites=NAMES)
        total = site.mask(SENT, CAME, {})["w"].copy()
        for name in ("b", "c", "d"):
            received = came_b if name == "b" else CAME
            total += ready.site(name, sites=NAMES).mask(SENT, received, {})["w"]
        for name in NAMES:  # own masks come off
            own = json.loads((ready.folder / name / SECRETS).read_text())["own_mask"]
            from fedsilo.models.privacy.secure_sum import mask_arrays

            zeros = {"secure/counts": np.zeros(2, np.uint32), "w": np.zeros(2, np.uint32)}
            total -= mask_arrays(zeros, [bytes.fromhex(own)])["w"]
        return int(total[0])

    half = 4 * round((2**30 - 1) / 2)  # four sites' quantised zeros, at the middle of 30 bits
    assert abs(left_of(CAME) - half) <= 4
    assert abs(left_of({"arrays/w": torch.ones(2).numpy()}) - half) > 4


def test_a_fit_of_other_columns_is_another_question_about_the_same_arrays(tmp_path: Path) -> None:
    """Every fit begins with the same arrays: only the same columns need the same sites."""
    SummedBefore(tmp_path, "terms", "age,sex").note("arrays", THREE, failed=False)
    SummedBefore(tmp_path, "terms", "age,dose").refuse_changed_sum("arrays", THREE[:2])
    SummedBefore(tmp_path, "others", "age,dose").refuse_changed_sum("arrays", THREE)
    with pytest.raises(RefusedError):
        SummedBefore(tmp_path, "terms", "age,sex").refuse_changed_sum("arrays", THREE[:2])
    with pytest.raises(RefusedError):
        SummedBefore(tmp_path, "others", "age,sex").refuse_changed_sum("arrays", THREE)
