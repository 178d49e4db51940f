import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsilo.models.contract.errors import SettingError, SiteError
from fedsilo.models.contract.messages import ARRAYS, TRAIN
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.fedaligncl import FedAlignCLSettings
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedaligncl import FedAlignCL, FedAlignCLState
from fedsilo.strategies.wire.reply import Reply, decode
from tests.support.asking import (
    arrays_expected,
    arrays_sent,
    evaluation_of,
    question_of,
    state_after,
)

# Two rounds an epoch; alignment from the second epoch on, which is round 3
COMMON = CommonSettings(epoch_steps=4, pace=2, width=4, rounds=6, silos=3)
OWN = FedAlignCLSettings(warmup_epochs=1, shared_embeddings=40)
Tiny = Callable[..., dict[str, Any]]
SpiedRun = Callable[..., Any]


@pytest.fixture
def strategy(participants: Participants) -> FedAlignCL:
    return FedAlignCL(COMMON, OWN, participants)


def _after(round_: int, **arrays: Any) -> FedAlignCLState:
    return FedAlignCLState({"w": np.zeros(2, np.float32), **arrays}, round_)


def test_embeddings_are_asked_for_in_the_round_before_each_that_aligns(
    strategy: FedAlignCL,
) -> None:
    asked = [question_of(strategy, _after(r)).notes["s1a"].embeddings for r in range(6)]
    # Rounds 1 to 6: round 3 is the first to align, nobody uses what comes in round 6
    assert asked == [0, 36, 36, 36, 36, 0]
    assert evaluation_of(strategy, _after(6)).notes == {}
    spec = arrays_expected(strategy, _after(1))["s1a"]["embeddings"]
    assert spec.shape == (36, 16)  # all of its samples: fewer than 40; channels 4 * width
    assert "embeddings" not in arrays_expected(strategy, _after(0))["s1a"]


def test_a_site_is_sent_the_others_embeddings_and_never_its_own(strategy: FedAlignCL) -> None:
    buffers = {f"embeddings/{s}": np.zeros((2, 16), np.float32) for s in ("s1a", "s2a", "s3a")}
    state = _after(2, **buffers)
    sent = arrays_sent(strategy, state)["s2a"]
    assert set(sent) == {"w", "embeddings/s1a", "embeddings/s3a"}
    assert set(evaluation_of(strategy, state).send["s2a"]) == {"w"}


def _replies(site_reply: Callable[..., Reply], **more: Any) -> dict[str, Reply]:
    values = {"s1a": (0.0, 10), "s2a": (3.0, 30)}
    return {
        site: site_reply(site, {"w": np.full(2, value, np.float32), **more}, num_examples=count)
        for site, (value, count) in values.items()
    }


def test_sites_weigh_the_same(participants: Participants, site_reply: Callable[..., Reply]) -> None:
    strategy = FedAlignCL(COMMON, FedAlignCLSettings(align=False), participants)
    after = state_after(strategy, _after(0), _replies(site_reply))
    assert after.arrays["w"].tolist() == [1.5, 1.5]


def test_the_newest_embeddings_replace_all_older_ones(
    strategy: FedAlignCL, site_reply: Callable[..., Reply]
) -> None:
    old = {"embeddings/s3a": np.ones((2, 16), np.float32)}
    received = {"embeddings": np.full((36, 16), 2, np.float32)}
    after = state_after(strategy, _after(2, **old), _replies(site_reply, **received))
    assert set(after.arrays) == {"w", "embeddings/s1a", "embeddings/s2a"}
    last = state_after(strategy, _after(5, **after.arrays), _replies(site_reply))
    assert set(last.arrays) == {"w"}


def test_the_share_that_each_site_forgot_is_remembered_by_epoch(
    strategy: FedAlignCL, site_reply: Callable[..., Reply]
) -> None:
    told = {
        "s1a": site_reply(
            "s1a", {"w": np.zeros(2, np.float32)}, **{"incoming.train.forgotten": 0.25}
        )
    }
    after = state_after(strategy, _after(0), told)
    document = strategy.documents(after, {})["forgotten.json"]
    assert document == {"variant": "Fed-Align-CL", "epochs": {"0": {"s1a": 0.25}}}
    later = dataclasses.replace(after, round=1)  # one that missed the epoch's first round
    metrics = {"incoming.train.forgotten": 0.5}
    late = {"s3a": site_reply("s3a", {"w": np.zeros(2, np.float32)}, **metrics)}
    alone = FedAlignCL(COMMON, FedAlignCLSettings(align=False), strategy.participants)
    both = alone.documents(state_after(alone, later, late), {})["forgotten.json"]
    assert both["epochs"] == {"0": {"s1a": 0.25, "s3a": 0.5}}
    assert strategy.documents(_after(0), {}) == {}


@pytest.mark.parametrize(
    ("align", "curriculum", "name"),
    [(False, False, "Fed"), (False, True, "Fed-CL"), (True, False, "Fed-Align")],
)
def test_the_switches_have_the_papers_names(
    align: bool, curriculum: bool, name: str, participants: Participants
) -> None:
    own = FedAlignCLSettings(align=align, curriculum=curriculum)
    strategy = FedAlignCL(COMMON, own, participants)
    assert strategy.variant() == name
    words = " ".join(strategy.disclosures().leaves)
    assert ("embeddings" in words) == align
    assert ("forgotten" in words) == curriculum
    assert "Gaussian noise of variance 0.001" in words


def test_without_noise_it_says_so_and_relative_noise_is_told_as_such(
    participants: Participants,
) -> None:
    quiet = FedAlignCL(COMMON, FedAlignCLSettings(noise_variance=0.0), participants)
    assert "without noise" in " ".join(quiet.disclosures().leaves)
    relative = FedAlignCL(COMMON, FedAlignCLSettings(noise_scale="relative"), participants)
    assert "0.001 times their spread" in " ".join(relative.disclosures().leaves)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train.epoch-steps": 0, "train.pace": 40}, "'train.epoch-steps' .120 in the paper."),
        (
            {"train.epoch-steps": 4, "train.pace": 3},
            "'train.pace' must divide 'train.epoch-steps' .4., but is 3",
        ),
        ({"fedaligncl.warmup-epochs": 2}, "2 rounds end in epoch 1, .* would never begin"),
        (
            {"fedaligncl.noise-variance": -0.001},
            "'fedaligncl.noise-variance' must be at least 0, but is -0.001",
        ),
        ({"network": "vit", "backbone-weights": "random"}, "does not take network 'vit'"),
        ({"dataset": "heart-synthetic"}, "is of images"),
        ({"fedaligncl.noise-scale": "both"}, "one of absolute, relative"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    changes: dict[str, Any], told: str, tiny: Tiny
) -> None:
    values = tiny("fedaligncl") | changes
    if changes.get("dataset"):
        for key in ("split.silos", "split.silo-train-size", "split.silo-test-size"):
            values.pop(key)
    with pytest.raises(SettingError, match=told):
        resolve(values)


def test_embeddings_travel_from_site_to_site_in_a_run(spied_run: SpiedRun, tiny: Tiny) -> None:
    grid, _ = spied_run(tiny("fedaligncl", rounds=3, warmup_epochs=1, noise_variance=0.0))
    sent = [m for m in grid.sent if m.metadata.message_type == TRAIN]
    by_round = {r: [m for m in sent if m.metadata.group_id == str(r)] for r in (1, 2, 3)}
    received = {m.metadata.src_node_id: m for m in grid.replies if m.metadata.group_id == "1"}
    for message in by_round[1]:
        assert not [n for n in message.content[ARRAYS] if n.startswith("embeddings")]
    for message in by_round[2]:
        names = {n for n in message.content[ARRAYS] if n.startswith("embeddings/")}
        own = "embeddings/" + {1001: "s1a", 1002: "s2a", 1003: "s3a"}[message.metadata.dst_node_id]
        assert len(names) == 2
        assert own not in names
    first = by_round[2][0].content[ARRAYS]["embeddings/s3a"].numpy()
    assert (first == received[1003].content[ARRAYS]["embeddings"].numpy()).all()


def test_a_reply_with_embeddings_of_another_width_stops_the_run(
    strategy: FedAlignCL, content: Callable[..., Any], measured: dict[str, float]
) -> None:
    arrays = {"w": np.zeros(2, np.float32), "embeddings": np.zeros((36, 7), np.float32)}
    expected = arrays_expected(strategy, _after(1))["s1a"]
    told = r"^array 'embeddings' is float32 \(36, 7\), expected float32 \(36, 16\)$"
    with pytest.raises(SiteError, match=told):
        decode("s1a", content(arrays, **measured), expected)


def test_the_finished_model_is_the_weights_and_no_sites_embeddings(strategy: FedAlignCL) -> None:
    state = _after(4, **{"embeddings/s1a": np.zeros((2, 16), np.float32)})
    assert set(strategy.model(state)) == {"w"}


def test_discriminators_travel_with_the_embeddings_where_they_are_the_target(
    spied_run: SpiedRun, tiny: Tiny
) -> None:
    named = tiny("fedaligncl", rounds=3, warmup_epochs=1, noise_variance=0.0)
    grid, loop = spied_run(named | {"fedaligncl.align-target": "others"})
    received = {m.metadata.src_node_id: m for m in grid.replies if m.metadata.group_id == "1"}
    own = {n: a.numpy() for n, a in received[1003].content[ARRAYS].items() if n.startswith("discr")}
    assert sum(array.size for array in own.values()) == 4 * 16 + 4 + 4 + 1
    sent = next(m for m in grid.sent if m.metadata.group_id == "2")
    arrays = {n: a.numpy() for n, a in sent.content[ARRAYS].items()}
    sites = {n.split("/")[1] for n in arrays if n.startswith("discriminators/")}
    assert sites == {"s2a", "s3a"}
    for name, array in own.items():
        assert (arrays[f"discriminators/s3a/{name.removeprefix('discriminator/')}"] == array).all()
    last = [m for m in grid.replies if m.metadata.group_id == "3"]
    assert not [n for m in last for n in m.content.array_records.get(ARRAYS, {}) if "discr" in n]
    assert "the weights of the site's discriminator" in str(loop.method.disclosures().leaves)
