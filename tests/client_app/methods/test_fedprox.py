from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.fedprox import proximal
from fedsilo.models.contract.messages import ARRAYS
from tests.support.lab import answer, fitted

Opened = Callable[..., Lab]


def moved(opened: Opened, weights: dict[str, Any], method: str, **own: Any) -> float:
    """Return how far a round carries the parameters from the global ones."""
    site = opened(method, weights, own={"optimiser": "sgd", "learning_rate": 0.01, **own})
    reply = answer(site)[ARRAYS]
    parameters = dict(cast(nn.Module, site.open()).named_parameters())
    return sum(float(((reply[n].numpy() - weights[n]) ** 2).sum()) for n in parameters) ** 0.5


def test_the_penalty_is_nothing_before_a_step_and_more_after_it(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("fedprox", weights)
    network = method.open()
    penalty = proximal(network, 0.5)
    assert penalty().item() == 0
    fitted(method, network)
    assert penalty().item() > 0


def test_the_penalty_is_half_mu_times_the_squared_distance_from_what_came(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("fedprox", weights)
    network = method.open()
    penalty = proximal(network, 0.5)
    with torch.no_grad():
        bias = dict(cast(nn.Module, network).named_parameters())["head.4.bias"]
        bias += 2.0
    assert penalty().item() == pytest.approx(0.25 * 10 * 4, rel=1e-5)  # ten biases, each by 2


def test_batch_norms_running_figures_are_free_of_the_penalty(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("fedprox", weights)
    network = method.open()
    penalty = proximal(network, 0.5)
    buffers = dict(cast(nn.Module, network).named_buffers())
    running = [buffer for name, buffer in buffers.items() if "running_mean" in name]
    assert running
    for buffer in running:
        buffer += 5
    assert penalty().item() == 0


def test_a_large_mu_keeps_the_weights_near_the_global_ones(
    opened: Opened, weights: dict[str, Any]
) -> None:
    free = moved(opened, weights, "fedavg", local_epochs=10)
    little = moved(opened, weights, "fedprox", local_epochs=10, proximal_mu=1e-6)
    # a step of SGD takes back rate * mu = 0.9 of the way that is gone
    much = moved(opened, weights, "fedprox", local_epochs=10, proximal_mu=90.0)
    assert little == pytest.approx(free, rel=0.05)
    assert much < 0.5 * free


def test_a_mu_of_nearly_nothing_is_fedavg(opened: Opened, weights: dict[str, Any]) -> None:
    own = {"optimiser": "sgd", "learning_rate": 0.01}
    found = answer(opened("fedprox", weights, own={**own, "proximal_mu": 1e-12}))[ARRAYS]
    fedavg = answer(opened("fedavg", weights, own=own))[ARRAYS]
    assert set(found) == set(fedavg)
    for name in fedavg:
        np.testing.assert_allclose(found[name].numpy(), fedavg[name].numpy(), atol=1e-5)
