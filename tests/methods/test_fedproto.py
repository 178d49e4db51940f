"""Tests of the method 'fedproto': equations, site and server."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.fedproto import FedProtoSite
from fedsilo.client_app.methods.local import LocalSite
from fedsilo.client_app.session import finished_session
from fedsilo.client_app.site.private_state import SiteState
from fedsilo.client_app.training.site_class_means import class_means
from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.messages import ARRAYS, METRICS, Instruction
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import build
from fedsilo.core.site_facts import SiteFacts
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Split
from fedsilo.engines.inline_engine import partition_configs
from fedsilo.models.maths.class_means import ClassTargets
from fedsilo.models.methods.fedproto import (
    FedProtoSettings,
    NearestPrototype,
    nearest_logits,
)
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import TokenClassifier, evidences
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants, meet_sites
from fedsilo.strategies.methods.class_means import FedProto
from fedsilo.strategies.wire.reply import ArraySpec
from tests.support.asking import arrays_expected, arrays_sent, evaluation_of, state_after
from tests.support.errors import refuses
from tests.support.lab import answer, evaluate, steps_of
from tests.support.methods import Opened, SharedRun, network_of, with_class_counts

# The equations

# Of three classes the second has no target
TARGETS = ClassTargets(
    torch.tensor([[1.0, 2.0], [0.0, 0.0], [4.0, 4.0]]), torch.tensor([True, False, True])
)


def test_the_nearest_prototype_has_the_largest_logit_and_a_class_without_one_no_chance() -> None:
    found = nearest_logits(torch.tensor([[1.0, 3.0], [4.0, 3.0]]), TARGETS)
    assert found.tolist() == [[-1, -math.inf, -10], [-10, -math.inf, -1]]
    shares = torch.softmax(found, dim=1)
    assert shares[:, 1].tolist() == [0, 0]
    assert shares.sum(dim=1).tolist() == pytest.approx([1, 1])


def test_a_network_measured_by_prototypes_ignores_its_head() -> None:
    common = CommonSettings(width=4, network="mlp", dropout=0.9, dataset="heart-synthetic")
    network = build_classifier(common, NetworkShape((3,), 3))
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    embeddings = network.encode(inputs).flatten(1).detach()
    values = torch.stack([embeddings[1], torch.zeros(4), embeddings[3]])
    nearest = NearestPrototype(network, ClassTargets(values, torch.tensor([True, False, True])))
    found = nearest.classify(nearest.features(nearest.encode(inputs)))
    assert found.argmax(dim=1)[[1, 3]].tolist() == [0, 2]
    distances = torch.cdist(embeddings, values).square()
    torch.testing.assert_close(found[:, [0, 2]], -distances[:, [0, 2]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan])
def test_no_weight_at_all_would_be_local_and_is_refused(weight: float) -> None:
    with refuses(SettingError, "fedproto.prototype-weight", "0"):
        build(FedProtoSettings, {"fedproto.prototype-weight": weight})


def test_a_mean_of_no_sample_is_refused() -> None:
    with refuses(SettingError, "fedproto.class-min-count", "0", "1"):
        build(FedProtoSettings, {"fedproto.class-min-count": 0})


def test_the_head_classifies_unless_it_is_set_otherwise() -> None:
    assert build(FedProtoSettings, {}) == FedProtoSettings(1.0, "head", 10)
    with refuses(SettingError, "fedproto.inference", "nearest"):
        build(FedProtoSettings, {"fedproto.inference": "nearest"})


# At a site

SIZE = 64  # four tokens of 16 channels


def prototypes(size: int = SIZE, **values: float) -> dict[str, Any]:
    """Return prototypes of one value each, by class: c3=0.5."""
    return {
        f"prototype/{name[1:]}": np.full(size, value, np.float32) for name, value in values.items()
    }


def embeddings(network: TokenClassifier, split: Split) -> Tensor:
    with torch.no_grad():
        return network.encode(split.inputs).flatten(1)


def test_the_first_round_is_locals_first_round(opened: Opened) -> None:
    first, alone = (
        answer(opened("fedproto"))[METRICS],
        answer(opened("local"))[METRICS],
    )
    for key in ("incoming.test.loss", "trained.train.loss", "trained.val.entropy"):
        assert first[key] == alone[key]


def test_a_prototype_of_each_class_leaves_the_site_and_no_weight(opened: Opened) -> None:
    site = opened("fedproto")
    reply = answer(site)
    classes = torch.unique(site.silo.train.labels).tolist()
    assert set(reply[ARRAYS]) == {f"prototype/{label}" for label in classes}
    for array in reply[ARRAYS].values():
        assert (array.numpy().shape, array.numpy().dtype) == ((SIZE,), np.float32)
    assert reply[METRICS]["kept-state"] == 1


def test_a_prototype_is_the_mean_embedding_in_eval_mode_after_training(opened: Opened) -> None:
    site = opened("fedproto")
    sent = answer(site)[ARRAYS]
    trained = network_of(opened("fedproto", round=2))
    labels = site.silo.train.labels
    in_eval = embeddings(trained.eval(), site.silo.train)
    in_training = embeddings(trained.train(), site.silo.train)
    untrained = embeddings(network_of(opened("fedproto", round=1)).eval(), site.silo.train)
    for name, array in sent.items():
        own = labels == int(name.removeprefix("prototype/"))
        found = torch.from_numpy(array.numpy().copy())
        torch.testing.assert_close(found, in_eval[own].mean(dim=0), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found, in_training[own].mean(dim=0), rtol=1e-2, atol=1e-2)
        assert not torch.allclose(found, untrained[own].mean(dim=0), rtol=1e-2, atol=1e-2)


def test_a_class_that_the_site_has_no_sample_of_has_no_prototype(opened: Opened) -> None:
    site = opened("fedproto")
    train = site.silo.train
    rest = train.labels != 3
    assert not rest.all()
    fewer = Split(train.inputs[rest], train.labels[rest])
    site.silo = dataclasses.replace(site.silo, train=fewer)
    sent = answer(site)[ARRAYS]
    assert "prototype/3" not in sent
    assert len(sent) == len(torch.unique(fewer.labels))


def of_counts(site: FedProtoSite, *counts: int) -> None:
    """Give the site as many training samples of each class, none of the others."""
    train = site.silo.train
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    held = Split(train.inputs[: len(labels)], labels)
    site.silo = dataclasses.replace(site.silo, train=held)


@pytest.mark.parametrize(
    ("least", "floor", "sent"), [(1, 1, [0, 1, 2]), (5, 1, [1, 2]), (1, 6, [2]), (9, 5, [])]
)
def test_of_a_class_of_fewer_samples_than_either_floor_no_prototype_leaves(
    opened: Opened, least: int, floor: int, sent: list[int]
) -> None:
    site = opened("fedproto", own={"class_min_count": least, "sums_min_count": floor})
    of_counts(site, 4, 5, 6)
    assert set(answer(site)[ARRAYS] if sent else []) == {f"prototype/{label}" for label in sent}


@pytest.fixture
def logistic(tmp_path: Path) -> Callable[..., Lab]:
    """Return a builder of a site of logistic regression: 12 rows of class 0, 1 row of class 1."""

    def make(**changes: Any) -> Lab:
        values = {"method": "fedproto", "dataset": "heart-synthetic", "device": "cpu"}
        settings = resolve(
            values | {key.replace("__", ".").replace("_", "-"): v for key, v in changes.items()}
        )
        rows = torch.arange(13 * 13, dtype=torch.float32).reshape(13, 13)
        labels = torch.tensor([0] * 12 + [1])
        silo = load_silo("va", settings.common)
        silo = dataclasses.replace(silo, train=Split(rows, labels))
        session = finished_session(settings.common, settings.own, silo)
        site = dataclasses.replace(settings.common, standardise="site")
        session = dataclasses.replace(session, settings=site)
        lab = Lab(session, RecordDict(), Instruction(1, "train"), SiteState(tmp_path))
        lab.silo, lab.common = silo, settings.common
        return lab

    return make


def test_of_logistic_regression_a_class_of_one_row_is_not_sent_unless_every_floor_is_one(
    logistic: Callable[..., Lab],
) -> None:
    def sent(**changes: Any) -> dict[str, list[float]]:
        site = logistic(**changes)
        return {name: row.tolist() for name, row in steps_of(site).sent.items()}

    mean = [71.5 + column for column in range(13)]  # of 0, 13, ... 143 and what follows each
    assert sent() == {"prototype/0": mean}
    assert sent(fedproto__class_min_count=1) == sent(sums_min_count=1) == sent()
    row = [156.0 + column for column in range(13)]  # the patient's own
    assert sent(fedproto__class_min_count=1, sums_min_count=1) == {
        "prototype/0": mean,
        "prototype/1": row,
    }
    assert sent(fedproto__class_min_count=13) == {}


def test_a_site_whose_classes_are_all_small_answers_as_local_does(opened: Opened) -> None:
    site, alone = opened("fedproto", own={"class_min_count": 7}), opened("local")
    for method in (site, alone):
        of_counts(method, 4, 5, 6)  # type: ignore[arg-type]
    reply, other = answer(site), answer(alone)
    assert not reply.array_records
    keys = [key for key in other[METRICS] if ".loss" in key or ".accuracy" in key]
    assert keys
    assert all(reply[METRICS][key] == other[METRICS][key] for key in keys)


def test_means_do_not_depend_on_the_batches_they_are_made_in(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = opened("fedproto")
    network = network_of(site)

    def found() -> dict[int, Tensor]:
        function = lambda inputs: network.encode(inputs).flatten(1)  # noqa: E731
        return class_means(network, site.silo, site.compute, function, 1)

    whole = found()
    monkeypatch.setattr("fedsilo.client_app.training.evaluation._BATCH", 7)
    parts = found()
    assert whole.keys() == parts.keys()
    for label in whole:
        torch.testing.assert_close(whole[label], parts[label], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("network_settings", ["conv", "vit"])
def test_the_loss_is_the_criterion_plus_lambda_times_the_mse_to_known_prototypes(
    opened: Opened, vit: dict[str, Any], network_settings: str
) -> None:
    own = (vit if network_settings == "vit" else {}) | {"prototype_weight": 0.5}
    size = 16 if network_settings == "vit" else SIZE
    site = opened("fedproto", own=own)
    train = site.silo.train
    first, second = 0, int((train.labels != train.labels[0]).nonzero()[0])
    inputs, labels = train.inputs[[first, second]], train.labels[[first, second]]
    received = prototypes(size, **{f"c{labels[0]}": 0.25})  # the second sample's class has none
    site = opened("fedproto", received, own=own)
    network = network_of(site).eval()
    assert bool(evidences(network)) is (network_settings == "vit")
    found = steps_of(site, network).loss(inputs, labels).item()
    embedding = network.encode(inputs).flatten(1)[0]
    distance = ((embedding - 0.25) ** 2).sum().item() / (2 * size)
    assert distance > 1e-3
    criterion = network.criterion(network(inputs), labels).item()
    assert found == pytest.approx(criterion + 0.5 * distance, rel=1e-5)


def test_prototypes_of_other_classes_change_no_loss(opened: Opened) -> None:
    site = opened("fedproto", prototypes(c9=5.0))
    network = network_of(site).eval()
    few = site.silo.train.labels != 9
    inputs, labels = site.silo.train.inputs[few], site.silo.train.labels[few]
    found = steps_of(site, network).loss(inputs, labels).item()
    assert found == pytest.approx(network.loss(inputs, labels).item(), rel=1e-6)


def test_training_draws_embeddings_to_the_prototypes(opened: Opened) -> None:
    received = prototypes(**{f"c{label}": 0.0 for label in range(10)})

    def length(weight: float) -> float:
        own = {"prototype_weight": weight, "local_epochs": 30}  # batch norm's means need some
        site = opened("fedproto", received, own=own)
        sent = answer(site)[ARRAYS]
        return float(np.mean([np.square(array.numpy()).mean() for array in sent.values()]))

    assert length(100.0) < 0.7 * length(1e-9)


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_nearest_prototype_is_the_answer_where_that_is_wanted(
    opened: Opened, split: str
) -> None:
    own = {"inference": "prototype"}
    probe = opened("fedproto", own=own)
    network = network_of(probe).eval()
    wide = embeddings(network, probe.silo.train)
    received = {f"prototype/{n}": wide[index].numpy() for n, index in ((0, 5), (4, 6), (7, 20))}
    site = opened("fedproto", received, own=own, phase="evaluate")
    found = evaluate(site)[METRICS][f"incoming.{split}.accuracy"]
    held = site.silo.splits()[split]
    distances = torch.cdist(embeddings(network, held), wide[[5, 6, 20]])
    predicted = torch.tensor([0, 4, 7])[distances.argmin(dim=1)]
    assert found == pytest.approx((predicted == held.labels).double().mean().item())


def test_with_one_prototype_all_samples_are_of_its_class(opened: Opened) -> None:
    label = int(opened("fedproto").silo.test.labels[0])
    site = opened("fedproto", prototypes(**{f"c{label}": 0.1}), own={"inference": "prototype"})
    metrics = evaluate(site)[METRICS]
    share = (site.silo.test.labels == label).double().mean().item()
    assert metrics["incoming.test.accuracy"] == pytest.approx(share)
    assert 0 < share < 1
    assert metrics["incoming.test.entropy"] == 0
    assert np.isfinite(metrics["incoming.test.loss"])


def test_distances_of_an_evidential_network_are_not_taken_for_evidence(
    opened: Opened, vit: dict[str, Any]
) -> None:
    far = prototypes(16, c0=300.0, c1=400.0)
    metrics = evaluate(opened("fedproto", far, own=vit | {"inference": "prototype"}))[METRICS]
    assert all(np.isfinite(cast(float, value)) for value in metrics.values())
    assert not [key for key in metrics if "vacuity" in key]


def test_before_there_are_prototypes_the_head_answers(opened: Opened) -> None:
    head = answer(opened("fedproto"))[METRICS]
    nearest = answer(opened("fedproto", own={"inference": "prototype"}))[METRICS]
    for key in ("incoming.test.loss", "trained.val.loss"):
        assert nearest[key] == head[key]


def test_the_inference_changes_what_is_measured_and_nothing_that_is_trained(
    opened: Opened,
) -> None:
    received = prototypes(c0=0.1, c1=0.2, c2=0.3)
    head = answer(opened("fedproto", received))
    nearest = answer(opened("fedproto", received, own={"inference": "prototype"}))
    assert nearest[METRICS]["trained.train.loss"] == head[METRICS]["trained.train.loss"]
    for key in ("incoming.test.loss", "trained.val.loss"):
        assert nearest[METRICS][key] != head[METRICS][key]
    for name, array in head[ARRAYS].items():
        np.testing.assert_array_equal(nearest[ARRAYS][name].numpy(), array.numpy())


@pytest.mark.parametrize(
    ("received", "fault"),
    [
        (prototypes(size=63, c1=0.0), ["prototype/1", 63, 64]),
        (prototypes(c1=float("inf")), ["prototype/1"]),
        (prototypes(c10=0.0), ["prototype/10", 10]),
    ],
)
def test_a_prototype_that_cannot_be_one_stops_the_site(
    opened: Opened, received: Mapping[str, Any], fault: list[object]
) -> None:
    with refuses(SiteError, *fault):
        answer(opened("fedproto", received))


def test_the_network_goes_on_from_the_sites_own_state(opened: Opened) -> None:
    assert issubclass(FedProtoSite, LocalSite)
    answer(opened("fedproto", round=1))
    kept = opened("fedproto", round=2).state()
    bias = network_of(opened("fedproto", prototypes(c1=0.0), round=2)).head[-1].bias
    assert torch.equal(cast(Tensor, bias), kept["head.4.bias"])


# At the server

START = State({})
DERMATOLOGISTS = ("bcn", "vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias", "msk4")


@pytest.fixture
def proto(participants: Participants) -> FedProto:
    """Return the strategy of three sites: class 0 is at all, 1 at two, 2 at one."""
    sites = with_class_counts(participants, s1a=[1, 5, 0], s2a=[3, 0, 0], s3a=[4, 5, 2])
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
    shared_run: SharedRun,
    tiny: Callable[..., dict[str, Any]],
    told: Any,
    inference: str,
) -> None:
    grid, strategy, _ = shared_run(tiny("fedproto", inference=inference))
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
    shared_run: SharedRun, tiny: Callable[..., dict[str, Any]]
) -> None:
    grid, strategy, _ = shared_run(tiny("fedproto", inference="head"))
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
        assert list(proto.sent_classes(site)) == labels
        assert set(arrays_expected(proto, START)[site]) == {f"prototype/{n}" for n in labels}


@pytest.mark.parametrize(
    ("least", "floors", "notices"),
    [
        (4, {}, 1),  # the run's 'privacy.sums-min-count', 10, is every site's floor
        (10, {}, 0),
        (4, {"s2a": 4}, 0),
        (4, {"s1a": 5, "s2a": 6, "s3a": 7}, 1),
    ],
)
def test_a_class_min_count_below_every_sites_floor_is_said_to_have_no_effect(
    proto: FedProto, least: int, floors: dict[str, int], notices: int
) -> None:
    proto.settings = FedProtoSettings(class_min_count=least)
    every = dict.fromkeys(proto.participants.sites(), 10)
    proto.participants = floored(proto.participants, **every | floors)
    told = proto.notices()
    assert len(told) == notices
    assert all("'fedproto.class-min-count' is 4" in line for line in told)


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
    assert told.startswith("each round: no class mean, because there is no class that the site has")
    assert told.endswith("at least 10 training samples of")


def test_of_logistic_regression_it_is_told_that_rows_themselves_are_averaged() -> None:
    facts = {"va": SiteFacts("va", "va", (13,), 2, {"train": [19, 9]}, {})}
    common = CommonSettings(dataset="heart")
    told = FedProto(common, FedProtoSettings(), Participants(facts, {"va": 1})).disclosures().leaves
    assert "the exact mean of each such class's standardised rows" in told[1]
