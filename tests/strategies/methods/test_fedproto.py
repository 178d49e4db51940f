import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.models.contract.errors import SettingError, SiteError
from fedsilo.models.contract.messages import ARRAYS
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.site_facts import SiteFacts
from fedsilo.models.methods.fedproto import FedProtoSettings
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.run.inline_engine import partition_configs
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants, meet_sites
from fedsilo.strategies.methods.fedproto import FedProto
from fedsilo.strategies.wire.reply import ArraySpec
from tests.support.asking import arrays_expected, arrays_sent, evaluation_of, state_after

START = State({})
DERMATOLOGISTS = ("bcn", "vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias", "msk4")


def counted(participants: Participants, **counts: list[int]) -> Participants:
    """Return the participants with the sites' training samples by class."""
    facts = {
        site: dataclasses.replace(found, label_counts=found.label_counts | {"train": counts[site]})
        for site, found in participants.facts.items()
    }
    return Participants(facts, participants.nodes)


@pytest.fixture
def proto(participants: Participants) -> FedProto:
    """Return the strategy of three sites: class 0 is at all, 1 at two, 2 at one."""
    sites = counted(participants, s1a=[1, 5, 0], s2a=[3, 0, 0], s3a=[4, 5, 2])
    return FedProto(CommonSettings(silos=3, width=1), FedProtoSettings(class_min_count=1), sites)


def arrays(**values: float) -> dict[str, Any]:
    return {f"prototype/{name[1:]}": np.float32([value, -value]) for name, value in values.items()}


def test_there_are_no_prototypes_before_the_first_round(proto: FedProto) -> None:
    assert proto.initial_state() == START
    assert arrays_sent(proto, START)["s1a"] == {}


@pytest.mark.parametrize(("site", "classes"), [("s1a", (0, 1)), ("s2a", (0,)), ("s3a", (0, 1, 2))])
def test_a_site_answers_with_the_classes_that_it_has(
    proto: FedProto, site: str, classes: tuple[int, ...]
) -> None:
    found = arrays_expected(proto, START)[site]
    assert found == {f"prototype/{label}": ArraySpec((16,)) for label in classes}


@pytest.mark.parametrize(
    ("common", "shape", "size"),
    [
        ({"width": 4}, (1, 16, 16), 4 * 16),
        ({"network": "vgg16-bn", "width": 8}, (3, 64, 64), 4 * 32),
        ({"network": "vit"}, (3, 224, 224), 384),
        ({"network": "vit", "backbone_weights": "timm"}, (3, 224, 224), 384),
        ({"network": "logistic", "dataset": "heart"}, (13,), 13),
        ({"network": "mlp", "width": 8, "dataset": "heart"}, (13,), 8),
    ],
)
def test_the_size_of_a_prototype_is_known_of_every_network_without_its_weights(
    participants: Participants, common: dict[str, Any], shape: tuple[int, ...], size: int
) -> None:
    facts = {s: dataclasses.replace(f, input_shape=shape) for s, f in participants.facts.items()}
    strategy = FedProto(
        CommonSettings(**common), FedProtoSettings(), Participants(facts, participants.nodes)
    )
    assert arrays_expected(strategy, START)["s1a"] == {"prototype/0": ArraySpec((size,))}


def test_a_global_prototype_is_weighed_by_the_sites_counts_of_the_class(
    proto: FedProto, site_reply: Callable[..., Any]
) -> None:
    # Sites have many more samples in all; only those of the class count
    replies = {
        "s1a": site_reply("s1a", arrays(c0=2, c1=1), num_examples=6),
        "s2a": site_reply("s2a", arrays(c0=6), num_examples=3),
    }
    found = state_after(proto, START, replies).arrays
    assert set(found) == {"prototype/0", "prototype/1"}
    assert found["prototype/0"].tolist() == [5, -5]  # (1 * 2 + 3 * 6) / 4
    assert found["prototype/1"].tolist() == [1, -1]
    assert all(array.dtype == np.float32 for array in found.values())


def test_the_order_of_the_replies_is_of_no_account(
    proto: FedProto, site_reply: Callable[..., Any]
) -> None:
    values = {"s1a": -4e20, "s2a": 0.1, "s3a": 1e20}  # by counts the large ones cancel
    made = []
    for order in itertools.permutations(values):
        replies = {}
        for site in order:
            own = dict.fromkeys(("c0", "c1", "c2"), values[site])
            replies[site] = site_reply(site, arrays(**own))
        made.append(state_after(proto, START, replies).arrays["prototype/0"].tobytes())
    assert len(set(made)) == 1


def test_a_class_that_nobody_sent_keeps_its_prototype(
    proto: FedProto, site_reply: Callable[..., Any]
) -> None:
    before = State(arrays(c0=9, c1=8, c2=7), 4)
    after = state_after(proto, before, {"s1a": site_reply("s1a", arrays(c0=2, c1=1))})
    assert {name: array[0] for name, array in after.arrays.items()} == {
        "prototype/0": 2,  # of the round's answers alone
        "prototype/1": 1,
        "prototype/2": 7,
    }
    assert after.round == 4


@pytest.mark.parametrize(("inference", "brings"), [("head", False), ("prototype", True)])
def test_prototypes_go_to_all_to_train_and_only_if_they_classify_to_measure(
    proto: FedProto, inference: str, brings: bool
) -> None:
    proto.settings = FedProtoSettings(inference=inference, class_min_count=1)
    state = State(arrays(c0=1, c2=3), 1)
    assert all(
        arrays_sent(proto, state)[site] == state.arrays for site in proto.participants.sites()
    )
    assert evaluation_of(proto, state).send["s1a"] == (state.arrays if brings else {})


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        ({"prototype/0": np.zeros(15)}, r"float32 \(15,\), expected float32 \(16,\)"),
        ({"prototype/0": np.full(16, np.nan)}, "non-finite values"),
        ({"prototype/0": np.zeros(16), "prototype/1": np.zeros(16)}, r"surplus \['prototype/1'\]"),
        ({"prototype/0": np.zeros(16), "head.4.bias": np.zeros(10)}, r"surplus \['head.4.bias'\]"),
        ({}, r"missing \['prototype/0'\]"),
    ],
)
def test_a_reply_that_is_no_set_of_prototypes_is_refused(
    spy_grid: Any,
    fake_app: Any,
    content: Any,
    measured: dict[str, float],
    participants: Participants,
    bad: Mapping[str, Any],
    fault: str,
) -> None:
    def answer(found: Mapping[str, Any]) -> Callable[..., Any]:
        sent = {name: np.asarray(array, np.float32) for name, array in found.items()}
        return lambda message: content(sent, **measured)

    app = fake_app(answer({"prototype/0": np.zeros(16)}), s2a=answer(bad))
    common = CommonSettings(rounds=1, silos=3, width=1, run_name="run")
    strategy = RoundLoop(FedProto(common, FedProtoSettings(), participants), run_dir="/somewhere")
    with pytest.raises(SiteError, match=f"site s2a.*{fault}"):
        strategy.start(spy_grid(app), 1)


@pytest.mark.parametrize("inference", ["head", "prototype"])
def test_in_a_run_only_prototypes_cross_the_wire(
    spied_run: Callable[..., Any],
    tiny: Callable[..., dict[str, Any]],
    told: Any,
    inference: str,
) -> None:
    grid, strategy = spied_run(tiny("fedproto", inference=inference))
    sent, replies = grid.sent[3:], grid.replies[3:]
    received = [set(m.content.array_records.get(ARRAYS, {})) for m in sent]
    names = {f"prototype/{label}" for label in range(10)}
    assert received[:3] == [set()] * 3
    assert all(found and found <= names for found in received[3:6])
    assert received[6:] == (
        [set()] * 3 if inference == "head" else [set(strategy.state.arrays)] * 3
    )
    for reply in replies[:6]:
        found = reply.content.array_records[ARRAYS]
        assert set(found) <= names
        assert all(array.numpy().shape == (64,) for array in found.values())
    assert not any(reply.content.array_records for reply in replies[6:])
    assert [told(message)["returns"] for message in sent] == [True] * 6 + [False] * 3
    assert strategy.state.stateful_sites == ("s1a", "s2a", "s3a")


def test_in_a_run_the_second_round_gets_the_count_weighted_means_of_the_first(
    spied_run: Callable[..., Any], tiny: Callable[..., dict[str, Any]]
) -> None:
    grid, strategy = spied_run(tiny("fedproto"))
    name = "prototype/4"
    total, weights = np.zeros(64), 0
    for site, reply in zip(("s1a", "s2a", "s3a"), grid.replies[3:6], strict=True):
        count = strategy.method.participants.facts[site].label_counts["train"][4]
        assert (name in reply.content[ARRAYS]) is (count > 0)
        if count:
            total += count * reply.content[ARRAYS][name].numpy().astype(np.float64)
            weights += count
    found = grid.sent[6].content[ARRAYS][name].numpy()
    np.testing.assert_allclose(found, total / weights, rtol=1e-6)


def floored(participants: Participants, **floors: int) -> Participants:
    """Return the participants with the floors that hospitals set."""
    facts = {
        site: dataclasses.replace(found, floor=floors.get(site, 1))
        for site, found in participants.facts.items()
    }
    return Participants(facts, participants.nodes)


@pytest.mark.parametrize(
    ("least", "floors", "classes"),
    [
        (1, {}, {"s1a": [0, 1], "s2a": [0], "s3a": [0, 1, 2]}),
        (4, {}, {"s1a": [1], "s2a": [], "s3a": [0, 1]}),
        (1, {"s3a": 5}, {"s1a": [0, 1], "s2a": [0], "s3a": [1]}),
        (4, {"s1a": 6, "s3a": 2}, {"s1a": [], "s2a": [], "s3a": [0, 1]}),
        (10, {}, {"s1a": [], "s2a": [], "s3a": []}),
    ],
)
def test_only_classes_of_enough_samples_are_asked_for_and_a_hospital_may_want_more(
    proto: FedProto, least: int, floors: dict[str, int], classes: dict[str, list[int]]
) -> None:
    proto.settings = FedProtoSettings(class_min_count=least)
    proto.participants = floored(proto.participants, **floors)
    for site, labels in classes.items():
        assert list(proto.held(site)) == labels
        assert set(arrays_expected(proto, START)[site]) == {f"prototype/{n}" for n in labels}


@pytest.mark.parametrize("inference", ["head", "prototype"])
def test_a_site_that_sends_no_prototype_gets_none(proto: FedProto, inference: str) -> None:
    proto.settings = FedProtoSettings(inference=inference, class_min_count=4)
    state = State(arrays(c0=1, c1=3), 1)
    assert arrays_sent(proto, state)["s2a"] == evaluation_of(proto, state).send["s2a"] == {}
    assert arrays_sent(proto, state)["s1a"] == state.arrays


def test_a_class_below_the_floor_weighs_nothing_in_the_mean(
    proto: FedProto, site_reply: Callable[..., Any]
) -> None:
    proto.settings = FedProtoSettings(class_min_count=3)
    replies = {
        "s1a": site_reply("s1a", arrays(c1=1)),  # of class 0 it has one sample
        "s2a": site_reply("s2a", arrays(c0=6)),
        "s3a": site_reply("s3a", arrays(c0=13, c1=3)),
    }
    found = state_after(proto, START, replies).arrays
    assert found["prototype/0"].tolist() == [10, -10]  # (3 * 6 + 4 * 13) / 7
    assert found["prototype/1"].tolist() == [2, -2]


def test_a_hospitals_raised_floor_keeps_a_class_at_home_and_the_server_does_not_ask_for_it(
    spy_grid: Any, tiny: Callable[..., dict[str, Any]], told: Any, tmp_path: Path
) -> None:
    from fedsilo.client_app.app import app

    values = resolve(tiny("fedproto", rounds=1, run_name="run"))
    nodes = [{**node, "sums-min-count": 37} for node in partition_configs(3)]
    nodes[0]["sums-min-count"], nodes[1]["sums-min-count"] = 1, 5
    grid = type(spy_grid(app))(app, values.as_mapping(), nodes)
    sites = meet_sites(grid, values.common)
    strategy = FedProto(values.common, values.own, sites)
    loop = RoundLoop(strategy, run_dir=str(tmp_path))
    loop.state = strategy.initial_state()
    loop.start(grid, 1)
    assert [facts.floor for facts in sites.facts.values()] == [1, 5, 37]
    for index, (site, floor) in enumerate([("s1a", 1), ("s2a", 5), ("s3a", 37)]):
        counts = sites.facts[site].label_counts["train"]
        names = {f"prototype/{label}" for label, count in enumerate(counts) if count >= floor}
        sent = grid.replies[3 + index].content.array_records.get(ARRAYS, {})
        assert set(sent) == set(arrays_expected(strategy, START)[site]) == names
        assert told(grid.sent[3 + index])["returns"] is bool(names)
        assert bool(names) is (site != "s3a")


def test_what_leaves_is_told_with_the_floor_and_the_fewest_samples_behind_a_mean(
    proto: FedProto,
) -> None:
    (told,) = proto.disclosures().leaves
    assert "for each class that the site has at least 1 training samples of, the mean" in told
    assert "at site s1a, class 0, is that of one single sample" in told
    proto.settings = FedProtoSettings(class_min_count=3)
    (told,) = proto.disclosures().leaves
    assert "the site has at least 3 training samples of, the mean" in told
    assert "of as few as 3 (site s2a, class 0)" in told
    proto.participants = floored(proto.participants, s2a=4)
    (told,) = proto.disclosures().leaves
    assert "the site has at least 3 training samples of (site s2a 4), the mean" in told
    assert "of as few as 4 (site s3a, class 0)" in told
    proto.settings = FedProtoSettings()
    (told,) = proto.disclosures().leaves
    assert told.startswith("each round: no class mean, since there is no class that the site has")
    assert told.endswith("at least 10 training samples of")


def test_of_logistic_regression_it_is_told_that_rows_themselves_are_averaged() -> None:
    facts = {"va": SiteFacts("va", "va", (13,), 2, {"train": [19, 9]}, {})}
    common = CommonSettings(dataset="heart")
    told = FedProto(common, FedProtoSettings(), Participants(facts, {"va": 1})).disclosures().leaves
    assert "the exact mean of each such class's standardised rows" in told[1]


def test_no_weight_is_refused_before_a_run_starts(tiny: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(SettingError, match=r"'fedproto.prototype-weight' is 0\.0; .*above 0"):
        resolve(tiny("fedproto", prototype_weight=0.0))
