"""Earth mover's closeness of two feature maps (FedEFM, eq. 3; masses after DeepEMD, Zhang 2020).

Both maps are sets of tokens. A token's mass is its relevance to the other map, moving mass costs
1 - cosine, and the closeness is sum (1 - c) x over the flow x of least cost: 1 for equal maps, at
least -1. The paper calls it a distance although it grows with similarity.
"""

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsilo.models.contract.errors import SettingError, SiteError

SOLVERS = ("pot", "sinkhorn", "cvxpylayers")
LARGEST_LAYER = 25  # the most tokens of a map that cvxpylayers is given
_LAYER_MS = 29.3  # of one image with that many, with gradients (docs/benchmarks.md)
SMOOTHING = 1e-3  # of cvxpylayers' objective: the value is at most half of it off
_LEAST_MASS = 1e-3


@dataclass(frozen=True)
class Sinkhorn:
    """When Sinkhorn's iterations end."""

    regularisation: float  # entropic; as it goes to 0 the flow goes to that of least cost
    tolerance: float  # the largest norm of an image's marginal errors
    steps: int  # the most iterations


# Two digits are enough for a constant weight; a gradient is the flow itself, which is near that of
# least cost only at a tenth of the regularisation
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

    A zero token has cosine 0 with all others.
    """
    unit_u, unit_v = (nn.functional.normalize(tokens, dim=-1) for tokens in (u, v))
    return 1 - unit_u @ unit_v.transpose(1, 2)


def cross_masses(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the masses (batch, n) of ``u`` and (batch, m) of ``v``, float64, each summing to 1.

    They are relu(<u_p, mean(V)>) + 1e-3 and relu(<v_q, mean(U)>) + 1e-3, normalised.
    """

    def masses(tokens: Tensor, others: Tensor) -> Tensor:
        products = torch.einsum("bnc,bc->bn", tokens, others.mean(dim=1))
        # Without the floor, maps that are opposite on average would have no mass to move at all
        relevance = products.relu().double() + _LEAST_MASS
        return relevance / relevance.sum(dim=1, keepdim=True)

    return masses(u, v), masses(v, u)


def closeness(u: Tensor, v: Tensor, solver: str = "pot", *, differentiable: bool = False) -> Tensor:
    """Return the earth mover's closeness (batch,) of two maps' tokens, float64.

    Args:
        u: (batch, n, channels), the demanders: the student's.
        v: (batch, n, channels), the suppliers: the teacher's.
        solver: ``pot`` is exact. ``sinkhorn`` has entropic regularisation, 0.02 for a constant and
            0.002 for gradients, and warns if it misses its tolerance. ``cvxpylayers`` solves the
            linear program with quadratic smoothing.
        differentiable: whether gradients reach u and v. They are those of the optimal value, from
            its dual variables; cvxpylayers' go through its optimality conditions. Otherwise the
            result is a constant, as eq. 2 uses it.

    Raises:
        SettingError: the maps are too large for ``cvxpylayers``.
        SiteError: the maps differ in shape, or values are not finite.
    """
    _check_maps(u, v)
    if solver == "cvxpylayers":
        refuse_large(u.shape[1])
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        own, other = (u.double(), v.double()) if differentiable else (u.float(), v.float())
        costs, (supply, demand) = transport_costs(own, other).double(), cross_masses(own, other)
        if not all(part.isfinite().all() for part in (costs, supply, demand)):
            raise SiteError(
                "transport costs or masses contain non-finite values: what is compared has "
                "diverged; lower 'learning-rate'"
            )
        if differentiable and solver != "cvxpylayers":
            return 1 - transport_cost(costs, supply, demand, solver)  # the flow sums to 1
        return ((1 - costs) * optimal_flow(costs, supply, demand, solver)).sum(dim=(1, 2))


def optimal_flow(costs: Tensor, supply: Tensor, demand: Tensor, solver: str = "pot") -> Tensor:
    """Return the flow x (batch, n, m) of least cost, float64; for solvers see ``closeness``.

    Its row sums are ``supply`` (batch, n), its column sums ``demand`` (batch, m), of equal totals.
    Only ``cvxpylayers``' flow has gradients.
    """
    costs, supply, demand = costs.double(), supply.double(), demand.double()
    if solver == "sinkhorn":
        return _sinkhorn(costs, supply, demand, CONSTANT)[0]
    if solver == "cvxpylayers":
        return _smoothed_flow(costs, supply, demand)
    import ot

    parts = (part.detach().cpu().numpy() for part in (supply, demand, costs))
    # Masses are normalised by ``cross_masses``: POT need not check their totals again
    flows = [ot.emd(a, b, cost, check_marginals=False) for a, b, cost in zip(*parts, strict=True)]
    return torch.stack([torch.from_numpy(flow) for flow in flows]).to(costs.device)


def transport_cost(costs: Tensor, supply: Tensor, demand: Tensor, solver: str = "pot") -> Tensor:
    """Return the least cost (batch,), float64, with gradients by the dual variables.

    Arguments as for ``optimal_flow``; the solver is ``pot`` or ``sinkhorn``.
    """
    costs, supply, demand = costs.double(), supply.double(), demand.double()
    if solver == "pot":
        import ot

        parts = zip(supply.cpu(), demand.cpu(), costs.cpu(), strict=True)
        values = [ot.emd2(a, b, cost, check_marginals=False) for a, b, cost in parts]
        return torch.stack(values).to(costs.device)
    flow, own, other = _sinkhorn(costs, supply, demand, EXACTING)
    # By the envelope theorem the gradient of the optimal value is the flow for the costs, and the
    # potentials for the masses: no gradient goes through the thousands of iterations
    by_masses = (own * supply).sum(dim=1) + (other * demand).sum(dim=1)
    return (costs * flow).sum(dim=(1, 2)) + (by_masses - by_masses.detach())


def _sinkhorn(
    costs: Tensor, supply: Tensor, demand: Tensor, how: Sinkhorn
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the flow (batch, n, m) and the potentials (batch, n) and (batch, m), constants."""
    import ot

    with torch.no_grad():
        # In logarithms: exp(-cost / 0.002) underflows even float64. All images in one batch, on the
        # tensors' device, where the exact solver goes through them one by one on the CPU
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
        error = float((flow.sum(dim=2) - supply).norm(dim=1).max())
        if error > how.tolerance:
            warnings.warn(
                f"sinkhorn's marginals are {error:.1g} off after {how.steps} steps, more than "
                f"{how.tolerance:g}: its closeness is not to be relied on; choose "
                "'fedefm.emd-solver' 'pot'",
                RuntimeWarning,
                stacklevel=2,
            )
        own, other = (how.regularisation * scaling for scaling in solution.potentials)
    return flow, own, other


def _smoothed_flow(costs: Tensor, supply: Tensor, demand: Tensor) -> Tensor:
    layer = _program(costs.shape[1], costs.shape[2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the solver's advice on matrix formats
        (flow,) = layer(*(part.cpu() for part in (costs, supply, demand[:, :-1])))
    placed: Tensor = flow.to(costs.device)
    return placed


@functools.lru_cache(maxsize=4)
def _program(rows: int, columns: int) -> Any:
    """Return the layer that solves min <c, x> + smoothing/2 |x|^2 over flows."""
    import cvxpy as cp
    from cvxpylayers.torch import CvxpyLayer

    flow = cp.Variable((rows, columns))
    costs = cp.Parameter((rows, columns))
    supply, demand = cp.Parameter(rows), cp.Parameter(columns - 1)
    # One marginal follows from all others; a redundant row would make the optimality conditions,
    # which gradients are solved from, singular. So would a linear objective: hence the smoothing
    limits = [flow >= 0, cp.sum(flow, axis=1) == supply, cp.sum(flow, axis=0)[:-1] == demand]
    objective = cp.sum(cp.multiply(costs, flow)) + SMOOTHING / 2 * cp.sum_squares(flow)
    problem = cp.Problem(cp.Minimize(objective), limits)
    return CvxpyLayer(problem, parameters=[costs, supply, demand], variables=[flow])


def _check_maps(u: Tensor, v: Tensor) -> None:
    if u.shape != v.shape or u.ndim != 3:
        raise SiteError(
            f"the feature maps of student and teacher are {tuple(u.shape)} and {tuple(v.shape)} "
            "(batch, tokens, channels): they must be of one network; give all sites the same "
            "'network', 'width' and 'image-size'"
        )
    for who, tokens in (("student", u), ("teacher", v)):
        if not tokens.isfinite().all():
            raise SiteError(
                f"the feature map of the {who} contains non-finite values: its training "
                "diverged; lower 'learning-rate'"
            )


def refuse_large(tokens: int) -> None:
    """Raise a ``SettingError`` for a map that cvxpylayers would need seconds for."""
    if tokens > LARGEST_LAYER:
        raise SettingError(
            f"solver 'cvxpylayers' is for maps of up to {LARGEST_LAYER} tokens, and this one has "
            f"{tokens}: its program would have {tokens**2} variables an image, and take about "
            f"{_LAYER_MS * (tokens / LARGEST_LAYER) ** 4:.0f} ms or more for each; choose "
            "'fedefm.emd-solver' 'pot', or a smaller 'fedefm.emd-grid'"
        )
