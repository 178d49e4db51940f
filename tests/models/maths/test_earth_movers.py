"""Earth mover's closeness: hand-solved cases, and the three solvers against each other."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor

from fedsilo.core.errors import SettingError, SiteError
from fedsilo.models.maths import earth_movers
from fedsilo.models.maths.earth_movers import (
    CONSTANT,
    LARGEST_LAYER,
    SMOOTHING,
    Sinkhorn,
    closeness,
    cross_masses,
    optimal_flow,
    pooled_tokens,
    transport_cost,
    transport_costs,
)
from tests.support.errors import refuses


def _maps(seed: int, batch: int = 3, tokens: int = 9, channels: int = 5) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    u, v = torch.randn(2, batch, tokens, channels, generator=draw)
    return u, v


def _by_linprog(costs: Tensor, supply: Tensor, demand: Tensor) -> float:
    """Return the least cost of one transport (n, m)."""
    n, m = costs.shape
    rows = np.kron(np.eye(n), np.ones(m))
    columns = np.kron(np.ones(n), np.eye(m))
    found = linprog(
        costs.flatten().numpy(),
        A_eq=np.vstack([rows, columns]),
        b_eq=np.concatenate([supply.numpy(), demand.numpy()]),
        method="highs-ds",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    return float(found.fun)


def test_a_hand_solved_transport() -> None:
    costs = torch.tensor([[[0.0, 2.0], [1.0, 0.0]]])
    supply, demand = torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]])
    # 0.5 stays at each cost of 0 but for the quarter that row 0 has too much: 0.25 * 2
    expected = torch.tensor([[[0.5, 0.25], [0.0, 0.25]]], dtype=torch.float64)
    assert torch.equal(optimal_flow(costs, supply, demand), expected)
    assert transport_cost(costs, supply, demand).item() == pytest.approx(0.5)


def test_masses_by_hand() -> None:
    u = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]])
    v = torch.tensor([[[2.0, 0.0], [2.0, 0.0], [2.0, 3.0]]])  # mean (2, 1)
    own, other = cross_masses(u, v)
    raw = torch.tensor([2.001, 1.001, 0.001], dtype=torch.float64)
    torch.testing.assert_close(own[0], raw / raw.sum())
    raw = torch.tensor([0.001, 0.001, 1.001], dtype=torch.float64)  # mean(U) is (0, 1/3)
    torch.testing.assert_close(other[0], raw / raw.sum())


def test_costs_by_hand() -> None:
    u = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    v = torch.tensor([[[2.0, 0.0], [-3.0, 0.0], [1.0, 1.0]]])
    expected = torch.tensor([[[0.0, 2.0, 1 - 0.5**0.5], [1.0, 1.0, 1.0]]])
    torch.testing.assert_close(transport_costs(u, v), expected)


@given(st.integers(0, 10_000))
@settings(max_examples=25)
def test_a_map_is_nearest_to_itself_and_no_map_further_than_minus_one(seed: int) -> None:
    u, v = _maps(seed)
    torch.testing.assert_close(closeness(u, u), torch.ones(3, dtype=torch.float64))
    near = closeness(u, v)
    assert ((near <= 1) & (near >= -1)).all()
    assert closeness(u, -u).max() < 1


@given(st.integers(0, 10_000))
@settings(max_examples=25)
def test_the_order_of_tokens_does_not_matter(seed: int) -> None:
    u, v = _maps(seed)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(closeness(u, v), closeness(u[:, order], v), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(closeness(u, v), closeness(u, v[:, order]), rtol=1e-6, atol=1e-6)


@given(st.integers(0, 10_000), st.integers(1, 12))
@settings(max_examples=25)
def test_flows_have_their_margins_and_masses_sum_to_one(seed: int, tokens: int) -> None:
    u, v = _maps(seed, tokens=tokens)
    supply, demand = cross_masses(u, v)
    for masses in (supply, demand):
        assert (masses > 0).all()
        torch.testing.assert_close(masses.sum(dim=1), torch.ones(3, dtype=torch.float64))
    flow = optimal_flow(transport_costs(u, v), supply, demand)
    assert (flow >= 0).all()
    torch.testing.assert_close(flow.sum(dim=2), supply)
    torch.testing.assert_close(flow.sum(dim=1), demand)


@pytest.mark.parametrize("tokens", [2, 9, 25, 49])
def test_pot_solves_the_linear_program(tokens: int) -> None:
    u, v = _maps(tokens, tokens=tokens)
    costs, (supply, demand) = transport_costs(u, v).double(), cross_masses(u, v)
    flow = optimal_flow(costs, supply, demand)
    ours = (costs * flow).sum(dim=(1, 2))
    for row in range(3):
        exact = _by_linprog(costs[row], supply[row], demand[row])
        assert ours[row].item() == pytest.approx(exact, abs=1e-9)
    torch.testing.assert_close(transport_cost(costs, supply, demand), ours, rtol=0, atol=1e-9)


def test_cvxpylayers_agrees_within_its_smoothing() -> None:
    u, v = (part.double() for part in _maps(1, tokens=9))
    found = {}
    for solver in ("pot", "cvxpylayers"):
        own = u.clone().requires_grad_()
        value = closeness(own, v, solver, differentiable=True)
        value.sum().backward()
        assert own.grad is not None
        found[solver] = (value.detach(), own.grad)
    # |x|^2 is at most 1, so the smoothed optimum costs at most smoothing / 2 more than the exact
    gap = found["pot"][0] - found["cvxpylayers"][0]
    assert (gap.abs() <= SMOOTHING / 2 + 1e-4).all()  # the solver's own tolerance
    pot, layer = found["pot"][1], found["cvxpylayers"][1]
    assert (pot - layer).norm() < 0.1 * pot.norm()


def test_gradients_by_duals_are_those_of_finite_differences() -> None:
    u, v = (part.double() for part in _maps(5, batch=1, tokens=6))
    own = u.clone().requires_grad_()
    closeness(own, v, differentiable=True).sum().backward()
    assert own.grad is not None
    step = 1e-6
    for place in [(0, 0, 0), (0, 3, 2), (0, 5, 4)]:
        up, down = u.clone(), u.clone()
        up[place] += step
        down[place] -= step
        values = [closeness(x, v, differentiable=True).item() for x in (up, down)]
        assert own.grad[place].item() == pytest.approx(
            (values[0] - values[1]) / (2 * step), abs=1e-6
        )


def test_sinkhorn_is_near() -> None:
    u, v = _maps(2, tokens=25)
    torch.testing.assert_close(closeness(u, v, "sinkhorn"), closeness(u, v), rtol=0, atol=0.01)


@pytest.mark.parametrize("tokens", [9, 25])
def test_sinkhorns_marginals_and_gradients_are_within_their_tolerance(tokens: int) -> None:
    u, v = (part.double() for part in _maps(tokens, tokens=tokens))
    gradients = []
    for solver in ("pot", "sinkhorn"):
        own = u.clone().requires_grad_()
        closeness(own, v, solver, differentiable=True).sum().backward()
        assert own.grad is not None
        gradients.append(own.grad)
    exact, entropic = gradients
    assert (entropic - exact).norm() < 0.02 * exact.norm()
    supply, demand = cross_masses(u, v)
    flow = optimal_flow(transport_costs(u, v), supply, demand, "sinkhorn")
    assert (flow.sum(dim=2) - supply).norm(dim=1).max() <= CONSTANT.tolerance
    torch.testing.assert_close(flow.sum(dim=1), demand)


def test_sinkhorn_warns_if_it_misses_its_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earth_movers, "CONSTANT", Sinkhorn(0.002, 1e-6, steps=20))
    with pytest.warns(RuntimeWarning, match=r"off after 20 steps.* choose 'fedefm.emd-solver'"):
        closeness(*_maps(3), "sinkhorn")


def test_closeness_has_no_gradient_by_default() -> None:
    u, v = _maps(0)
    assert not closeness(u.requires_grad_(), v).requires_grad


def test_pooling_to_the_grid() -> None:
    maps = torch.arange(16.0).reshape(1, 4, 4, 1)
    means = pooled_tokens(maps, 2).flatten().tolist()
    assert means == [2.5, 4.5, 10.5, 12.5]
    assert pooled_tokens(maps, 7).shape == (1, 16, 1)  # a smaller map stays
    assert pooled_tokens(maps, 0).shape == (1, 16, 1)


def test_closeness_of_maps_that_cannot_be_compared_raises() -> None:
    u, v = _maps(0)
    with pytest.raises(SiteError, match="student and teacher"):
        closeness(u, v[:, :4])
    broken = v.clone()
    broken[0, 0, 0] = float("nan")
    with pytest.raises(SiteError, match="teacher contains non-finite values"):
        closeness(u, broken)
    large, other = _maps(0, tokens=LARGEST_LAYER + 1)
    with refuses(SettingError, 676, 34):
        closeness(large, other, "cvxpylayers")
