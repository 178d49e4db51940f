"""Earth mover's closeness of two feature maps (FedEFM, eq. 3; masses after DeepEMD, Zhang 2020).

Both maps are sets of tokens. A token's mass is its relevance to the other map, moving mass costs
1 - cosine, and the closeness is sum (1 - c) x over the flow x of least cost: 1 for equal maps, at
least -1. The paper calls it a distance although it grows with likeness.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsilo.models.contract.errors import SettingError, SiteError

SOLVERS = ("pot", "sinkhorn", "cvxpylayers")
LARGEST_LAYER = 25  # tokens of a map that cvxpylayers is given at most
_LAYER_MS = 29.3  # for one image of so many, with gradients (docs/benchmarks.md)
SMOOTHING = 1e-3  # of cvxpylayers' objective: the value is at most half of it off
_LEAST_MASS = 1e-3


@dataclass(frozen=True)
class Sinkhorn:
    """How far Sinkhorn's iterations go.

    Attributes:
        regularisation: entropic; the flow of least cost is reached as it goes to 0.
        tolerance: of the marginals, the largest length of an image's differences.
        steps: iterations at most.
    """

    regularisation: float
    tolerance: float
    steps: int


# A weight's second digit is enough where it is a constant; a gradient is one of the flow itself
CONSTANT = Sinkhorn(regularisation=0.02, tolerance=1e-4, steps=5_000)
EXACTING = Sinkhorn(regularisation=0.002, tolerance=1e-4, steps=50_000)


def pooled_tokens(maps: Tensor, side: int) -> Tensor:
    """Return the tokens (batch, n, channels) of maps (batch, rows, columns, channels).

    A side longer than ``side`` is average-pooled to it; 0 leaves the map as it is.
    """
    rows, columns = maps.shape[1:3]
    if side and max(rows, columns) > side:
        size = (min(rows, side), min(columns, side))
        pooled = nn.functional.adaptive_avg_pool2d(maps.permute(0, 3, 1, 2), size)
        maps = pooled.permute(0, 2, 3, 1)
    return maps.flatten(1, 2)


def transport_costs(u: Tensor, v: Tensor) -> Tensor:
    """Return c_pq = 1 - cosine(u_p, v_q), (batch, n, m), of tokens (batch, n, c) and (batch, m, c).

    A token of length 0 has cosine 0 with all others.
    """
    unit_u, unit_v = (nn.functional.normalize(tokens, dim=-1) for tokens in (u, v))
    return 1 - unit_u @ unit_v.transpose(1, 2)


def cross_masses(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the masses (batch, n) of ``u`` and (batch, m) of ``v``, float64, each summing to 1.

    They are relu(<u_p, mean(V)>) + 1e-3 and relu(<v_q, mean(U)>) + 1e-3, normalised.
    """

    def masses(tokens: Tensor, others: Tensor) -> Tensor:
        products = torch.einsum("bnc,bc->bn", tokens, others.mean(dim=1))
        relevance = products.relu().double() + _LEAST_MASS
        return relevance / relevance.sum(dim=1, keepdim=True)

    return masses(u, v), masses(v, u)


def closeness(u: Tensor, v: Tensor, solver: str = "pot", *, differentiable: bool = False) -> Tensor:
    """Return the earth mover's closeness (batch,) of two maps' tokens, float64.

    Args:
        u: (batch, n, channels), the demanders: the student's.
        v: (batch, n, channels), the suppliers: the teacher's.
        solver: ``pot`` exact; ``sinkhorn`` with entropic regularisation, 0.02 for a constant and
            0.002 for gradients, to a tolerance on the marginals, or with a ``RuntimeWarning``;
            ``cvxpylayers`` the linear program with quadratic smoothing, differentiated through its
            optimality conditions.
        differentiable: whether gradients reach u and v; with ``pot`` and ``sinkhorn`` they are
            those of the optimal value, from its dual variables. Without, the result is a constant
            (eq. 2 uses it so).

    Raises:
        SiteError: the maps differ in shape, hold values that are not finite, or are too large for
            ``cvxpylayers``.
    """
    _refuse_other_maps(u, v)
    if solver == "cvxpylayers":
        refuse_large(u.shape[1])
    if differentiable:
        return _closeness(u.double(), v.double(), solver, by_duals=True)
    with torch.no_grad():
        return _closeness(u.float(), v.float(), solver, by_duals=False)


def _closeness(u: Tensor, v: Tensor, solver: str, by_duals: bool) -> Tensor:
    costs = transport_costs(u, v)
    supply, demand = cross_masses(u, v)
    costs = costs.double()
    if solver in _COSTS and by_duals:
        return 1 - transport_cost(costs, supply, demand, solver)  # the flow sums to 1
    flow = optimal_flow(costs, supply, demand, solver)
    return ((1 - costs) * flow).sum(dim=(1, 2))


def optimal_flow(costs: Tensor, supply: Tensor, demand: Tensor, solver: str = "pot") -> Tensor:
    """Return the flow x (batch, n, m) of least cost, float64.

    Args:
        costs: (batch, n, m).
        supply: (batch, n), the row sums of x.
        demand: (batch, m), its column sums; of the same total.
        solver: see ``closeness``; only ``cvxpylayers``' flow has gradients.

    Raises:
        SiteError: masses are negative, all zero or of other totals, or values are not finite.
    """
    _refuse_masses(costs, supply, demand)
    solve: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "pot": _exact_flow,
        "sinkhorn": _entropic_flow,
        "cvxpylayers": _smoothed_flow,
    }
    return solve[solver](costs.double(), supply.double(), demand.double())


def transport_cost(costs: Tensor, supply: Tensor, demand: Tensor, solver: str = "pot") -> Tensor:
    """Return the least cost (batch,), float64, with gradients by the dual variables.

    Arguments and errors as ``optimal_flow``; solver ``pot`` or ``sinkhorn``.
    """
    _refuse_masses(costs, supply, demand)
    return _COSTS[solver](costs.double(), supply.double(), demand.double())


def _exact_cost(costs: Tensor, supply: Tensor, demand: Tensor) -> Tensor:
    import ot

    parts = (part.cpu() for part in (supply, demand, costs))
    values = [ot.emd2(a, b, cost, check_marginals=False) for a, b, cost in zip(*parts, strict=True)]
    return torch.stack(values).to(costs.device)


def _entropic_cost(costs: Tensor, supply: Tensor, demand: Tensor) -> Tensor:
    """Return <c, x> with the envelope's gradients: x for the costs, the potentials for masses."""
    flow, *potentials = _sinkhorn(costs, supply, demand, EXACTING)
    linear = (costs * flow).sum(dim=(1, 2))
    pairs = zip(potentials, (supply, demand), strict=True)
    of_masses = sum((potential * masses).sum(dim=1) for potential, masses in pairs)
    return linear + (of_masses - torch.as_tensor(of_masses).detach())


_COSTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "pot": _exact_cost,
    "sinkhorn": _entropic_cost,
}


def _exact_flow(costs: Tensor, supply: Tensor, demand: Tensor) -> Tensor:
    """Solve each image's program by POT's network simplex."""
    import ot

    parts = (part.detach().cpu().numpy() for part in (supply, demand, costs))
    flows = [
        torch.from_numpy(ot.emd(a, b, cost, check_marginals=False))
        for a, b, cost in zip(*parts, strict=True)
    ]
    return torch.stack(flows).to(costs.device)


def _entropic_flow(costs: Tensor, supply: Tensor, demand: Tensor) -> Tensor:
    return _sinkhorn(costs, supply, demand, CONSTANT)[0]


def _sinkhorn(
    costs: Tensor, supply: Tensor, demand: Tensor, how: Sinkhorn
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve all images at once, in logarithms, on the tensors' device.

    Returns the flow (batch, n, m) and the potentials (batch, n) and (batch, m), constants.
    """
    import ot

    with torch.no_grad():
        solution = ot.solve_batch(
            costs,
            reg=how.regularisation,
            a=supply,
            b=demand,
            method="log_sinkhorn",
            max_iter=how.steps,
            tol=how.tolerance,
            grad="detach",
        )
        flow: Tensor = solution.plan
        off = float((flow.sum(dim=2) - supply).norm(dim=1).max())
        if off > how.tolerance:
            warnings.warn(
                f"sinkhorn's marginals are {off:.1g} off after {how.steps} steps, more than "
                f"{how.tolerance:g}: its closeness is not to be relied on; choose "
                "'fedefm.emd-solver' 'pot'",
                RuntimeWarning,
                stacklevel=2,
            )
        own, other = (how.regularisation * scaling for scaling in solution.potentials)
    return flow, own, other


def _smoothed_flow(costs: Tensor, supply: Tensor, demand: Tensor) -> Tensor:
    refuse_large(max(costs.shape[1:]))
    layer = _program(costs.shape[1], costs.shape[2])
    device = costs.device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the solver's advice on matrix formats
        (flow,) = layer(*(part.cpu() for part in (costs, supply, demand[:, :-1])))
    placed: Tensor = flow.to(device)
    return placed


@functools.lru_cache(maxsize=4)
def _program(rows: int, columns: int) -> Any:
    """Return the layer that solves min <c, x> + smoothing/2 |x|^2 over flows."""
    import cvxpy as cp
    from cvxpylayers.torch import CvxpyLayer

    flow = cp.Variable((rows, columns))
    costs = cp.Parameter((rows, columns))
    supply, demand = cp.Parameter(rows), cp.Parameter(columns - 1)
    # One of all marginals follows from the others; a row too many would make the system singular
    limits = [flow >= 0, cp.sum(flow, axis=1) == supply, cp.sum(flow, axis=0)[:-1] == demand]
    objective = cp.sum(cp.multiply(costs, flow)) + SMOOTHING / 2 * cp.sum_squares(flow)
    problem = cp.Problem(cp.Minimize(objective), limits)
    return CvxpyLayer(problem, parameters=[costs, supply, demand], variables=[flow])


def _refuse_other_maps(u: Tensor, v: Tensor) -> None:
    if u.shape != v.shape or u.ndim != 3:
        raise SiteError(
            f"the feature maps of student and teacher are {tuple(u.shape)} and {tuple(v.shape)} "
            "(batch, tokens, channels): they must be of one network; give all sites the same "
            "'network', 'width' and 'image-size'"
        )
    for who, tokens in (("student", u), ("teacher", v)):
        if not tokens.isfinite().all():
            raise SiteError(
                f"the feature map of the {who} holds values that are not finite: its training "
                "diverged; lower 'learning-rate'"
            )


def refuse_large(tokens: int) -> None:
    """Refuse a map that cvxpylayers would take seconds for, by a ``SettingError``."""
    if tokens > LARGEST_LAYER:
        raise SettingError(
            f"solver 'cvxpylayers' is for maps of up to {LARGEST_LAYER} tokens, and this one has "
            f"{tokens}: its program would have {tokens**2} variables an image, and take about "
            f"{_LAYER_MS * (tokens / LARGEST_LAYER) ** 4:.0f} ms or more for each; choose "
            "'fedefm.emd-solver' 'pot', or a smaller 'fedefm.emd-grid'"
        )


def _refuse_masses(costs: Tensor, supply: Tensor, demand: Tensor) -> None:
    if not all(part.isfinite().all() for part in (costs, supply, demand)):
        raise SiteError(
            "transport costs or masses hold values that are not finite: what is compared has "
            "diverged; lower 'learning-rate'"
        )
    for name, masses in (("supply", supply), ("demand", demand)):
        if (masses < 0).any():
            raise SiteError(f"the {name} of a transport has negative masses")
        if (masses.sum(dim=1) <= 0).any():
            raise SiteError(f"the {name} of a transport is zero everywhere: there is none to move")
    if not torch.allclose(supply.sum(dim=1).double(), demand.sum(dim=1).double(), atol=1e-6):
        raise SiteError("supply and demand of a transport differ in their totals")
