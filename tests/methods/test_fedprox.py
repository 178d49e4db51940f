"""Tests of the method 'fedprox': equations, site and server."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Context
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedsilo.client_app.methods.fedprox import proximal
from fedsilo.client_app.session import SiteSession
from fedsilo.core.errors import RefusedError, SettingError
from fedsilo.core.messages import ARRAYS
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.core.settings_schema import build
from fedsilo.models.methods.fedprox import FedProxSettings, proximal_term
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedavg import FedAvg
from tests.support.asking import arrays_expected, state_after
from tests.support.errors import refuses
from tests.support.lab import answer, fitted
from tests.support.methods import Opened

# The equations


def test_the_proximal_term_is_half_mu_times_the_squared_distance_over_all_tensors() -> None:
    weights = [torch.tensor([[1.0, 2.0]]), torch.tensor([5.0])]
    anchors = [torch.tensor([[0.0, 4.0]]), torch.tensor([2.0])]
    # 1 + 4 + 9 = 14, of which mu / 2 = 0.25
    assert proximal_term(0.5, weights, anchors).item() == pytest.approx(3.5)


def test_its_gradient_pulls_each_weight_back_by_mu_times_its_distance() -> None:
    weight = torch.tensor([3.0, -1.0], requires_grad=True)
    anchor = torch.tensor([1.0, 0.0], requires_grad=True)
    proximal_term(0.5, [weight], [anchor.detach()]).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, -0.5]
    assert anchor.grad is None


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=5), st.floats(1e-3, 10))
def test_at_the_global_weights_it_is_nothing_and_elsewhere_it_is_more(
    values: list[float], mu: float
) -> None:
    weights = [torch.tensor(values)]
    assert proximal_term(mu, weights, [weights[0].clone()]).item() == 0
    assert proximal_term(mu, weights, [weights[0] + 1]).item() > 0


def test_weights_without_their_anchors_are_an_error_of_ours() -> None:
    with pytest.raises(ValueError, match="zip"):
        proximal_term(1.0, [torch.zeros(1), torch.zeros(1)], [torch.zeros(1)])


@pytest.mark.parametrize("mu", [0.0, 0, -0.1, float("nan")])
def test_no_mu_at_all_is_fedavg_and_refused(mu: float) -> None:
    with refuses(SettingError, "fedprox.proximal-mu", "0"):
        build(FedProxSettings, {"fedprox.proximal-mu": mu})


def test_mu_is_a_hundredth_unless_it_is_set() -> None:
    assert build(FedProxSettings, {}).proximal_mu == 0.01
    assert build(FedProxSettings, {"fedprox.proximal-mu": 1}).proximal_mu == 1.0


# At a site


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


def test_batch_norms_running_metrics_are_free_of_the_penalty(
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
    free = moved(opened, weights, "fedavg", local_steps=12)
    little = moved(opened, weights, "fedprox", local_steps=12, proximal_mu=1e-6)
    # a step of SGD takes back rate * mu = 0.9 of the way that is gone
    much = moved(opened, weights, "fedprox", local_steps=12, proximal_mu=90.0)
    assert little == pytest.approx(free, rel=0.05)
    assert much < 0.5 * free


def test_a_mu_of_nearly_nothing_is_fedavg(opened: Opened, weights: dict[str, Any]) -> None:
    own = {"optimiser": "sgd", "learning_rate": 0.01}
    found = answer(opened("fedprox", weights, own={**own, "proximal_mu": 1e-12}))[ARRAYS]
    fedavg = answer(opened("fedavg", weights, own=own))[ARRAYS]
    assert set(found) == set(fedavg)
    for name in fedavg:
        np.testing.assert_allclose(found[name].numpy(), fedavg[name].numpy(), atol=1e-5)


def test_a_mu_by_which_each_step_cancels_those_before_is_refused_at_a_hospital(
    context: Callable[..., Context],
) -> None:
    sgd = {"optimiser": "sgd", "learning_rate": 0.01}
    for mu in (0.01, 1.0):
        SiteSession.from_context(context({"site": "s1a"}, "fedprox", proximal_mu=mu, **sgd))
    # a step goes back rate * mu = 1, which is the whole way that is gone
    with refuses(RefusedError, "minimum-steps-per-reply"):
        SiteSession.from_context(context({"site": "s1a"}, "fedprox", proximal_mu=100.0, **sgd))


# At the server

Run = Callable[..., tuple[Any, FedAvg]]


def test_the_server_does_what_fedavgs_does(
    participants: Participants, site_reply: Callable[..., Any]
) -> None:
    common = CommonSettings(silos=3, width=1)
    prox, fedavg = (
        FedAvg(common, FedProxSettings(), participants),
        FedAvg(common, NoSettings(), participants),
    )
    before = prox.initial_state()
    names = list(before.arrays)
    for name, array in fedavg.initial_state().arrays.items():
        np.testing.assert_array_equal(before.arrays[name], array)
    assert (
        arrays_expected(prox, before, "train")["s1a"]
        == arrays_expected(fedavg, before, "train")["s1a"]
    )
    replies = {
        site: site_reply(
            site,
            {name: np.full_like(before.arrays[name], value) for name in names},
            num_examples=count,
        )
        for site, value, count in (("s1a", 2, 1), ("s2a", 6, 3))
    }
    after = state_after(prox, before, replies, "train").arrays
    assert all((after[name] == 5).all() for name in names)
