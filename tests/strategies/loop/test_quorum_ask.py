import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fedsilo.models.contract.messages import ARRAYS, ROUND_KEYS, TRAIN
from fedsilo.models.contract.own_settings import NoSettings
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.maths.pacing import steps_of_round
from fedsilo.strategies.loop.ask import weighted_mean
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.late import Late, discounted
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.loop.quorum_ask import Quorum, quorum_of
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.wire.compressed import Compression, compression_of
from tests.strategies.conftest import MEASURED, SpyGrid, build_content
from tests.support.asking import make_reply


def test_of_two_sites_the_one_that_is_late_by_one_counts_for_less() -> None:
    then, now = {"w": np.float32([0.0])}, {"w": np.float32([1.0])}
    late = discounted(make_reply("b", {"w": np.float32([4.0])}), then, now, staleness=1)
    assert late.arrays["w"] == pytest.approx(1 + 4 / 2**0.5)
    timely = make_reply("a", {"w": np.float32([3.0])})
    mean = weighted_mean({"a": timely, "b": late}, now)["w"]
    assert mean == pytest.approx((3 + 1 + 4 / 2**0.5) / 2)


def test_a_late_variance_moves_towards_the_sites_own_and_stays_above_zero() -> None:
    then, now = {"n.running_var": np.float32([5.0])}, {"n.running_var": np.float32([1.0])}
    late = discounted(make_reply("b", {"n.running_var": np.float32([2.0])}), then, now, 3)
    assert late.arrays["n.running_var"] == pytest.approx(1 + (2 - 1) / 2)


@pytest.mark.parametrize(
    ("share", "least", "sites", "needed"),
    [(1.0, 0, 6, 6), (0.5, 0, 6, 3), (0.83, 0, 6, 5), (0.07, 0, 100, 7), (0.5, 4, 6, 4)],
)
def test_a_quorum_is_a_share_rounded_up_and_at_least_min_sites(
    share: float, least: int, sites: int, needed: int
) -> None:
    assert quorum_of(CommonSettings(round_quorum=share, min_sites=least), sites) == needed


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"local_epochs": 2, "batch_size": 16}, 6),  # 36 samples are 3 batches
        ({"local_steps": 10}, 10),
        ({"epoch_steps": 8, "pace": 4}, 4),
    ],
)
def test_steps_of_a_round_are_what_the_settings_say(settings: dict[str, int], steps: int) -> None:
    assert steps_of_round(CommonSettings(**settings), 36) == steps  # type: ignore[arg-type]


def test_what_sites_are_at_work_on_is_stored_and_restored() -> None:
    late = Late(7.5, {"b": (3, 9.25)}, {3: {"w": np.float32([1, 2])}})
    arrays = {"w": np.float32([5]), **late.stored()}
    again = Late.restored(arrays, late.facts())
    assert (again.now, again.at_work, list(arrays)) == (7.5, {"b": (3, 9.25)}, ["w"])
    assert again.sent[3]["w"].tolist() == [1, 2]


def adding(step: float, way: Compression | None = None) -> Callable[[Message], RecordDict]:
    """Return a site that answers with what it was sent, plus ``step``; ``way``: as an update."""

    def answer(message: Message) -> RecordDict:
        if message.metadata.message_type != TRAIN:
            return build_content(**MEASURED)
        received = message.content.array_records[ARRAYS]
        sent = {name: received[name].numpy() for name in received}
        arrays = {name: array + np.float32(step) for name, array in sent.items()}
        if way:
            arrays, _ = way.packed(arrays, sent, {}, lambda n: np.zeros(n, np.float32))
        return build_content(arrays, **MEASURED, kept_state=1)

    return answer


class Came(Hook):
    """Remembers in which round which sites came, and the round that had asked them."""

    def __init__(self) -> None:
        self.rounds: dict[int, dict[str, int]] = {}

    def sites_answered(self, round_: int, received: Any) -> None:
        self.rounds[round_] = {site: asked for site, (asked, _) in received.items()}


Run = Callable[..., tuple[SpyGrid, RoundLoop, Came]]


@pytest.fixture
def run(fake_app: Any, participants: Participants) -> Run:
    """Return a function that runs FedAvg of one number over three sites with a quorum."""

    def start(quorum: Quorum, grid: type[SpyGrid] = SpyGrid, **common: Any) -> Any:
        settings = CommonSettings(silos=3, run_name="run", **{"round_quorum": 0.6, **common})
        way = compression_of(settings)
        sites = {"s1a": adding(2, way), "s2a": adding(2, way), "s3a": adding(4, way)}
        app, received = fake_app(**sites), Came()
        method = FedAvg(settings, NoSettings(), participants)
        loop = RoundLoop(method, [received], "/somewhere", quorum)
        loop.state = State({"w": np.zeros(1, np.float32)})
        nodes = [{"partition-id": index, "num-partitions": 3} for index in range(3)]
        messages = grid(app, {}, nodes)
        loop.start(messages, settings.rounds, 20)
        return messages, loop, received

    return start


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize(
    ("late", "model", "kept"),
    [("discounted", (4 + 4 + 2 + 4 / 2**0.5) / 3, ROUND_KEYS), ("drop", 4.0, 0)],
)
def test_a_reply_that_comes_a_round_late_is_an_update_of_what_its_own_round_sent(
    late: str, model: float, kept: int, precision: str, run: Run
) -> None:
    """Round 1 leads from 0 to 2 without s3a, which is sent 0 and answers 4 in round 2.

    As int8 it answers +4: opened on the 2 that round 2 has sent it would be 6.
    """
    seconds = {"s1a": 1.0, "s2a": 1.0, "s3a": 1.5}
    common = {"rounds": 2, "late_replies": late, "wire_precision": precision}
    grid, loop, received = run(Quorum(seconds), **common)
    assert received.rounds == {1: {"s1a": 1, "s2a": 1}, 2: {"s1a": 2, "s2a": 2, "s3a": 1}}
    assert loop.current().arrays["w"] == pytest.approx(model)
    # Of a reply that is dropped no use is made: the site may not take what it kept for counted
    assert loop.current().kept == {"s1a": 2 * ROUND_KEYS, "s2a": 2 * ROUND_KEYS, "s3a": kept}
    asked = [(m.metadata.dst_node_id, m.metadata.group_id) for m in grid.sent[:5]]
    assert asked == [(1001, "1"), (1002, "1"), (1001, "2"), (1002, "2"), (1003, "1")]
    late_state = loop.current().late
    assert late_state is not None
    assert (late_state.now, late_state.at_work, late_state.sent) == (2.0, {}, {})


class SlowGrid(SpyGrid):
    """A real grid's ways: all replies that are there come at once, and s3a's a round late."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        newest = int(self.sent[-1].metadata.group_id)
        by_id = {m.metadata.message_id: m.metadata for m in self.sent}
        ready = [
            key
            for key in sorted(message_ids)
            if by_id[key].dst_node_id != 1003
            or int(by_id[key].group_id) < newest
            or by_id[key].message_type != TRAIN
        ]
        return [reply for key in ready for reply in super(SlowGrid, self).pull_messages([key])]


@pytest.fixture
def deployed(participants: Participants) -> Participants:
    """Make the sites real ones: the order of their replies is that of arrival."""
    for site, facts in participants.facts.items():
        participants.facts[site] = dataclasses.replace(facts, simulated=False)  # type: ignore[index]
    return participants


def test_real_sites_count_as_they_come_and_are_asked_once(deployed: Any, run: Run) -> None:
    grid, loop, received = run(Quorum(), SlowGrid, rounds=3, late_replies="discounted")
    assert received.rounds[1] == {"s1a": 1, "s2a": 1}
    assert received.rounds[2] == {"s1a": 2, "s2a": 2, "s3a": 1}
    assert received.rounds[3] == {"s1a": 3, "s2a": 3}
    trained = [m.metadata for m in grid.sent if m.metadata.message_type == TRAIN]
    slow = [data.group_id for data in trained if data.dst_node_id == 1003]
    assert slow == ["1", "3"], "it was at work in round 2"
    assert not loop.hooks.has("site_failed")


def test_the_order_that_is_on_record_goes_before_that_of_arrival(deployed: Any, run: Run) -> None:
    real = run(Quorum(), SlowGrid, rounds=3, late_replies="discounted")
    order = {round_: list(received) for round_, received in real[2].rounds.items()}
    again = run(Quorum(order=order), SpyGrid, rounds=3, late_replies="discounted")
    assert again[2].rounds == real[2].rounds
    assert again[1].current().arrays["w"] == real[1].current().arrays["w"]
    other = run(Quorum(), SpyGrid, rounds=3, late_replies="discounted")
    assert other[1].current().arrays["w"] != real[1].current().arrays["w"]
