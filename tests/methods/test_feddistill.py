"""Tests of the method 'feddistill': equations, site and server."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.messages import ARRAYS, METRICS
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import build
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.methods.feddistill import FedDistillSettings
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.class_means import FedDistill
from fedsilo.strategies.wire.reply import ArraySpec
from tests.support.asking import arrays_expected, arrays_sent, evaluation_of, state_after
from tests.support.errors import refuses
from tests.support.lab import answer, steps_of
from tests.support.methods import Opened, network_of, with_class_counts

# The equations


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan])
def test_no_weight_at_all_would_be_local_and_is_refused(weight: float) -> None:
    with refuses(SettingError, "feddistill.logit-weight", "0"):
        build(FedDistillSettings, {"feddistill.logit-weight": weight})


def test_the_weight_is_one_unless_it_is_set() -> None:
    assert build(FedDistillSettings, {}).logit_weight == 1.0


def test_ten_samples_are_behind_a_mean_unless_it_is_set_and_never_none() -> None:
    assert build(FedDistillSettings, {}).class_min_count == 10
    with refuses(SettingError, "feddistill.class-min-count", "0", "1"):
        build(FedDistillSettings, {"feddistill.class-min-count": 0})


# At a site


def logits(size: int = 10, **values: float) -> dict[str, Any]:
    """Return logits of one value each, by class: c3=0.5."""
    return {
        f"logits/{name[1:]}": np.full(size, value, np.float32) for name, value in values.items()
    }


def test_without_others_a_round_is_locals(opened: Opened) -> None:
    first, alone = (
        answer(opened("feddistill"))[METRICS],
        answer(opened("local"))[METRICS],
    )
    for key in ("incoming.test.loss", "trained.train.loss", "trained.val.entropy"):
        assert first[key] == alone[key]


def test_mean_logits_of_each_class_leave_the_site_and_no_weight(opened: Opened) -> None:
    site = opened("feddistill")
    reply = answer(site)
    classes = torch.unique(site.silo.train.labels).tolist()
    assert set(reply[ARRAYS]) == {f"logits/{label}" for label in classes}
    for array in reply[ARRAYS].values():
        assert (array.numpy().shape, array.numpy().dtype) == ((10,), np.float32)
    assert reply[METRICS]["kept-state"] == 1


@pytest.mark.parametrize("changes", [{}, {"network": "vit"}])
def test_they_are_means_after_training_without_dropout(
    opened: Opened, vit: dict[str, Any], changes: dict[str, Any]
) -> None:
    own = (vit if changes else {}) | {"dropout": 0.5}
    site = opened("feddistill", own=own)
    sent = answer(site)[ARRAYS]
    trained = network_of(opened("feddistill", own=own, round=2))
    inputs, labels = site.silo.train.inputs, site.silo.train.labels
    with torch.no_grad():
        in_eval, in_training = trained.eval()(inputs), trained.train()(inputs)
    strays = 0
    for name, array in sent.items():
        mine = labels == int(name.removeprefix("logits/"))
        found = torch.from_numpy(array.numpy().copy())
        torch.testing.assert_close(found, in_eval[mine].mean(dim=0), rtol=1e-4, atol=1e-5)
        strays += not torch.allclose(found, in_training[mine].mean(dim=0), rtol=1e-3, atol=1e-3)
    assert strays == len(sent)


def test_of_an_evidential_network_the_softmax_of_what_is_sent_are_probabilities_of_alpha(
    opened: Opened, vit: dict[str, Any]
) -> None:
    site = opened("feddistill", own=vit)
    network = network_of(site).eval()
    one = int(site.silo.train.labels[0])
    mine = site.silo.train.labels == one
    alpha = network(site.silo.train.inputs[mine]).exp()
    sent = steps_of(site, network).sent[f"logits/{one}"]
    torch.testing.assert_close(sent, alpha.log().mean(dim=0).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.softmax(network(site.silo.train.inputs[mine]), dim=1),
        alpha / alpha.sum(dim=1, keepdim=True),
    )


def test_a_class_that_the_site_has_no_sample_of_has_no_logits(opened: Opened) -> None:
    site = opened("feddistill")
    train = site.silo.train
    rest = train.labels != 3
    assert not rest.all()
    fewer = Split(train.inputs[rest], train.labels[rest])
    site.silo = dataclasses.replace(site.silo, train=fewer)
    sent = answer(site)[ARRAYS]
    assert "logits/3" not in sent
    assert len(sent) == len(torch.unique(fewer.labels))


@pytest.mark.parametrize(("least", "floor"), [(5, 1), (1, 5)])
def test_of_a_class_of_fewer_samples_than_either_floor_no_logits_leave(
    opened: Opened, least: int, floor: int
) -> None:
    site = opened("feddistill", own={"class_min_count": least, "sums_min_count": floor})
    counts = torch.bincount(site.silo.train.labels, minlength=10).tolist()
    large = {f"logits/{label}" for label, count in enumerate(counts) if count >= 5}
    assert 0 < len(large) < sum(1 for count in counts if count)
    assert set(answer(site)[ARRAYS]) == large


@pytest.mark.parametrize("kind", ["conv", "vit"])
def test_the_loss_is_the_criterion_plus_lambda_times_the_mse_to_the_others_logits(
    opened: Opened, vit: dict[str, Any], kind: str
) -> None:
    own = (vit if kind == "vit" else {}) | {"logit_weight": 0.5}
    train = opened("feddistill", own=own).silo.train
    second = int((train.labels != train.labels[0]).nonzero()[0])
    inputs, labels = train.inputs[[0, second]], train.labels[[0, second]]
    site = opened("feddistill", logits(**{f"c{labels[0]}": 3.0}), own=own)
    network = network_of(site).eval()
    with torch.no_grad():
        found = steps_of(site, network).loss(inputs, labels).item()
        own_logits = network(inputs)
        criterion = network.criterion(own_logits, labels).item()
    distance = ((own_logits[0] - 3.0) ** 2).sum().item() / 20  # the second sample's class: nothing
    assert distance > 1
    assert found == pytest.approx(criterion + 0.5 * distance, rel=1e-5)


def test_training_draws_logits_to_the_others(opened: Opened) -> None:
    received = logits(**{f"c{label}": 4.0 for label in range(10)})

    def distance(weight: float) -> float:
        own = {"logit_weight": weight, "local_epochs": 5, "learning_rate": 0.01}
        sent = answer(opened("feddistill", received, own=own))[ARRAYS]
        return float(np.mean([np.square(array.numpy() - 4.0).mean() for array in sent.values()]))

    assert distance(10.0) < 0.7 * distance(1e-9)


@pytest.mark.parametrize(
    ("received", "fault"),
    [
        (logits(size=9, c1=0.0), ["logits/1", 9, 10]),
        (logits(c1=float("nan")), ["logits/1"]),
        (logits(c10=0.0), ["logits/10", 10]),
    ],
)
def test_logits_that_cannot_be_some_stop_the_site(
    opened: Opened, received: Mapping[str, Any], fault: list[object]
) -> None:
    with refuses(SiteError, *fault):
        answer(opened("feddistill", received))


# At the server

START = State({})
DERMATOLOGISTS = ("bcn", "vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias", "msk4")


def strategy_of(participants: Participants) -> FedDistill:
    settings = FedDistillSettings(class_min_count=1)
    return FedDistill(CommonSettings(silos=3, width=1), settings, participants)


@pytest.fixture
def distill(participants: Participants) -> FedDistill:
    """Return the strategy of three sites: class 0 is at all, 1 at two, 2 at one."""
    counts = {"s1a": [1, 5, 0], "s2a": [90, 0, 0], "s3a": [4, 5, 2]}
    return strategy_of(with_class_counts(participants, **counts))


@pytest.fixture
def first_round(distill: FedDistill, site_reply: Callable[..., Any]) -> State:
    replies = {
        "s1a": site_reply("s1a", logits(c0=1, c1=10), num_examples=6),
        "s2a": site_reply("s2a", logits(c0=2), num_examples=90),
        "s3a": site_reply("s3a", logits(c0=6, c1=20, c2=30), num_examples=11),
    }
    return state_after(distill, START, replies)


def sent(strategy: FedDistill, state: State) -> dict[str, dict[str, float]]:
    """Return what each site is sent, an array by its first value."""
    return {
        site: {name: float(a[0]) for name, a in arrays_sent(strategy, state)[site].items()}
        for site in strategy.participants.sites()
    }


def test_the_server_keeps_each_sites_own(first_round: State) -> None:
    found = {name: float(array[0]) for name, array in first_round.arrays.items()}
    assert found == {
        "logits/s1a/0": 1,
        "logits/s1a/1": 10,
        "logits/s2a/0": 2,
        "logits/s3a/0": 6,
        "logits/s3a/1": 20,
        "logits/s3a/2": 30,
    }


def test_a_site_gets_the_unweighted_mean_of_the_others_and_never_its_own(
    distill: FedDistill, first_round: State
) -> None:
    assert sent(distill, first_round) == {
        "s1a": {"logits/0": 4.0, "logits/1": 20.0},  # of 2 and 6, whatever their counts
        "s2a": {"logits/0": 3.5},  # nothing of classes that it has no samples of
        "s3a": {"logits/0": 1.5, "logits/1": 10.0},  # nobody else has class 2
    }
    for array in arrays_sent(distill, first_round)["s1a"].values():
        assert (array.dtype, array.shape) == (np.float32, (10,))


def test_what_a_site_gets_does_not_depend_on_what_it_sent(
    distill: FedDistill, first_round: State, site_reply: Callable[..., Any]
) -> None:
    other = {"s3a": site_reply("s3a", logits(c0=-60, c1=-20, c2=-30))}
    changed = state_after(distill, first_round, other)
    before, after = sent(distill, first_round), sent(distill, changed)
    assert after["s3a"] == before["s3a"]
    assert after["s1a"] == {"logits/0": -29.0, "logits/1": -20.0}


def test_a_site_that_did_not_answer_counts_with_what_it_sent_before(
    distill: FedDistill, first_round: State, site_reply: Callable[..., Any]
) -> None:
    state = state_after(distill, first_round, {"s1a": site_reply("s1a", logits(c0=3, c1=4))})
    assert sent(distill, state)["s2a"] == {"logits/0": 4.5}  # s1a's new 3, s3a's old 6


def test_a_single_site_gets_nothing(
    participants: Participants, site_reply: Callable[..., Any]
) -> None:
    alone = strategy_of(with_class_counts(participants, s1a=[1, 5]))
    replies = {"s1a": site_reply("s1a", logits(c0=1, c1=10))}
    assert arrays_sent(alone, state_after(alone, START, replies))["s1a"] == {}


def test_only_classes_of_enough_samples_are_asked_for_and_sent_to_a_site(
    distill: FedDistill, first_round: State
) -> None:
    distill.settings = FedDistillSettings(class_min_count=4)
    facts = distill.participants.facts
    raised = {**facts, "s3a": dataclasses.replace(facts["s3a"], floor=5)}
    distill.participants = Participants(raised, distill.participants.nodes)
    asked = {site: set(arrays_expected(distill, START)[site]) for site in raised}
    assert asked == {"s1a": {"logits/1"}, "s2a": {"logits/0"}, "s3a": {"logits/1"}}
    assert {site: set(found) for site, found in sent(distill, first_round).items()} == asked
    distill.settings = FedDistillSettings(class_min_count=6)
    assert arrays_sent(distill, first_round)["s1a"] == {}
    assert arrays_expected(distill, first_round)["s1a"] == {}


def test_nothing_is_sent_before_the_first_round_or_to_measure(
    distill: FedDistill, first_round: State
) -> None:
    assert distill.initial_state() == START
    assert arrays_sent(distill, START)["s1a"] == {}
    assert evaluation_of(distill, first_round).send["s1a"] == {}


@pytest.mark.parametrize(("site", "classes"), [("s1a", (0, 1)), ("s2a", (0,)), ("s3a", (0, 1, 2))])
def test_a_site_answers_with_the_classes_that_it_has(
    distill: FedDistill, site: str, classes: tuple[int, ...]
) -> None:
    found = arrays_expected(distill, START)[site]
    assert found == {f"logits/{label}": ArraySpec((10,)) for label in classes}


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        ({"logits/0": np.zeros(9)}, r"float32 \(9,\), expected float32 \(10,\)"),
        ({"logits/0": np.full(10, np.nan)}, "non-finite values"),
        ({"logits/0": np.zeros(10), "logits/1": np.zeros(10)}, r"surplus \['logits/1'\]"),
        ({"logits/0": np.zeros(10), "head.4.bias": np.zeros(10)}, r"surplus \['head.4.bias'\]"),
        ({}, r"missing \['logits/0'\]"),
    ],
)
def test_a_reply_that_is_no_set_of_logits_is_refused(
    spy_grid: Any,
    fake_app: Any,
    content: Any,
    measured: dict[str, float],
    participants: Participants,
    bad: Mapping[str, Any],
    fault: str,
) -> None:
    def answer(found: Mapping[str, Any]) -> Callable[..., Any]:
        arrays = {name: np.asarray(array, np.float32) for name, array in found.items()}
        return lambda message: content(arrays, **measured)

    app = fake_app(answer({"logits/0": np.zeros(10)}), s2a=answer(bad))
    common = CommonSettings(rounds=1, silos=3, width=1, run_name="run")
    strategy = RoundLoop(
        FedDistill(common, FedDistillSettings(), participants), run_dir="/somewhere"
    )
    with pytest.raises(SiteError, match=f"site s2a.*{fault}"):
        strategy.start(spy_grid(app), 1)


def test_in_a_run_each_site_gets_the_mean_of_what_the_others_sent(
    spied_run: Callable[..., Any], tiny: Callable[..., dict[str, Any]]
) -> None:
    grid, strategy = spied_run(tiny("feddistill"))
    messages, replies = grid.sent[3:], grid.replies[3:]
    assert not any(m.content.array_records for m in [*messages[:3], *messages[6:], *replies[6:]])
    own = [{n: a.numpy() for n, a in reply.content[ARRAYS].items()} for reply in replies[:3]]
    for index, message in enumerate(messages[3:6]):
        others = [found for place, found in enumerate(own) if place != index]
        received = message.content[ARRAYS]
        assert set(received) == own[index].keys() & (others[0].keys() | others[1].keys())
        for name, array in received.items():
            mean = np.mean([found[name] for found in others if name in found], axis=0)
            np.testing.assert_allclose(array.numpy(), mean, rtol=1e-5)
    for reply in replies[:6]:
        assert all(name.startswith("logits/") for name in reply.content[ARRAYS])
    assert strategy.state.stateful_sites == ("s1a", "s2a", "s3a")


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ({"s1a": [3, 1], "s2a": [5, 9]}, "site s1a, class 1, is that of one single sample"),
        ({"s1a": [3, 4], "s2a": [5, 9]}, "of as few as 3 (site s1a, class 0)"),
        ({"s1a": [3, 4], "s2a": [5, 9]}, "the site has at least 1 training samples of, the mean"),
        (
            {"s1a": [0, 0], "s2a": [0, 0]},
            "each round: no class mean, because there is no class that",
        ),
        ({"s1a": [3, 4], "s2a": [5, 9]}, "the other site gets them unchanged"),
        ({"s1a": [3, 4]}, "nobody gets them"),
        ({"s1a": [3, 4], "s2a": [5, 9], "s3a": [5, 5]}, "the mean over the other sites"),
    ],
)
def test_what_leaves_is_told_with_who_gets_it(
    participants: Participants, counts: dict[str, list[int]], told: str
) -> None:
    (found,) = strategy_of(with_class_counts(participants, **counts)).disclosures().leaves
    assert told in found
