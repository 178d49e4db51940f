from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.models.contract.errors import SettingError, SiteError
from fedsilo.models.contract.messages import DP_RELEASES
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.site_facts import SiteFacts
from fedsilo.models.privacy.accountant import SPENT, epsilon
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.privacy_account import PrivacyHook
from fedsilo.server_app.records.summary import NO_PRIVACY, privacy_document
from fedsilo.strategies.loop.asking import TooFewSitesError
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.reply import Reply

Z, DELTA = 2.0, 1e-5
ONE, TWO, THREE = (epsilon(Z, count, DELTA) for count in (1, 2, 3))


def private(journal: Path = Path(os.devnull), **changes: Any) -> PrivacyHook:
    settings = {"clip_norm": 1.0, "noise_multiplier": Z, **changes}
    return PrivacyHook(CommonSettings(rounds=9, **settings), journal)


def replies(releases: int | None, *sites: str, arrays: bool = True) -> dict[str, Reply]:
    metrics = {"seconds": 1.0} if releases is None else {DP_RELEASES: float(releases)}
    sent = {"w": np.zeros(2, np.float32)} if arrays else {}
    return {site: Reply(site, sent, metrics) for site in sites}


def ahead(**counts: int) -> Any:
    return lambda: counts


def participants(simulated: bool, *sites: str) -> Participants:
    facts = {s: SiteFacts(s, s, (1,), 2, {"train": [3, 4]}, {}, simulated) for s in sites}
    return Participants(facts, {})


def test_it_takes_what_the_sites_count() -> None:
    hook = private()
    hook.phase_ended(1, "train", replies(1, "a", "b"))
    hook.phase_ended(2, "train", replies(4, "a"))  # three messages were lost on their way
    assert hook.releases == {"a": 4, "b": 1}
    hook.phase_ended(2, "evaluate", replies(5, "a", arrays=False))
    assert hook.releases == {"a": 5, "b": 1}


def test_a_ledger_that_was_lost_makes_nothing_unspent() -> None:
    hook = private()
    hook.phase_ended(1, "train", replies(3, "a"))
    hook.phase_ended(2, "train", replies(1, "a"))
    assert hook.releases == {"a": 4}


def test_arrays_of_a_site_that_knows_no_noise_are_refused() -> None:
    noiseless = replies(None, "a")["a"]
    told = private().objection(2, "train", noiseless)
    assert told is not None
    assert told.startswith("arrays came without 'dp-releases', so perhaps without noise")
    assert private().objection(2, "train", replies(None, "a", arrays=False)["a"]) is None


def test_a_count_above_what_was_asked_for_is_refused_and_any_below_is_not(tmp_path: Path) -> None:
    hook = private(tmp_path / "asked.json")
    hook.arrays_asked(1, "train", ["a", "b"])
    hook.arrays_asked(2, "train", ["a"])
    assert hook.asked == {"a": 2, "b": 1}
    for count in (0, 1, 2):
        assert hook.objection(2, "train", replies(count, "a")["a"]) is None
    refused = {"a": 3, "b": 2, "nobody": 10**6}
    told = [hook.objection(2, "train", replies(n, site)[site]) or "" for site, n in refused.items()]
    assert told[0].startswith("metric 'dp-releases' is 3, and the server has asked for 2 noisy")
    assert "is 2, and the server has asked for 1" in told[1]
    assert "asked for 0" in told[2]


def test_what_was_asked_for_is_written_before_it_is_asked_and_outlives_a_server(
    tmp_path: Path,
) -> None:
    common, journal = private().common, tmp_path / "asked.json"
    killed = PrivacyHook(common, journal)
    killed.arrays_asked(1, "train", ["a"])
    checkpoint = json.loads(json.dumps(killed.state()))
    killed.arrays_asked(2, "train", ["a"])  # and then no checkpoint
    for state in (checkpoint, None):
        resumed = PrivacyHook(common, journal)
        if state:
            resumed.restore(state)
        resumed.arrays_asked(2, "train", ["a"])
        assert resumed.objection(2, "train", replies(3, "a")["a"]) is None
        assert resumed.objection(2, "train", replies(4, "a")["a"])
        journal.write_text('{"a": 2}')
    journal.write_text("{")
    damaged = PrivacyHook(common, journal)
    damaged.restore(checkpoint)
    assert damaged.asked == {"a": 1}, "the checkpoint still knows"


def test_a_checkpoint_keeps_the_counts() -> None:
    hook, resumed = private(), private()
    hook.phase_ended(1, "train", replies(2, "a"))
    resumed.restore(json.loads(json.dumps(hook.state())))
    assert resumed.releases == {"a": 2}


def test_it_ends_the_run_before_a_site_has_spent_too_much() -> None:
    hook = private(max_epsilon=(TWO + THREE) / 2)
    assert hook.why_stop(State({}, 0), ahead(a=1, b=1)) is None
    hook.phase_ended(1, "train", replies(1, "a", "b"))
    assert hook.why_stop(State({}, 1), ahead(a=1, b=1)) is None
    hook.phase_ended(2, "train", replies(2, "b"))
    said = hook.why_stop(State({}, 2), ahead(a=1, b=1))
    assert said is not None
    assert said.startswith(f"the run ends after round 2 of 9: site b has spent epsilon {TWO:.4g}")
    assert f"the next round would make it {THREE:.4g}, above 'max-epsilon'" in said


def test_a_round_of_two_messages_costs_two() -> None:
    hook = private(max_epsilon=(TWO + THREE) / 2)
    hook.phase_ended(1, "train", replies(1, "a"))
    assert hook.why_stop(State({}, 1), ahead(a=1)) is None
    said = hook.why_stop(State({}, 1), ahead(a=2))
    assert said is not None
    assert said.startswith("the run ends after round 1")


def test_rounds_in_which_nothing_leaves_cost_nothing() -> None:
    hook = private(max_epsilon=ONE)
    hook.phase_ended(1, "train", replies(1, "a"))
    assert hook.why_stop(State({}, 1), ahead(a=0)) is None


@pytest.mark.parametrize("coming", [{"a": 1}, {"a": 0}, {}])
def test_a_first_round_that_is_too_much_is_an_error(coming: dict[str, int]) -> None:
    hook = private(max_epsilon=ONE / 2)
    with pytest.raises(SettingError, match=f"epsilon of one round is {ONE:.4g} and 'max-epsilon'"):
        hook.why_stop(State({}), ahead(**coming))


def test_a_first_round_of_several_messages_is_an_error_too() -> None:
    with pytest.raises(SettingError, match=f"epsilon of one round is {TWO:.4g}"):
        private(max_epsilon=(ONE + TWO) / 2).why_stop(State({}), ahead(a=1, b=2))


def test_without_a_limit_nobody_is_asked() -> None:
    def never() -> dict[str, int]:
        raise AssertionError

    assert private().why_stop(State({}, 3), never) is None


def test_a_sites_own_refusal_ends_a_run_that_has_trained() -> None:
    reasons = f"site a, round 3, phase train: {SPENT}: site a"
    text = f"{reasons} -- 1 of 2 sites answered"
    error = TooFewSitesError(text, reasons, ["epsilon-spent"])
    hook = private()
    said = hook.why_end(State({}, 2), error)
    assert said is not None
    assert said.startswith("the run ends after round 2 of 9: site a, round 3, phase train: epsilon")
    assert "--" not in said
    assert hook.why_end(State({}, 0), error) is None, "there is nothing to evaluate"
    assert hook.why_end(State({}, 2), SiteError("the disk is full")) is None


def test_the_guarantee_is_of_each_site_and_of_the_one_that_spent_most() -> None:
    hook = private()
    hook.phase_ended(1, "train", replies(2, "a"))
    hook.phase_ended(1, "train", replies(1, "b"))
    found = hook.guarantee(participants(False, "a", "b", "idle"))
    assert (found["epsilon"], found["releases"], found["delta"]) == (TWO, 2, DELTA)
    assert found["epsilon-of-a-change"] == epsilon(Z / 2, 2, DELTA) > TWO
    assert (found["clip-norm"], found["noise-multiplier"]) == (1, Z)
    assert found["accountant"].startswith("RDP (dp-accounting ")
    assert {site: spent["releases"] for site, spent in found["sites"].items()} == {
        "a": 2,
        "b": 1,
        "idle": 0,
    }
    assert found["sites"]["b"]["epsilon"] == ONE
    assert found["sites"]["idle"] == {"epsilon": 0, "epsilon-of-a-change": 0, "releases": 0}
    assert "Label counts, measurements, seconds, fingerprints" in found["of"]
    assert "simulation" not in found["of"]
    of_simulated = hook.guarantee(participants(True, "a"))
    assert "this is a simulation" in of_simulated["of"]


def test_noise_without_clipping_is_named_and_guarantees_nothing() -> None:
    words = "Gaussian perturbation of variance 0.001, without clipping: no bound on epsilon"
    document = privacy_document("fedaligncl", "server", [], {"up": 1}, NO_PRIVACY, words)
    assert document["guarantee"] == NO_PRIVACY
    assert document["epsilon"] == "none"
    assert document["perturbation"] == words
    assert "perturbation" not in privacy_document("fedavg", "server", [], {"up": 1})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"clip-norm": 1.0}, "needs both above 0"),
        ({"max-epsilon": 8.0}, "without clipping there is no epsilon"),
        (
            {"clip-norm": 1.0, "noise-multiplier": 1.0, "dataset": "heart-synthetic"},
            "'standardise' is 'pooled'",
        ),
        (
            {"clip-norm": 1.0, "noise-multiplier": 1.0, "method": "mix"},
            "method 'mix' pools the data of all sites, whose parts clipping does not bound",
        ),
    ],
)
def test_settings_that_would_guarantee_nothing_are_refused(
    values: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingError, match=said):
        resolve({"dataset": "digits", "method": "fedavg", **values})


@pytest.mark.parametrize("codes", [[], ["refused"], [""]])
def test_a_refusal_of_another_kind_does_not_end_a_run_well_whatever_its_words(
    codes: list[str],
) -> None:
    error = TooFewSitesError(f"site a: {SPENT}", f"site a: {SPENT}", codes)
    assert private().why_end(State({}, 2), error) is None
