import json
from typing import Any

import numpy as np
import pytest

from fedsilo.core.errors import EpsilonSpentError, SiteError
from fedsilo.core.messages import DP_EPSILON
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import SiteFacts
from fedsilo.models.tasks.task import task_of
from fedsilo.server_app.records.privacy_account import PrivacyHook
from fedsilo.server_app.records.summary import NO_PRIVACY, privacy_document
from fedsilo.strategies.loop.ask import TooFewSitesError
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.reply import Reply

TASK = task_of(CommonSettings())


def hook_of(**changes: Any) -> PrivacyHook:
    settings = {"sample_clip_norm": 1.0, "noise_multiplier": 2.0, **changes}
    return PrivacyHook(CommonSettings(rounds=9, **settings))


def replies(spent: float | None, *sites: str, arrays: bool = True) -> dict[str, Reply]:
    metrics = {"seconds": 1.0} if spent is None else {DP_EPSILON: spent}
    sent = {"w": np.zeros(2, np.float32)} if arrays else {}
    return {site: Reply(site, sent, metrics) for site in sites}


def participants(simulated: bool, *sites: str) -> Participants:
    facts = {s: SiteFacts(s, s, (1,), 2, {"train": [3, 4]}, {}, simulated) for s in sites}
    return Participants(facts, {})


def test_it_takes_what_each_site_says_it_has_spent() -> None:
    hook = hook_of()
    hook.phase_ended(1, "train", replies(1.5, "a", "b"))
    hook.phase_ended(2, "train", replies(4.0, "a"))
    assert (hook.spent("a"), hook.spent("b"), hook.spent("c")) == (4.0, 1.5, 0.0)


def test_a_ledger_that_was_lost_makes_nothing_unspent() -> None:
    hook = hook_of()
    hook.phase_ended(1, "train", replies(3.0, "a"))
    hook.phase_ended(2, "train", replies(1.0, "a"))
    assert hook.spent("a") == 3.0


def test_arrays_without_a_word_on_their_cost_are_refused() -> None:
    said = hook_of().objection(2, "train", replies(None, "a")["a"])
    assert said is not None
    assert said.startswith("arrays came without 'dp-epsilon', so perhaps without noise")
    assert hook_of().objection(2, "train", replies(None, "a", arrays=False)["a"]) is None
    assert hook_of().objection(2, "train", replies(1.0, "a")["a"]) is None


def test_a_cost_above_the_runs_cap_is_refused_and_one_at_it_is_not() -> None:
    hook = hook_of(max_epsilon=3.0)
    said = hook.objection(2, "train", replies(3.1, "a")["a"])
    assert said == "metric 'dp-epsilon' is 3.1, above the run's 'privacy.max-epsilon' 3"
    assert hook.objection(2, "train", replies(3.0, "a")["a"]) is None


def test_a_checkpoint_keeps_what_was_spent() -> None:
    hook, resumed = hook_of(), hook_of()
    hook.phase_ended(1, "train", replies(2.0, "a"))
    resumed.restore(json.loads(json.dumps(hook.state())))
    assert resumed.spent("a") == 2.0


def test_a_site_that_may_spend_no_more_ends_a_run_that_has_trained() -> None:
    reasons = "site a, round 3: epsilon is spent"
    spent = TooFewSitesError("too few", reasons, {EpsilonSpentError.code})
    other = TooFewSitesError("too few", "site a, round 3: no data", {SiteError.code})
    assert hook_of().why_end(State({}, 2), spent) == f"the run ends after round 2 of 9: {reasons}"
    assert hook_of().why_end(State({}, 0), spent) is None, "nothing was trained"
    assert hook_of().why_end(State({}, 2), other) is None


@pytest.mark.parametrize("simulated", [True, False])
def test_the_guarantee_is_of_the_site_that_spent_most(simulated: bool) -> None:
    hook = hook_of(trust="nobody", statistics_noise=7.0)
    hook.phase_ended(1, "train", replies(1.5, "a") | replies(2.5, "b"))
    found = hook.guarantee(participants(simulated, "a", "b"))
    assert found["epsilon"] == 2.5
    assert found["sites"] == {"a": 1.5, "b": 2.5}
    assert (found["noise-multiplier"], found["statistics-noise"]) == (2.0, 7.0)
    assert ("it protects nobody" in found["of"]) is simulated
    assert "not bounded" not in found["of"]


def test_the_guarantee_of_a_trusted_server_names_what_it_does_not_bound() -> None:
    found = hook_of(trust="server").guarantee(participants(False, "a"))
    assert "in addition to weights, class means and prototypes has no noise" in found["of"]


def test_privacy_json_has_the_epsilon_or_the_words() -> None:
    guarantee = hook_of().guarantee(participants(True, "a"))
    private = privacy_document("fedavg", "nobody", TASK, ["weights"], {"up": 5}, guarantee)
    assert private["epsilon"] == 0.0
    assert private["leaves each site"][-1].endswith("epsilon that the site has spent in this run")
    plain = privacy_document("fedavg", "server", TASK, ["weights"], {"up": 5})
    assert (plain["guarantee"], plain["epsilon"]) == (NO_PRIVACY, "none")
