"""Whole runs of PICSR, over real sites and over sites that fail when a test wants it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fedsilo.client_app.methods.picsr import PICSRSite
from fedsilo.client_app.session import SiteSession
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import ARRAYS, EVALUATE, HELLO
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.picsr import PICSRSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.method import initial_weights
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.picsr import PICSR

ALL = ["s1a", "s2a", "s3a"]
TASK = Task((1, 16, 16), 10)
COMMON = CommonSettings(rounds=4, silos=3, width=1, run_name="run")
Behaviour = Callable[[Message], RecordDict]
Run = Callable[..., tuple[Any, PICSR]]
Tiny = Callable[..., dict[str, Any]]


def names(content: RecordDict) -> set[str]:
    return set(content.array_records.get(ARRAYS, {}))


def kinds(content: RecordDict) -> set[str]:
    return {name.partition("/")[0] for name in names(content)}


@pytest.fixture
def good(content: Any, measured: dict[str, float], told: Any) -> Callable[..., Behaviour]:
    """Return a builder of a good site whose arrays are all ``value``; ``changes`` to its gift."""

    def build(value: float = 1.0, **changes: Any) -> Behaviour:
        def answer(message: Message) -> RecordDict:
            said = told(message)
            if message.metadata.message_type == EVALUATE or not said["returns"]:
                return content(kept_state=1, **measured)
            if said["note.stage"] == "router":
                received = message.content[ARRAYS]
                sent = {n: received[n].numpy() for n in received if n.startswith("router/")}
            else:
                network = initial_weights(build_classifier(COMMON, TASK))
                sent = {f"expert/{n}": a for n, a in network.items()}
                sent["prototype"] = np.zeros(TASK.input_shape)
            filled = {n: np.full(a.shape, value, np.float32) for n, a in sent.items()}
            gift = {} if said["note.stage"] == "router" else changes
            arrays = {**filled, **{n.replace("__", "/"): a for n, a in gift.items()}}
            return content(arrays, kept_state=1, **measured)

        return answer

    return build


@pytest.fixture
def started(
    spy_grid: Any, fake_app: Any, participants: Participants, recorder: Any, good: Any
) -> Run:
    """Return a function that runs two expert rounds and two of the router over fake sites."""

    def start(min_sites: int = 0, **special: Behaviour) -> tuple[Any, RoundLoop]:
        common = dataclasses.replace(COMMON, min_sites=min_sites)
        own = PICSRSettings(expert_rounds=2)
        strategy = RoundLoop(PICSR(common, own, participants), [recorder], "/somewhere")
        strategy.state = strategy.method.initial_state()
        grid = spy_grid(fake_app(good(), **special))
        strategy.start(grid, common.rounds, 20)
        return grid, strategy

    return start


def experts_of(strategy: PICSR) -> list[str]:
    arrays = strategy.current().arrays
    found = sorted(n.removeprefix("prototype/") for n in arrays if n.startswith("prototype/"))
    assert found == sorted({n.split("/")[1] for n in arrays if n.startswith("expert/")})
    assert arrays["router/importance.weight"].shape == (len(found), len(found))
    return found


def drops_in(told: Any, good: Behaviour, *rounds: int) -> Behaviour:
    def answer(message: Message) -> RecordDict:
        if told(message)["round"] in rounds:
            raise OSError("the network is down")
        return good(message)

    return answer


def test_an_expert_leaves_its_site_once_and_a_prototype_only_with_it(
    spied_run: Run, tiny: Tiny, told: Any
) -> None:
    grid, _ = spied_run(tiny("picsr", rounds=4, expert_rounds=2))
    sent, replies = grid.sent[3:], grid.replies[3:]  # after the hellos
    assert [kinds(r.content) for r in replies[::3]] == [
        set(),
        {"expert", "prototype"},
        {"router"},
        {"router"},
        set(),
    ]
    routed = {"expert", "prototype", "router"}
    assert [kinds(m.content) for m in sent[::3]] == [set(), set(), routed, routed, routed]
    stages = [told(m)["note.stage"] for m in sent[::3]]
    assert stages == ["experts"] * 2 + ["router"] * 3
    assert [told(m)["returns"] for m in sent[::3]] == [False, True, True, True, False]
    for messages in (sent, replies):
        for first, *others in zip(*[iter(messages)] * 3, strict=True):
            assert all(names(other.content) == names(first.content) for other in others)


def test_experts_reach_the_other_sites_as_they_were_sent(spied_run: Run, tiny: Tiny) -> None:
    grid, strategy = spied_run(tiny("picsr", rounds=3, expert_rounds=1))
    given = dict(zip(ALL, grid.replies[3:6], strict=True))
    last = grid.sent[-1].content[ARRAYS]
    for site, reply in given.items():
        for name, array in reply.content[ARRAYS].items():
            wire = f"prototype/{site}" if name == "prototype" else name.replace("/", f"/{site}/")
            np.testing.assert_array_equal(last[wire].numpy(), array.numpy())
    assert experts_of(strategy) == ALL


def test_finetuned_experts_part_from_the_fedavg_model_and_are_sent_no_weights_again(
    spied_run: Run, tiny: Tiny, recorder: Any, told: Any
) -> None:
    own = {"experts": "finetuned", "warmup_rounds": 1, "expert_rounds": 2}
    grid, _ = spied_run(tiny("picsr", rounds=4, **own), [recorder])
    sent = grid.sent[3:]
    stages = [told(m)["note.stage"] for m in sent[::3]]
    assert stages == ["warmup", "experts", "experts", "router", "router"]
    average = recorder.states[0].arrays
    for message in sent[3:6]:
        for name, array in message.content[ARRAYS].items():
            np.testing.assert_array_equal(array.numpy(), average[name])
    assert all(names(message.content) == set() for message in sent[6:9])


def test_a_run_ends_with_a_routing_document_of_its_own_values(spied_run: Run, tiny: Tiny) -> None:
    _, strategy = spied_run(tiny("picsr"))
    values = {"s1a": {f"routing.{site}.mean": 1 / 3 for site in ALL}}
    found = strategy.method.documents(strategy.current(), values)["routing.json"]
    assert found["experts"] == ALL
    distances = found["prototype distances"]
    for kind in ("input", "embedded"):
        assert np.shape(distances[kind]) == (3, 3)
        assert np.diag(distances[kind]).tolist() == [0, 0, 0]
        assert distances[kind][0][1] == pytest.approx(distances[kind][1][0])
        assert distances[kind][0][1] > 0


def bad_gifts() -> dict[str, dict[str, Any]]:
    return {
        r"'expert/head.4.bias' contains non-finite values": {
            "expert__head.4.bias": np.full(10, np.nan, np.float32)
        },
        r"'expert/head.4.bias' is float32 \(9,\), expected float32 \(10,\)": {
            "expert__head.4.bias": np.zeros(9, np.float32)
        },
        r"'prototype' contains non-finite values": {
            "prototype": np.full((1, 16, 16), np.inf, np.float32)
        },
        r"'prototype' is float32 \(16, 16\), expected float32 \(1, 16, 16\)": {
            "prototype": np.zeros((16, 16), np.float32)
        },
        r"missing \[\], surplus \['row'\]": {"row": np.zeros(3, np.float32)},
    }


@pytest.mark.parametrize("index", range(5))
def test_an_expert_that_cannot_be_used_stops_the_run_or_stays_out(
    started: Run, good: Any, recorder: Any, index: int
) -> None:
    said, changes = list(bad_gifts().items())[index]
    bad = good(**changes)
    with pytest.raises(SiteError, match=f"site s2a, round 2, phase train: .*{said}"):
        started(s2a=bad)
    recorder.failures.clear()
    _, strategy = started(min_sites=2, s2a=bad)
    assert experts_of(strategy) == ["s1a", "s3a"]
    assert [(round_, site) for round_, _, site, _ in recorder.failures] == [(2, "s2a")]


def test_a_router_that_is_not_finite_never_reaches_the_mean(
    started: Run, good: Any, told: Any
) -> None:
    def poisons(message: Message) -> RecordDict:
        value = np.nan if told(message)["note.stage"] == "router" else 1.0
        answer: RecordDict = good(value)(message)
        return answer

    with pytest.raises(SiteError, match=r"site s2a, round 3, .*'router/.*non-finite"):
        started(s2a=poisons)
    _, strategy = started(min_sites=2, s2a=poisons)
    assert experts_of(strategy) == ALL
    assert strategy.current().arrays["router/importance.bias"].tolist() == [1, 1, 1]


def test_a_site_that_drops_out_before_it_gave_its_expert_has_none_and_trains_the_router_later(
    started: Run, good: Any, told: Any, recorder: Any
) -> None:
    grid, strategy = started(min_sites=2, s2a=drops_in(told, good(4.0), 2))
    assert experts_of(strategy) == ["s1a", "s3a"]
    assert [(round_, site) for round_, _, site, _ in recorder.failures] == [(2, "s2a")]
    to_s2a = [m.content for m in grid.sent if m.metadata.dst_node_id == 1002]
    assert {n.split("/")[1] for n in names(to_s2a[2]) if n.startswith("expert/")} == {"s1a", "s3a"}
    # its router counts all the same: (1 + 4 + 1) / 3
    assert strategy.current().arrays["router/importance.bias"].tolist() == [2, 2]


def test_a_site_that_drops_out_after_it_gave_its_expert_is_still_heard(
    started: Run, good: Any, told: Any, recorder: Any
) -> None:
    _, strategy = started(min_sites=2, s2a=drops_in(told, good(4.0), 3, 4, 5))
    arrays = strategy.current().arrays
    assert experts_of(strategy) == ALL
    assert (arrays["expert/s2a/head.4.bias"] == 4).all()
    assert (arrays["prototype/s2a"] == 4).all()
    assert arrays["router/importance.bias"].tolist() == [1, 1, 1]
    assert [(round_, site) for round_, _, site, _ in recorder.failures][:2] == [
        (3, "s2a"),
        (4, "s2a"),
    ]


@pytest.mark.parametrize("round_", [1, 2, 3])
def test_without_min_sites_a_site_that_drops_out_stops_the_run(
    started: Run, good: Any, told: Any, round_: int
) -> None:
    with pytest.raises(SiteError, match=f"site s2a, round {round_}, .*the network is down"):
        started(s2a=drops_in(told, good(), round_))


FEW = "site s2a sends no prototype: it has fewer than 37 training samples"


def test_a_site_of_few_samples_is_refused_before_anything_of_it_left(
    spied_run: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        SiteError, match=rf"{FEW} \('picsr.prototype-min-count'\).* 0 of 3 can and 3 "
    ):
        spied_run(tiny("picsr", prototype_min_count=37))
    usual = PICSRSite.admit

    def admit(site: PICSRSite, session: SiteSession) -> None:
        few = dataclasses.replace(site.settings, prototype_min_count=37)
        usual(PICSRSite(few) if session.silo.name == "s2a" else site, session)

    monkeypatch.setattr(PICSRSite, "admit", admit)
    with pytest.raises(
        SiteError, match=rf"{FEW}.* 2 of 3 can and 3 are needed \('run.min-sites'\)"
    ):
        spied_run(tiny("picsr"))
    grid, strategy = spied_run(tiny("picsr", min_sites=2))
    assert strategy.method.participants.sites() == experts_of(strategy) == ["s1a", "s3a"]
    (told,) = strategy.method.participants.refused
    assert told.startswith(f"s2a: {FEW}")
    (sent,) = [m for m in grid.sent if m.metadata.dst_node_id == 1002]
    assert sent.metadata.message_type == HELLO
    (reply,) = [m for m in grid.replies if m.metadata.src_node_id == 1002]
    assert reply.has_error()
    assert not reply.has_content()


def test_the_floor_for_sums_holds_for_prototypes_too(spied_run: Run) -> None:
    values = {
        "dataset": "heart-synthetic",
        "method": "picsr",
        "picsr.expert-rounds": 1,
        "rounds": 2,
    }
    told = "site cleveland sends no prototype: it has fewer than 200 training samples"
    with pytest.raises(SiteError, match=told):
        spied_run({**values, "standardise": "declared", "sums-min-count": 200})


@pytest.mark.parametrize(("weight", "finite"), [(1e38, False), (0.5, True)])
def test_an_expert_that_overflows_on_its_own_prototype_stays_out(
    started: Run, good: Any, recorder: Any, told: Any, weight: float, finite: bool
) -> None:
    def overflows(message: Message) -> RecordDict:
        value = weight if told(message)["note.stage"] == "experts" else 1.0
        answer: RecordDict = good(value)(message)
        return answer

    _, strategy = started(min_sites=2, s2a=overflows)
    reason = (
        "array 'expert/encoder.stages.0.weight' has a number beyond 1e+06: if training has "
        "diverged, lower 'train.learning-rate'"
    )
    assert recorder.failures == ([] if finite else [(2, "train", "s2a", reason)])
    assert experts_of(strategy) == (ALL if finite else ["s1a", "s3a"])
    if not finite:
        with pytest.raises(SiteError, match=r"site s2a, round 2, phase train: array .* beyond"):
            started(s2a=overflows)
