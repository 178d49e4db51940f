import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import pytest
import torch

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.feddistill import FedDistillSite
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import ARRAYS, METRICS
from fedsilo.models.networks.site_network import TokenClassifier
from tests.support.lab import answer, steps_of

Opened = Callable[..., Lab]


def logits(size: int = 10, **values: float) -> dict[str, Any]:
    """Return logits of one value each, by class: c3=0.5."""
    return {
        f"logits/{name[1:]}": np.full(size, value, np.float32) for name, value in values.items()
    }


def network_of(site: FedDistillSite) -> TokenClassifier:
    return cast(TokenClassifier, site.open())


@pytest.fixture
def vit(tiny: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of a small prompted ViT."""
    wanted = ("network.name", "vit.backbone", "vit.prompt-length", "vit.basic-layers")
    return {k: v for k, v in tiny("fedevprompt").items() if k.startswith(wanted)}


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
        (logits(size=9, c1=0.0), r"'logits/1' .* it is \(9,\), not \(10,\)"),
        (logits(c1=float("nan")), "'logits/1' .* non-finite"),
        (logits(c10=0.0), "'logits/10' .* there are 10 classes"),
    ],
)
def test_logits_that_cannot_be_some_stop_the_site(
    opened: Opened, received: Mapping[str, Any], fault: str
) -> None:
    with pytest.raises(SiteError, match=fault):
        answer(opened("feddistill", received))
