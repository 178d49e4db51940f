import dataclasses
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
from fedsilo.client_app.training.class_means import class_means
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import ARRAYS, METRICS, Instruction
from fedsilo.models.maths.dirichlet import evidences
from fedsilo.models.networks.site_network import TokenClassifier
from fedsilo.server_app.config.settings import resolve
from tests.support.keys import as_keys
from tests.support.lab import answer, evaluate, steps_of

Opened = Callable[..., Lab]
SIZE = 64  # four tokens of 16 channels


def prototypes(size: int = SIZE, **values: float) -> dict[str, Any]:
    """Return prototypes of one value each, by class: c3=0.5."""
    return {
        f"prototype/{name[1:]}": np.full(size, value, np.float32) for name, value in values.items()
    }


def network_of(site: FedProtoSite) -> TokenClassifier:
    return cast(TokenClassifier, site.open())


def embeddings(network: TokenClassifier, split: Split) -> Tensor:
    with torch.no_grad():
        return network.encode(split.inputs).flatten(1)


@pytest.fixture
def vit(tiny: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of a small prompted ViT."""
    wanted = ("network.name", "vit.backbone", "vit.prompt-length", "vit.basic-layers")
    return {k: v for k, v in tiny("fedevprompt").items() if k.startswith(wanted)}


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
        settings = resolve(values | as_keys(changes))
        rows = torch.arange(13 * 13, dtype=torch.float32).reshape(13, 13)
        labels = torch.tensor([0] * 12 + [1])
        silo = load_silo("va", settings.common)
        silo = dataclasses.replace(silo, train=Split(rows, labels))
        session = finished_session(settings.common, settings.own, silo)
        session.settings = dataclasses.replace(settings.common, standardise="site")
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
        (prototypes(size=63, c1=0.0), r"'prototype/1' .* it is \(63,\), not \(64,\)"),
        (prototypes(c1=float("inf")), "'prototype/1' .* non-finite"),
        (prototypes(c10=0.0), "'prototype/10' .* there are 10 classes"),
    ],
)
def test_a_prototype_that_cannot_be_one_stops_the_site(
    opened: Opened, received: Mapping[str, Any], fault: str
) -> None:
    with pytest.raises(SiteError, match=fault):
        answer(opened("fedproto", received))


def test_the_network_goes_on_from_the_sites_own_state(opened: Opened) -> None:
    assert issubclass(FedProtoSite, LocalSite)
    answer(opened("fedproto", round=1))
    kept = opened("fedproto", round=2).state()
    bias = network_of(opened("fedproto", prototypes(c1=0.0), round=2)).head[-1].bias
    assert torch.equal(cast(Tensor, bias), kept["head.4.bias"])
