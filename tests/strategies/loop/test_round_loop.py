import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.messages import ARRAYS, EVALUATE, ROUND_KEYS, TRAIN
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.loop.round_loop import RoundLoop, draw_sites, refuse_site_count
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.wire.records import record_bytes

START = {"w": np.zeros(2, np.float32)}
Started = Callable[..., tuple[Any, FedAvg]]


def failing(reason: str) -> Callable[[Message], RecordDict]:
    def fail(message: Message) -> RecordDict:
        raise RuntimeError(reason)

    return fail


def test_each_site_is_told_round_phase_run_and_folder(started: Started, told: Any) -> None:
    grid, _ = started(rounds=2)
    assert [m.metadata.dst_node_id for m in grid.sent] == [1001, 1002, 1003] * 3
    assert [m.metadata.message_type for m in grid.sent] == [TRAIN] * 6 + [EVALUATE] * 3
    assert [told(m)["round"] for m in grid.sent] == [1] * 3 + [2] * 3 + [3] * 3
    assert [m.metadata.group_id for m in grid.sent[::3]] == ["1", "2", "3"]
    for message in grid.sent:
        assert told(message)["phase"] == message.metadata.message_type
        assert told(message)["run-name"] == "run"
        assert told(message)["run-dir"] == "/somewhere"


def test_a_site_with_a_folder_of_its_own_is_not_told_the_run_directory(
    spy_grid: Any, fake_app: Any, participants: Participants, told: Any
) -> None:
    settled = dataclasses.replace(participants.facts["s2a"], simulated=False)
    mixed = Participants({**participants.facts, "s2a": settled}, participants.nodes)
    common = CommonSettings(rounds=2, silos=3, run_name="run")
    strategy = RoundLoop(FedAvg(common, NoSettings(), mixed), run_dir="/somewhere")
    strategy.state = State(START)
    grid = spy_grid(fake_app())
    strategy.start(grid, 2, 20)
    assert [told(m)["run-dir"] for m in grid.sent] == ["/somewhere", "", "/somewhere"] * 3
    to_settled = [m.content for m in grid.sent if m.metadata.dst_node_id == 1002]
    assert not [m for m in to_settled if "/somewhere" in str(dict(m.config_records))]


def test_the_next_round_starts_from_the_mean_of_the_last(
    started: Started, fake_app: Any, answering: Any
) -> None:
    app = fake_app(
        s1a=answering(2.0, num_examples=1),
        s2a=answering(6.0, num_examples=3),
        s3a=answering(5.0, num_examples=4),
    )
    counts = {site: {"train": size} for site, size in {"s1a": 1, "s2a": 3, "s3a": 4}.items()}
    grid, strategy = started(app, sizes=counts)
    sent = [m.content[ARRAYS]["w"].numpy().tolist() for m in grid.sent[::3]]
    assert sent == [[0, 0], [5, 5], [5, 5]]
    assert strategy.state is not None
    assert strategy.state.arrays["w"].tolist() == [5, 5]


@pytest.mark.parametrize(
    ("every", "measured"),
    [(0, [False] * 4), (1, [True] * 4), (2, [True, False, True, False])],
)
def test_evaluate_every_says_in_which_rounds_sites_measure(
    started: Started, told: Any, every: int, measured: list[bool]
) -> None:
    grid, _ = started(rounds=4, evaluate_every=every)
    training = [m for m in grid.sent if m.metadata.message_type == TRAIN]
    assert [told(m)["evaluate"] for m in training[::3]] == measured
    # The final evaluation is a kind of its own, and measures whatever the flag says.
    assert [m.metadata.message_type for m in grid.sent[12:]] == [EVALUATE] * 3


def test_the_hooks_hear_of_everything_in_order(started: Started, recorder: Any) -> None:
    started(rounds=1)
    sites = ("s1a", "s2a", "s3a")
    assert recorder.events == [
        ("run started", 0, 1),
        ("phase started", 1, "train"),
        *(("reply came", 1, "train", site) for site in sites),
        ("phase ended", 1, "train", *sites),
        ("round ended", 1),
        ("phase started", 1, "evaluate"),
        *(("reply came", 1, "evaluate", site) for site in sites),
        ("phase ended", 1, "evaluate", *sites),
        ("run ended", 1),
    ]


def test_a_run_goes_on_after_the_round_of_its_state(started: Started, told: Any) -> None:
    state = State({"w": np.float32([3, 4])}, 2)
    grid, strategy = started(rounds=3, state=state)
    assert [told(m)["round"] for m in grid.sent[::3]] == [3, 4]
    assert grid.sent[0].content[ARRAYS]["w"].numpy().tolist() == [3, 4]
    assert strategy.state is not None


def test_a_finished_state_is_only_evaluated(started: Started, told: Any) -> None:
    grid, _ = started(rounds=3, state=State(START, 3))
    assert [told(m)["phase"] for m in grid.sent] == [EVALUATE] * 3


def test_one_failing_site_stops_the_run_by_default(started: Started, fake_app: Any) -> None:
    with pytest.raises(SiteError) as caught:
        started(fake_app(s2a=failing("the disk is full")))
    assert "site s2a, round 1, phase train: " in str(caught.value)
    assert "the disk is full" in str(caught.value)
    assert "2 of 3 sites answered and 3 are needed ('run.min-sites')" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_silent_site_stops_the_run_by_default(started: Started) -> None:
    with pytest.raises(SiteError, match="site s3a, round 1, phase train: no answer in time"):
        started(silent=(1003,), timeout=0.2)


def test_with_min_sites_the_run_goes_on_without_the_failing_site(
    started: Started, fake_app: Any, answering: Any, recorder: Any
) -> None:
    app = fake_app(
        s1a=answering(1.0),
        s2a=failing("no memory"),
        s3a=answering(3.0),
    )
    _, strategy = started(app, min_sites=2, rounds=2)
    assert strategy.state is not None
    assert strategy.state.arrays["w"].tolist() == [2, 2]
    heard = [(round_, phase, site) for round_, phase, site, _ in recorder.failures]
    assert heard == [(1, "train", "s2a"), (2, "train", "s2a"), (2, "evaluate", "s2a")]
    assert all("no memory" in reason for *_, reason in recorder.failures)
    assert ("phase ended", 1, "train", "s1a", "s3a") in recorder.events


def test_a_site_that_failed_once_is_asked_again(
    started: Started, fake_app: Any, answering: Any, recorder: Any, told: Any
) -> None:
    def recovers(message: Message) -> RecordDict:
        if told(message)["round"] == 1:
            raise OSError("rebooting")
        answer: RecordDict = answering(7.0)(message)
        return answer

    started(fake_app(s1a=recovers), min_sites=2)
    assert [(r, site) for r, _, site, _ in recorder.failures] == [(1, "s1a")]
    assert ("phase ended", 2, "train", "s1a", "s2a", "s3a") in recorder.events


def test_too_few_sites_left_stop_the_run_and_all_failures_are_named(
    started: Started, fake_app: Any, recorder: Any
) -> None:
    app = fake_app(s1a=failing("reason one"), s3a=failing("reason two"))
    with pytest.raises(SiteError, match=r"s1a.*reason one; site s3a.*reason two.*1 of 3.*2 are"):
        started(app, min_sites=2)
    assert ("round ended", 1) not in recorder.events


def test_sites_that_fail_for_one_reason_are_named_together(started: Started) -> None:
    with pytest.raises(SiteError) as caught:
        started(silent=(1001, 1003), timeout=0.2)
    told = "site s1a, site s3a, round 1, phase train: no answer in time -- 1 of 3 sites answered"
    assert str(caught.value).startswith(told)


def test_the_final_evaluation_obeys_the_same_policy(started: Started, fake_app: Any) -> None:
    app = fake_app()
    app_evaluate = fake_app(s2a=failing("gone home"))

    def route(message: Message, context: Any) -> Message:
        chosen = app_evaluate if message.metadata.message_type == EVALUATE else app
        answer: Message = chosen(message, context)
        return answer

    with pytest.raises(SiteError, match=r"site s2a, round 2, phase evaluate.*gone home"):
        started(route)


def test_replies_are_weighed_in_both_directions(
    started: Started, recorder: Any, fake_app: Any
) -> None:
    weighed: list[tuple[int, int]] = []
    recorder.phase_ended = lambda round_, phase, replies: weighed.extend(
        (reply.bytes_down, reply.bytes_up) for reply in replies.values()
    )
    grid, _ = started(rounds=1)
    down = [record_bytes(message.content) for message in grid.sent]
    up = [record_bytes(message.content) for message in grid.replies]
    assert weighed == list(zip(down, up, strict=True))


def test_a_site_that_told_of_private_state_is_expected_to_have_it_from_then_on(
    started: Started, fake_app: Any, answering: Any, told: Any
) -> None:
    def keeps_once(message: Message) -> RecordDict:
        kept = int(told(message)["round"] == 2)
        answer: RecordDict = answering(kept_state=kept)(message)
        return answer

    app = fake_app(s1a=keeps_once, s3a=answering(kept_state=1))
    grid, strategy = started(app, rounds=3)
    expected = [told(message)["expects-state"] for message in grid.sent]
    rounds = [key / ROUND_KEYS for key in expected]
    assert rounds == [*[0] * 3, 0, 0, 1, 2, 0, 2, 2, 0, 3]
    assert strategy.state.stateful_sites == ("s1a", "s3a")


def test_a_run_that_goes_on_remembers_who_keeps_state(started: Started, told: Any) -> None:
    grid, strategy = started(rounds=2, state=State(START, 1, {"s2a": 100}))
    assert [told(m)["expects-state"] for m in grid.sent] == [0, 100, 0] * 2
    assert strategy.state.stateful_sites == ("s2a",)


SITES = [f"s{number}" for number in range(10)]


def test_all_are_asked_unless_some_are_asked_for() -> None:
    assert draw_sites(CommonSettings(), SITES, 1) == SITES
    assert draw_sites(CommonSettings(sites_per_round=10), SITES, 1) == SITES


@given(count=st.integers(1, 9), seed=st.integers(0, 99), round_=st.integers(1, 99))
def test_a_draw_depends_on_seed_and_round_alone(count: int, seed: int, round_: int) -> None:
    common = CommonSettings(sites_per_round=count, seed=seed)
    drawn = draw_sites(common, SITES, round_)
    assert drawn == sorted(set(drawn))
    assert len(drawn) == count
    assert drawn == draw_sites(common, SITES[::-1], round_)


def test_over_rounds_each_site_has_its_share() -> None:
    common = CommonSettings(sites_per_round=3)
    drawn = [site for round_ in range(1000) for site in draw_sites(common, SITES, round_)]
    assert all(abs(drawn.count(site) - 300) < 60 for site in SITES)
    assert draw_sites(common, SITES, 1) != draw_sites(common, SITES, 2)


def test_more_than_there_are_is_refused_in_a_line() -> None:
    refuse_site_count(CommonSettings(sites_per_round=3), 3)
    with pytest.raises(
        SettingError, match=r"'server.sites-per-round' is 4, more than there are sites"
    ):
        refuse_site_count(CommonSettings(sites_per_round=4), 3)


def test_a_round_asks_those_that_are_drawn_and_the_end_asks_all(started: Any, told: Any) -> None:
    grid, _ = started(sites_per_round=2, rounds=3)
    asked: dict[tuple[int, str], list[int]] = {}
    for message in grid.sent:
        key = (told(message)["round"], told(message)["phase"])
        asked.setdefault(key, []).append(message.metadata.dst_node_id)
    common = CommonSettings(sites_per_round=2)
    for round_ in (1, 2, 3):
        drawn = draw_sites(common, ["s1a", "s2a", "s3a"], round_)
        assert asked[round_, TRAIN] == [1000 + int(site[1]) for site in drawn]
    assert asked[4, EVALUATE] == [1001, 1002, 1003]
