from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from fedsilo.client_app.lab import Lab
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import ARRAYS, METRICS, Instruction
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.mixture import Mixture, expert_array
from fedsilo.models.networks.site_network import TokenClassifier, load_exchanged
from tests.support.lab import answer, evaluate

Opened = Callable[..., Lab]
ODDS = {"s1a": 0.0, "s2a": 4.0, "s3a": 8.0}  # what is added to the last bias of each expert


@pytest.fixture
def experts(weights: dict[str, Any]) -> dict[str, Any]:
    """Return what the server sends at the end: each site's expert, which prefers class 0."""
    first = np.eye(10, dtype=np.float32)[0]
    return {
        expert_array(site, name): array + (odds * first if name == "head.4.bias" else 0)
        for site, odds in ODDS.items()
        for name, array in weights.items()
    }


def test_a_site_trains_alone_as_local_does(opened: Opened) -> None:
    reply = answer(opened("ensemble", returns=False))
    alone = answer(opened("local"))
    assert ARRAYS not in reply
    for key in ("incoming.test.loss", "trained.train.loss", "trained.val.entropy"):
        assert reply[METRICS][key] == alone[METRICS][key]


def test_a_site_goes_on_from_its_own_model(opened: Opened) -> None:
    first = opened("ensemble", returns=False)
    assert answer(first)[METRICS]["kept-state"] == 1
    kept = first.state_files.before(Instruction(2, "train"))
    assert kept is not None
    network = cast(TokenClassifier, opened("ensemble", round=2, returns=False).open())
    assert torch.equal(network.state_dict()["head.4.bias"], kept["head.4.bias"])


def test_the_model_leaves_the_site_when_it_is_asked_for(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("ensemble")
    reply = answer(method)
    assert set(reply[ARRAYS]) == set(weights)
    kept = method.state_files.before(Instruction(2, "train"))
    assert kept is not None
    for name, array in reply[ARRAYS].items():
        np.testing.assert_array_equal(array.numpy(), kept[name])


def test_the_ensemble_is_the_mean_of_the_experts_probabilities(
    opened: Opened, experts: dict[str, Any], weights: dict[str, Any]
) -> None:
    method = opened("ensemble", experts, phase="evaluate")
    network = cast(Mixture, method.open()).eval()
    inputs = method.silo.test.inputs
    alone = build_classifier(method.common, method.silo.task).eval()
    load_exchanged(alone, {name: torch.from_numpy(array) for name, array in weights.items()})
    with torch.no_grad():
        logits = alone(inputs)
        said = []
        for odds in ODDS.values():
            raised = logits.clone()
            raised[:, 0] += odds
            said.append(torch.softmax(raised, dim=1))
        found = network(inputs).exp()
    assert torch.allclose(found, sum(said) / 3, atol=1e-6)  # type: ignore[arg-type]  # three
    assert network.sites == ["s1a", "s2a", "s3a"]


def test_the_ensemble_is_measured_at_the_end_and_nothing_is_stored(
    opened: Opened, experts: dict[str, Any]
) -> None:
    method = opened("ensemble", experts, phase="evaluate", own={"mc_passes": 0})
    found = evaluate(method)
    labels, inputs = method.silo.test.labels, method.silo.test.inputs
    with torch.no_grad():
        logs = cast(Mixture, method.open()).eval()(inputs)
    expected = -logs[torch.arange(len(labels)), labels].mean().item()
    assert found[METRICS]["incoming.test.loss"] == pytest.approx(expected, rel=1e-4)
    assert found[METRICS]["kept-state"] == 0
    assert not method.state_files.folder.exists()


def test_an_ensemble_of_one_is_that_expert(opened: Opened, weights: dict[str, Any]) -> None:
    one = {expert_array("s1a", name): array for name, array in weights.items()}
    own = {"mc_passes": 0}
    found = evaluate(opened("ensemble", one, phase="evaluate", own=own))[METRICS]
    alone = evaluate(opened("fedavg", weights, phase="evaluate", own=own))[METRICS]
    for key in ("accuracy", "loss", "entropy"):
        assert found[f"incoming.test.{key}"] == pytest.approx(alone[f"incoming.test.{key}"])


def test_an_expert_that_does_not_fit_is_refused(opened: Opened, experts: dict[str, Any]) -> None:
    del experts[expert_array("s2a", "head.4.bias")]
    with pytest.raises(SettingError, match=r"missing \['head.4.bias'\]"):
        evaluate(opened("ensemble", experts, phase="evaluate"))
