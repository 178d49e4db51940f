from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from fedsilo.client_app.lab import Lab
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import ARRAYS
from fedsilo.models.networks.site_network import batch_norms, last_layers
from tests.support.lab import answer

Opened = Callable[..., Lab]
HEAD = ["head.4.bias", "head.4.weight"]
SGD = {"optimiser": "sgd", "learning_rate": 0.05, "dropout": 0.0}


def without(weights: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: array for name, array in weights.items() if name not in names}


def arrays_of(lab: Lab) -> dict[str, Any]:
    return {name: array.numpy() for name, array in answer(lab)[ARRAYS].items()}


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
def test_the_last_layer_stays_and_the_next_round_begins_with_it(
    method: str, opened: Opened, weights: dict[str, Any]
) -> None:
    shared = without(weights, HEAD)
    sent = arrays_of(opened(method, shared, own=SGD))
    assert sent.keys() == shared.keys()
    second = opened(method, shared, own=SGD, round=2)
    kept = second.state()
    assert sorted(kept) == HEAD
    assert (kept["head.4.bias"].numpy() != weights["head.4.bias"]).any()
    network = dict(second.open().named_parameters())
    assert torch.equal(network["head.4.bias"].detach(), kept["head.4.bias"])
    np.testing.assert_array_equal(network["head.1.bias"].detach(), weights["head.1.bias"])


def test_fedper_trains_both_parts_as_fedavg_does(opened: Opened, weights: dict[str, Any]) -> None:
    sent = arrays_of(opened("fedper", without(weights, HEAD), own=SGD))
    fedavg = arrays_of(opened("fedavg", weights, own=SGD))
    for name, array in sent.items():
        np.testing.assert_array_equal(array, fedavg[name])


def test_personal_layers_counts_layers_with_weights_from_the_end(
    opened: Opened, weights: dict[str, Any]
) -> None:
    network = opened("fedavg", weights).open()
    assert last_layers(network, 1) == HEAD
    assert last_layers(network, 2) == ["head.1.bias", "head.1.weight", *HEAD]


def test_batch_norms_with_their_statistics_stay_with_fedbn(
    opened: Opened, weights: dict[str, Any]
) -> None:
    norms = batch_norms(opened("fedavg", weights).open())
    assert {name.rpartition(".")[2] for name in norms} == {
        *("weight", "bias", "running_mean", "running_var")
    }
    sent = arrays_of(opened("fedbn", without(weights, norms), own=SGD))
    assert not set(sent) & set(norms)
    assert sorted(opened("fedbn", sent, own=SGD, round=2).state()) == sorted(norms)


def test_the_part_that_stays_starts_from_what_the_user_names(
    opened: Opened, weights: dict[str, Any]
) -> None:
    start = {f"start/{name}": np.full_like(weights[name], 0.25) for name in weights}
    network = opened("fedper", without(weights, HEAD) | start).open()
    found = network.state_dict()
    assert (found["head.4.bias"] == 0.25).all()
    np.testing.assert_array_equal(found["head.1.bias"], weights["head.1.bias"])


def test_fedrep_trains_the_head_and_then_the_rest(opened: Opened, weights: dict[str, Any]) -> None:
    lab = opened("fedrep", without(weights, HEAD), own={**SGD, "local_steps": 5, "head_share": 0.5})
    trained: list[tuple[int, set[str], tuple[str, ...]]] = []
    fit = lab.fit

    def spied(network: Any, **options: Any) -> None:
        names = {name for name, p in network.named_parameters() if p.requires_grad}
        before = {name: p.detach().clone() for name, p in network.named_parameters()}
        fit(network, **options)
        moved = {n for n, p in network.named_parameters() if not torch.equal(p, before[n])}
        assert moved <= names
        trained.append((options["steps"], names, options["aside"]))

    lab.fit = spied  # type: ignore[method-assign]
    answer(lab)
    assert [(steps, aside) for steps, _, aside in trained] == [(2, ("head",)), (3, ())]
    assert trained[0][1] == set(HEAD)
    assert not trained[1][1] & set(HEAD)


def test_fedrep_of_a_single_step_is_refused_in_a_line(
    opened: Opened, weights: dict[str, Any]
) -> None:
    lab = opened("fedrep", without(weights, HEAD), own={"batch_size": 64, "local_epochs": 1})
    with pytest.raises(SiteError, match="site s1a takes 1 step a round") as error:
        answer(lab)
    assert "\n" not in str(error.value)
