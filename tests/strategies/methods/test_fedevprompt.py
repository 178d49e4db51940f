"""The server side of FedEvPrompt by hand: the buffer, who is sent what, and what is refused."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import EVALUATE, TRAIN
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.fedevprompt import FedEvPromptSettings
from fedsilo.models.networks.kinds import Task
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedevprompt import FedEvPrompt
from fedsilo.strategies.wire.reply import ArraySpec, Reply
from tests.support.asking import arrays_expected, arrays_sent, evaluation_of, fault_of, state_after
from tests.support.tiny import VIT_FIELDS

TASK = Task((1, 16, 16), 3)
CELLS = 16
# samples of three classes
COUNTS = {"s1a": [30, 1, 5], "s2a": [36, 0, 0], "s3a": [2, 30, 4]}
OWN = {"head.1.bias": (3,), "head.1.weight": (3, 16), "prompts.b": (1, 2, 3, 16)} | {
    "prompts.t": (1, 2, 3, 16)
}
VIT = VIT_FIELDS | {
    "method": "fedevprompt",
    "dataset": "digits",
    "backbone": "vit_tiny_patch16_224",
    "backbone_weights": "timm",  # no server ever needs them
    "silos": 3,
    "rounds": 3,
}
Build = Callable[..., FedEvPrompt]
Replies = Callable[..., Reply]


@pytest.fixture
def method(participants: Participants) -> Build:
    """Return a builder of the strategy over three sites with ``COUNTS`` and M = 2."""
    facts = {
        site: dataclasses.replace(
            found,
            classes=3,
            label_counts={"train": COUNTS[site], "val": [1, 0, 0], "test": [1, 1, 1]},
            class_names=("nevus", "melanoma", "other"),
        )
        for site, found in participants.facts.items()
    }

    def build(common: dict[str, Any] | None = None, **own: Any) -> FedEvPrompt:
        settings = FedEvPromptSettings(**{"buffer_maps": 2, **own})
        return FedEvPrompt(
            CommonSettings(**{**VIT, **(common or {})}),
            settings,
            Participants(facts, participants.nodes),
        )

    return build


def maps(count: int, at: int = 0) -> Any:
    """Return maps that look at one cell each, from cell ``at`` on."""
    return np.eye(CELLS, dtype=np.float32)[at : at + count]


def gift(site: str, at: int = 0) -> dict[str, Any]:
    return {
        f"maps/{label}": maps(min(2, count), at)
        for label, count in enumerate(COUNTS[site])
        if count
    }


def buffered(round_: int = 1, **shared: Any) -> State:
    arrays = {
        name.replace("maps/", f"buffer/{site}/"): array
        for at, site in enumerate(COUNTS)
        for name, array in gift(site, 2 * at).items()
    }
    named = {name.replace("__", "."): array for name, array in shared.items()}
    return State({**arrays, **named}, round_, {"s1a": 1})


def refused(common: dict[str, Any], **own: Any) -> str:
    with pytest.raises(SettingError) as caught:
        FedEvPromptSettings(**own).check(CommonSettings(**{**VIT, **common}), is_table=False)
    return str(caught.value)


@pytest.mark.parametrize(
    "common",
    [
        {"network": "auto"},
        {"network": "conv"},
        {"prompt_sets": "none"},
        {"train_backbone": True},
    ],
)
def test_what_is_no_frozen_vit_with_prompts_is_refused(common: dict[str, Any]) -> None:
    told = refused(common)
    assert (
        "set 'network.name' to 'vit', 'vit.prompt-sets' to 'b-t' or 'g', and 'vit.train-backbone'"
        in told
    )


def test_cross_entropy_is_refused() -> None:
    assert "'train.loss' is 'cross-entropy': method 'fedevprompt' is evidential" in refused(
        {"loss": "cross-entropy"}
    )


def test_b_prompts_cannot_be_averaged_where_there_are_none() -> None:
    told = refused({"prompt_sets": "g"}, shared_prompts="b")
    said = (
        "'fedevprompt.shared-prompts' is 'b' and 'vit.prompt-sets' is 'g', which has no b-prompts"
    )
    assert said in told


@pytest.mark.parametrize(
    ("common", "own"),
    [
        ({}, {}),
        ({"loss": "evidential", "evidence": "relu"}, {"shared_prompts": "b"}),
        ({"prompt_sets": "g"}, {"shared_prompts": "all"}),
        ({"prompt_sets": "g"}, {"distillation_weight": 0.0}),
    ],
)
def test_what_the_paper_compares_is_taken(common: dict[str, Any], own: dict[str, Any]) -> None:
    FedEvPromptSettings(**own).check(CommonSettings(**{**VIT, **common}), is_table=False)


def test_settings_are_refused_before_a_run(tiny: Callable[..., dict[str, Any]]) -> None:
    assert resolve(tiny("fedevprompt")).own.buffer_maps == 2
    with pytest.raises(SettingError, match="prompts a frozen ViT"):
        resolve(tiny("fedevprompt", prompt_sets="none"))
    for key, value in (("buffer-maps", 0), ("distillation-weight", -1.0), ("shared-prompts", "t")):
        with pytest.raises(SettingError, match=f"'fedevprompt.{key}' is "):
            resolve(tiny("fedevprompt", **{key: value}))


def test_the_buffer_is_empty_at_the_start(method: Build) -> None:
    assert method().initial_state().arrays == {}
    assert arrays_sent(method(), State({}))["s1a"] == {}


@pytest.mark.parametrize(
    ("shared", "names"), [("none", []), ("b", ["prompts.b"]), ("all", list(OWN))]
)
def test_what_is_averaged_starts_from_the_seed_and_goes_both_ways(
    method: Build, shared: str, names: list[str]
) -> None:
    strategy = method(shared_prompts=shared)
    first = strategy.initial_state()
    assert {name: array.shape for name, array in first.arrays.items()} == {
        name: OWN[name] for name in names
    }
    again = method({"seed": 43}, shared_prompts=shared).initial_state()
    for name in names:
        if name != "head.1.bias":
            assert not np.array_equal(first.arrays[name], again.arrays[name])
    expected = arrays_expected(strategy, first)["s2a"]
    shapes = {name: ArraySpec(OWN[name]) for name in names}
    assert expected == shapes | {"maps/0": ArraySpec((2, CELLS))}
    for phase in (TRAIN, EVALUATE):
        assert set(arrays_sent(strategy, first, phase)["s2a"]) == set(names)


def test_maps_are_expected_of_the_classes_that_a_site_has_and_of_no_others(method: Build) -> None:
    strategy, state = method(), State({})
    shapes = {
        site: {name: spec.shape for name, spec in arrays_expected(strategy, state)[site].items()}
        for site in COUNTS
    }
    assert shapes == {
        "s1a": {"maps/0": (2, CELLS), "maps/1": (1, CELLS), "maps/2": (2, CELLS)},
        "s2a": {"maps/0": (2, CELLS)},
        "s3a": {"maps/0": (2, CELLS), "maps/1": (2, CELLS), "maps/2": (2, CELLS)},
    }
    assert arrays_expected(method(distillation_weight=0.0), state)["s1a"] == {}


def test_a_site_is_sent_all_maps_but_its_own(method: Build) -> None:
    state = buffered()
    for site in COUNTS:
        found = arrays_sent(method(), state)[site]
        others = [other for other in COUNTS if other != site]
        assert set(found) == {
            name.replace("maps/", f"maps/{other}/") for other in others for name in gift(other)
        }
        for name, array in found.items():
            assert array is state.arrays[name.replace("maps/", "buffer/")]


def test_a_site_whose_name_begins_another_is_not_taken_for_it(method: Build) -> None:
    arrays = {f"buffer/{site}/0": maps(1) for site in ("a", "ab", "b")}
    here = method()
    facts = here.participants.facts["s1a"]
    here.participants = Participants(dict.fromkeys(("a", "ab", "b"), facts), {})
    found = arrays_sent(here, State(arrays, 1))["a"]
    assert set(found) == {"maps/ab/0", "maps/b/0"}


def test_no_map_is_sent_to_be_evaluated(method: Build) -> None:
    state = buffered(prompts__b=np.zeros((1, 2, 3, 16), np.float32))
    assert set(evaluation_of(method(shared_prompts="b"), state).send["s1a"]) == {"prompts.b"}


def test_the_buffer_is_replaced_and_holds_what_came_alone(
    method: Build, site_reply: Replies
) -> None:
    strategy, before = method(), buffered()
    replies = {site: site_reply(site, gift(site, 9)) for site in ("s1a", "s2a")}
    after = state_after(strategy, before, replies)
    expected = {
        name.replace("maps/", f"buffer/{site}/"): array
        for site in replies
        for name, array in gift(site, 9).items()
    }
    assert set(after.arrays) == set(expected)  # nothing of s3a is left
    for name, array in after.arrays.items():
        np.testing.assert_array_equal(array, expected[name])


def test_what_is_shared_is_averaged_by_samples_beside_the_buffer(
    method: Build, site_reply: Replies
) -> None:
    strategy = method(shared_prompts="b")
    state = buffered(prompts__b=np.zeros((1, 2, 3, 16), np.float32))
    replies = {
        site: site_reply(
            site,
            gift(site) | {"prompts.b": np.full((1, 2, 3, 16), value, np.float32)},
            num_examples=count,
        )
        for site, value, count in (("s1a", 2.0, 1), ("s2a", 6.0, 3))
    }
    after = state_after(strategy, state, replies)
    assert (after.arrays["prompts.b"] == 5).all()  # (2 + 3 * 6) / 4
    assert {n.split("/")[1] for n in after.arrays if n.startswith("buffer/")} == {"s1a", "s2a"}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (maps(2) * 2, r"array 'maps/0': a map sums to 2, not to 1"),
        (maps(2) - np.float32(0.125), r"array 'maps/0': a map has a negative value (-0.125)"),
        (maps(2) * np.float32(np.nan), r"array 'maps/0': a map contains non-finite values"),
        (maps(2) * 0, r"array 'maps/0': a map sums to 0, not to 1"),
        (maps(2), None),
    ],
)
def test_a_map_that_is_none_is_objected_to(
    method: Build, site_reply: Replies, bad: Any, said: str | None
) -> None:
    strategy = method()
    reply = site_reply("s1a", gift("s1a") | {"maps/0": bad})
    assert fault_of(strategy, buffered(), reply) == said
    assert fault_of(strategy, buffered(), reply, EVALUATE) is None


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({}, ["up to 2 attention maps per class, each of one training image (lowest vacuity)"]),
        ({"buffer_selection": "random"}, ["training image (any), which go to all other sites"]),
        ({"shared_prompts": "b", "distillation_weight": 0.0}, ["each round: the b-prompts"]),
        ({"shared_prompts": "all"}, ["attention maps", "each round: all prompts and the head"]),
        ({"distillation_weight": 0.0}, ["no weights and no maps"]),
    ],
)
def test_the_run_says_what_leaves_a_site(
    method: Build, own: dict[str, Any], said: list[str]
) -> None:
    told = method(**own).disclosures().leaves
    assert len(told) == len(said)
    assert all(part in line for part, line in zip(said, told, strict=True))


def test_the_buffer_is_told_with_its_grid_and_classes(method: Build) -> None:
    documents = method().documents(buffered(), {})
    found = documents["buffer.json"]
    assert found["grid"] == [4, 4]
    assert found["classes"] == ["nevus", "melanoma", "other"]
    assert {site: list(classes) for site, classes in found["sites"].items()} == {
        "s1a": ["0", "1", "2"],
        "s2a": ["0"],
        "s3a": ["0", "1", "2"],
    }
    assert found["sites"]["s2a"]["0"] == maps(2, 2).tolist()
    assert method().documents(State({}, 1), {}) == {}
