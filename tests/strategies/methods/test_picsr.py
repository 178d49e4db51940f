"""The server side of PICSR by hand: its stages, what goes out and what must come back."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedsilo.datasets.registry import data_set
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import EVALUATE, TRAIN
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.picsr import PICSRSettings, StageNotes, build_router
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.exchanged import exchanged_arrays
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.method import initial_weights
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.personal_models import PersonalState as State
from fedsilo.strategies.methods.picsr import PICSR
from fedsilo.strategies.wire.reply import ArraySpec, Reply
from tests.support.asking import (
    arrays_expected,
    arrays_sent,
    evaluation_of,
    fault_of,
    question_of,
    state_after,
)

ALL = ["s1a", "s2a", "s3a"]
TASK = Task((1, 16, 16), 10)
FINETUNED = {"experts": "finetuned", "warmup_rounds": 2}
Build = Callable[..., PICSR]
Replies = Callable[..., Reply]


@pytest.fixture
def picsr(participants: Participants) -> Build:
    def build(rounds: int = 9, **own: Any) -> PICSR:
        common = CommonSettings(rounds=rounds, silos=3, width=1, seed=7)
        return PICSR(common, PICSRSettings(**{"expert_rounds": 3, **own}), participants)

    return build


def routed(round_: int = 5, **extras: Any) -> State:
    """Return a state with two experts of one weight, their prototypes and a router."""
    arrays = {
        "expert/s1a/w": np.float32([1]),
        "expert/s3a/w": np.float32([3]),
        "prototype/s1a": np.zeros((1, 16, 16), np.float32),
        "prototype/s3a": np.ones((1, 16, 16), np.float32),
        "router/v": np.float32([0]),
    }
    return State(arrays, round_, {"s1a": 1, "s3a": 1}, ("s1a", "s3a"), **extras)


def given(value: float) -> dict[str, Any]:
    """Return what a site gives in the last expert round, its arrays all ``value``."""
    network = build_classifier(CommonSettings(width=1), TASK)
    arrays = {
        f"expert/{name}": np.full(tensor.shape, value, np.float32)
        for name, tensor in exchanged_arrays(network).items()
    }
    return arrays | {"prototype": np.full((1, 16, 16), value, np.float32)}


def _check(common: CommonSettings, own: PICSRSettings) -> None:
    own.check(common, data_set(common.dataset).is_table)


def refused(common: dict[str, Any], own: dict[str, Any]) -> str:
    with pytest.raises(SettingError) as caught:
        _check(CommonSettings(**common), PICSRSettings(**own))
    return str(caught.value)


def test_each_sites_own_figures_are_refused_as_they_blind_the_router() -> None:
    told = refused({"dataset": "heart", "standardise": "site"}, {})
    assert "all prototypes are equal" in told
    assert "'pooled' or 'declared'" in told


def test_a_site_too_small_for_a_prototype_must_not_send_the_sums_that_hold_it() -> None:
    for dataset in ("heart", "heart-synthetic", "table"):
        told = refused({"dataset": dataset}, {"prototype_min_count": 11})
        assert "'picsr.prototype-min-count' is 11, but 'privacy.sums-min-count' is 10" in told
        assert told.endswith("raise 'privacy.sums-min-count'")


@pytest.mark.parametrize(
    "common",
    [
        {"dataset": "heart", "sums_min_count": 11},
        {"dataset": "heart", "standardise": "declared"},
        {"dataset": "digits"},
    ],
)
def test_more_samples_for_a_prototype_are_allowed_where_no_sums_of_fewer_leave(
    common: dict[str, Any],
) -> None:
    _check(CommonSettings(**common), PICSRSettings(prototype_min_count=11))


@pytest.mark.parametrize(
    ("rounds", "own", "taken"),
    [
        (3, {"expert_rounds": 3}, 3),
        (2, {"expert_rounds": 3}, 3),
        (5, {"expert_rounds": 3, **FINETUNED}, 5),
    ],
)
def test_a_run_without_a_round_for_the_router_is_refused(
    rounds: int, own: dict[str, Any], taken: int
) -> None:
    told = refused({"rounds": rounds}, own)
    assert f"'rounds' is {rounds}, but experts take {taken} of them" in told
    _check(CommonSettings(rounds=taken + 1), PICSRSettings(**own))


@pytest.mark.parametrize(
    ("own", "stages"),
    [
        ({}, ["experts"] * 3 + ["router"] * 4),
        ({"warmup_rounds": 2}, ["experts"] * 3 + ["router"] * 4),  # local ones have no warm-up
        (FINETUNED, ["warmup"] * 2 + ["experts"] * 3 + ["router"] * 2),
    ],
)
def test_the_stages_follow_one_another_by_rounds(
    picsr: Build, own: dict[str, Any], stages: list[str]
) -> None:
    strategy = picsr(7, **own)
    states = [State({}, round_) for round_ in range(7)]
    assert [strategy.settings.stage(state.round) for state in states] == stages
    assert [question_of(strategy, state).notes["s1a"] for state in states] == [
        StageNotes(stage) for stage in stages
    ]
    assert evaluation_of(strategy, State({}, 7)).notes["s1a"] == StageNotes("router")


def test_local_experts_start_from_nothing_that_the_server_holds(picsr: Build) -> None:
    assert picsr().initial_state().arrays == {}


def test_finetuned_experts_start_from_the_seeds_weights(picsr: Build) -> None:
    strategy = picsr(**FINETUNED)
    first = strategy.initial_state()
    expected = initial_weights(build_classifier(strategy.common, TASK))
    assert set(first.arrays) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(first.arrays[name], array)
    assert arrays_expected(strategy, first)["s1a"] == {
        name: ArraySpec(array.shape) for name, array in expected.items()
    }
    assert arrays_sent(strategy, first)["s1a"] is first.arrays


def test_the_warm_up_averages_by_samples_even_if_the_router_does_not(
    picsr: Build, site_reply: Replies
) -> None:
    strategy = picsr(**FINETUNED, router_average="equal")
    replies = {
        "s1a": site_reply("s1a", {"w": [2.0]}, num_examples=1),
        "s2a": site_reply("s2a", {"w": [6.0]}, num_examples=3),
    }
    after = state_after(strategy, State({"w": np.float32([0])}), replies)
    assert after.arrays["w"].tolist() == [5]


def test_global_weights_go_only_to_sites_without_an_expert_of_their_own(picsr: Build) -> None:
    strategy, arrays = picsr(**FINETUNED), {"w": np.float32([1])}
    warm = State(arrays, 1, ("s2a",), ("s2a",))
    experts = State(arrays, 3, ("s2a",), ("s2a",))
    assert all(arrays_sent(strategy, warm)[site] == arrays for site in ALL)
    assert {site: dict(arrays_sent(strategy, experts)[site]) for site in ALL} == {
        "s1a": arrays,
        "s2a": {},
        "s3a": arrays,
    }


def test_while_experts_train_nothing_is_expected_and_who_has_one_is_remembered(
    picsr: Build, site_reply: Replies
) -> None:
    strategy, before = picsr(**FINETUNED), State({"w": np.float32([1])}, 3)
    assert arrays_expected(strategy, before)["s1a"] == {}
    after = state_after(strategy, before, {"s1a": site_reply("s1a", kept_state=1)})
    assert (after.arrays, after.personal) == (before.arrays, ["s1a"])


@pytest.mark.parametrize(("own", "round_"), [({}, 2), (FINETUNED, 4)])
def test_the_last_expert_round_expects_the_expert_and_the_prototype(
    picsr: Build, own: dict[str, Any], round_: int
) -> None:
    found = arrays_expected(picsr(**own), State({}, round_))["s1a"]
    assert found == {name: ArraySpec(array.shape) for name, array in given(0).items()}
    assert found["prototype"] == ArraySpec((1, 16, 16))


def test_experts_and_prototypes_are_collected_beside_a_new_router(
    picsr: Build, site_reply: Replies
) -> None:
    strategy = picsr()
    replies = {site: site_reply(site, given(i)) for i, site in enumerate(("s1a", "s3a"))}
    after = state_after(strategy, State({"w": np.float32([9])}, 2), replies)
    router = exchanged_arrays(build_router(PICSRSettings(), (1, 16, 16), 2, 7))
    kinds = {name.split("/")[0] for name in after.arrays}
    assert kinds == {"expert", "prototype", "router"}  # no global weights any more
    for index, site in enumerate(("s1a", "s3a")):
        assert (after.arrays[f"expert/{site}/head.4.bias"] == index).all()
        assert (after.arrays[f"prototype/{site}"] == index).all()
    assert not [name for name in after.arrays if "s2a" in name]
    for name, tensor in router.items():
        np.testing.assert_array_equal(after.arrays[f"router/{name}"], tensor)
    assert all(array.dtype == np.float32 for array in after.arrays.values())


@pytest.mark.parametrize(
    ("phase", "round_", "value", "said"),
    [
        (TRAIN, 2, 1e38, "its expert has no finite answer"),
        (TRAIN, 2, 0.5, None),
        (TRAIN, 1, 1e38, None),  # nothing comes yet
        (EVALUATE, 2, 1e38, None),
    ],
)
def test_an_expert_without_a_finite_answer_to_its_own_prototype_is_objected_to(
    picsr: Build, site_reply: Replies, phase: str, round_: int, value: float, said: str | None
) -> None:
    strategy = picsr()
    reply = site_reply("s1a", given(value))
    assert fault_of(strategy, State({}, round_), reply, phase) == said


@pytest.mark.parametrize("phase", [TRAIN, EVALUATE])
def test_all_experts_and_prototypes_go_to_all_sites_even_to_those_that_gave_none(
    picsr: Build, phase: str
) -> None:
    state = routed()
    for site in ALL:
        assert arrays_sent(picsr(), state, phase)[site] == state.arrays


def test_of_a_router_round_only_what_is_trained_is_expected_and_changed(
    picsr: Build, site_reply: Replies
) -> None:
    strategy, before, trained = picsr(), routed(), {"router/v"}
    assert set(arrays_expected(strategy, before)["s2a"]) == trained
    replies = {"s2a": site_reply("s2a", {name: [7.0] for name in trained})}
    after = state_after(strategy, before, replies)
    assert set(after.arrays) == set(before.arrays)
    changed = {n for n in before.arrays if not np.array_equal(before.arrays[n], after.arrays[n])}
    assert changed == trained
    assert all(after.arrays[name].tolist() == [7] for name in trained)


@pytest.mark.parametrize(("average", "expected"), [("samples", 5.0), ("equal", 4.0)])
def test_the_routers_average_weighs_sites_by_samples_or_equally(
    picsr: Build, site_reply: Replies, average: str, expected: float
) -> None:
    replies = {
        "s1a": site_reply("s1a", {"router/v": [2.0]}, num_examples=1),
        "s2a": site_reply("s2a", {"router/v": [6.0]}, num_examples=3),
    }  # (2 + 3 * 6) / 4 = 5, (2 + 6) / 2 = 4
    after = state_after(picsr(router_average=average), routed(), replies)
    assert after.arrays["router/v"].tolist() == [expected]


def test_the_run_tells_who_listens_to_whom_and_how_far_prototypes_are_apart(picsr: Build) -> None:
    router = build_router(PICSRSettings(), (1, 16, 16), 2, 7)
    with torch.no_grad():
        router.embedding[1].weight.zero_()
        router.embedding[1].weight[0, 0] = 3.0  # f sees the first pixel alone
    arrays = {k: v for k, v in routed().arrays.items() if not k.startswith("router/")}
    arrays |= {f"router/{n}": t.numpy() for n, t in exchanged_arrays(router).items()}
    values = {
        "s2a": {"accuracy": 0.5, "routing.s1a.mean": 0.25, "routing.s3a.mean": 0.75},
    }
    found = picsr().documents(State(arrays, 9), values)
    assert found == {
        "routing.json": {
            "experts": ["s1a", "s3a"],
            "sites": {"s2a": {"s1a": {"mean": 0.25}, "s3a": {"mean": 0.75}}},
            "prototype distances": {
                "input": [[0.0, 16.0], [16.0, 0.0]],  # 256 pixels, each 1 apart
                "embedded": [[0.0, 3.0], [3.0, 0.0]],
            },
        }
    }


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({}, "without noise; none of fewer than 10 samples"),
        ({"prototype_min_count": 25}, "none of fewer than 25 samples"),
        ({}, "over validation and over test samples, of no fewer than 10"),
        ({"prototype_min_count": 25}, "over test samples, of no fewer than 25"),
        (FINETUNED, "each warm-up round"),
    ],
)
def test_picsr_says_what_leaves_a_site(picsr: Build, own: dict[str, Any], said: str) -> None:
    told = picsr(**own).disclosures().leaves
    assert said in "\n".join(told)
    for always in ("the site's expert", "prototype, the mean", "router's weights", "quantiles"):
        assert any(always in line for line in told)
    assert any("train.warm-up" in line for line in told) is (own == FINETUNED)
