"""Earth mover's closeness of two feature maps (FedEFM, eq. 3; masses after DeepEMD, Zhang 2020).

Both maps are sets of tokens. The mass of a token is its relevance to the other map, and moving mass
costs c = 1 - cosine. The closeness is sum (1 - c) x over the flow x of least cost: 1 for equal
maps, and at least -1. The paper calls it a distance although it grows with similarity.
"""

import functools
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedsilo.core.errors import SettingError, SiteError

Solver = Literal["pot", "sinkhorn", "cvxpylayers"]
LARGEST_LAYER = 25  # the most tokens in a map for cvxpylayers
_LAYER_MS = 29.3  # ms per image of that many tokens, with gradients (docs/benchmarks.md)
# Weight of the quadratic term in cvxpylayers' objective. The flow sums to 1, so |x|^2 is at
# most 1 and the value at most half of this number off
SMOOTHING = 1e-3
_LEAST_MASS = 1e-3  # added to each token's mass before normalisation


@dataclass(frozen=True)
class Sinkhorn:
    """The regularisation and the stopping rule of Sinkhorn's iterations.

    Attributes:
        regularisation: weight of the entropy; towards 0 the flow approaches that of least cost.
        tolerance: the largest allowed norm of the errors in one image's marginals.
        steps: the most iterations.
    """

    regularisation: float
    tolerance: float
    steps: int


# A constant weight needs two digits only. A gradient is the flow itself, which is near the flow of
# least cost only at a tenth of the regularisation
CONSTANT = Sinkhorn(regularisation=0.02, tolerance=1e-4, steps=5_000)
EXACTING = Sinkhorn(regularisation=0.002, tolerance=1e-4, steps=50_000)


def pooled_tokens(maps: Tensor, side: int) -> Tensor:
    """Convert feature maps to tokens, row by row, and pool large maps first.

    Args:
        maps: the maps, (batch, rows, columns, channels).
        side: the most rows and columns after adaptive average pooling. Shorter sides keep their
            length. 0 means no pooling.

    Returns:
        The tokens, (batch, n, channels), one for each cell.
    """
    rows, columns = maps.shape[1:3]
    if side and max(rows, columns) > side:
        size = (min(rows, side), min(columns, side))
        # Pooling wants (batch, channels, rows, columns), hence the two permutations
        pooled = nn.functional.adaptive_avg_pool2d(maps.permute(0, 3, 1, 2), size)
        maps = pooled.permute(0, 2, 3, 1)
    return maps.flatten(1, 2)


def transport_costs(u: Tensor, v: Tensor) -> Tensor:
    """Compute the cost of moving mass between tokens, 1 - cosine, from 0 to 2.

    A token of zeros has cosine 0 with every token, so its cost is 1.

    Args:
        u: the tokens of one map, (batch, n, c).
        v: the tokens of the other map, (batch, m, c).

    Returns:
        The cost for each pair of tokens, (batch, n, m).
    """
    unit_u = nn.functional.normalize(u, dim=-1)
    unit_v = nn.functional.normalize(v, dim=-1)
    return 1 - unit_u @ unit_v.transpose(1, 2)


def cross_masses(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute each token's mass from its similarity to the other map's mean token.

    A token's relevance is its inner product with the other map's mean token, plus 0.001. Negative
    products are first raised to 0. The masses are the relevances of a map, scaled to sum to 1.

    Args:
        u: tokens of the first map, (batch, n, c).
        v: tokens of the second map, (batch, m, c).

    Returns:
        The masses of ``u`` (batch, n) and of ``v`` (batch, m), float64.
    """

    def masses(tokens: Tensor, others: Tensor) -> Tensor:
        products = torch.einsum("bnc,bc->bn", tokens, others.mean(dim=1))
        # Without the floor, the masses of two maps that are opposite on average would all be 0, and
        # the normalisation would be 0 / 0
        relevance = products.relu().double() + _LEAST_MASS
        return relevance / relevance.sum(dim=1, keepdim=True)

    return masses(u, v), masses(v, u)


def closeness(u: Tensor, v: Tensor, solver: str = "pot", *, differentiable: bool = False) -> Tensor:
    """Compute the earth mover's closeness of two maps, from -1 to 1, where equal maps have 1.

    Each token has a mass (``cross_masses``). Moving mass between two tokens costs 1 minus their
    cosine. The closeness is the sum of flow times cosine, for the flow of least total cost that
    moves one map's mass to the other map.

    Args:
        u: the student's tokens, (batch, n, channels).
        v: the teacher's tokens, (batch, n, channels).
        solver: ``pot`` is exact. ``sinkhorn`` adds an entropy term, and warns if it misses its
            tolerance. ``cvxpylayers`` adds a quadratic term, 0.0005 times the squared flow.
        differentiable: whether gradients reach u and v. It also lowers the weight of the entropy
            term from 0.02 to 0.002.

    Returns:
        The closeness, (batch,) float64.

    Raises:
        SettingError: a map has too many tokens for ``cvxpylayers`` (``refuse_large``).
        SiteError: the maps differ in shape, or values are not finite.
    """
    _check_maps(u, v)
    if solver == "cvxpylayers":
        refuse_large(u.shape[1])
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        own, other = u.float(), v.float()
        if differentiable:
            own, other = u.double(), v.double()
        costs = transport_costs(own, other).double()
        supply, demand = cross_masses(own, other)
        are_finite = costs.isfinite().all() and supply.isfinite().all() and demand.isfinite().all()
        if not are_finite:
            raise SiteError(
                "transport costs or masses contain non-finite values, because one of the compared "
                "models has diverged: lower 'train.learning-rate'"
            )
        if differentiable and solver != "cvxpylayers":
            # The flow sums to 1, so sum (1 - c) x is 1 - sum c x
            return 1 - transport_cost(costs, supply, demand, solver)
        return ((1 - costs) * optimal_flow(costs, supply, demand, solver)).sum(dim=(1, 2))


def optimal_flow(costs: Tensor, supply: Tensor, demand: Tensor, solver: str = "pot") -> Tensor:
    """Compute the flow of least cost between the tokens of two maps, for each image of a batch.

    A flow x (n, m) says how much mass moves from each token of the first map to each of the second.
    Its cost is the sum of ``costs`` * x.

    Args:
        costs: the cost of moving a unit of mass from one token to another, (batch, n, m).
        supply: the mass of each token in the first map, (batch, n). Row i of x sums to entry i.
        demand: the mass of each token in the second map, (batch, m). Column j of x sums to entry j.
            The caller must ensure that both maps have the same total mass.
        solver: ``pot`` is exact, and so is any unknown name. ``sinkhorn`` adds an entropy term of
            weight 0.02, and warns if it misses its tolerance. ``cvxpylayers`` adds 0.0005 |x|^2 to
            the cost.

    Returns:
        The flows, (batch, n, m) float64. Only the flows of ``cvxpylayers`` have gradients.
    """
    costs, supply, demand = costs.double(), supply.double(), demand.double()
    if solver == "sinkhorn":
        return _sinkhorn(costs, supply, demand, CONSTANT)[0]
    if solver == "cvxpylayers":
        return _smoothed_flow(costs, supply, demand)
    import ot

    flows = []
    # POT solves one image at a time, on the CPU
    images = zip(supply.detach().cpu(), demand.detach().cpu(), costs.detach().cpu(), strict=True)
    for a, b, cost in images:
        # ``cross_masses`` has normalised the masses. POT's own check would refuse totals that
        # differ in their last bits
        flow = ot.emd(a.numpy(), b.numpy(), cost.numpy(), check_marginals=False)
        flows.append(torch.from_numpy(flow))
    return torch.stack(flows).to(costs.device)


def transport_cost(costs: Tensor, supply: Tensor, demand: Tensor, solver: str = "pot") -> Tensor:
    """Compute the least cost of moving mass between two maps, with gradients, for each image.

    The gradients reach costs, supply and demand. Use ``optimal_flow`` where only the flow itself is
    needed.

    Args:
        costs: the cost of moving a unit of mass from one token to another, (batch, n, m).
        supply: the sum of each row of a flow, (batch, n).
        demand: the sum of each column, (batch, m), with the same total as ``supply``.
        solver: ``pot`` is exact. Every other name, not only ``sinkhorn``, selects Sinkhorn's method
            with an entropy term of weight 0.002.

    Returns:
        The costs, (batch,) float64.
    """
    costs, supply, demand = costs.double(), supply.double(), demand.double()
    if solver == "pot":
        import ot

        parts = zip(supply.cpu(), demand.cpu(), costs.cpu(), strict=True)
        values = [ot.emd2(a, b, cost, check_marginals=False) for a, b, cost in parts]
        return torch.stack(values).to(costs.device)
    flow, own, other = _sinkhorn(costs, supply, demand, EXACTING)
    # Envelope theorem: the flow is the gradient of the optimal value with respect to the costs, and
    # the potentials are the gradient with respect to the masses. So no gradient goes through
    # thousands of iterations
    by_masses = (own * supply).sum(dim=1) + (other * demand).sum(dim=1)
    # The second term is 0 in value and only adds the gradient for the masses
    return (costs * flow).sum(dim=(1, 2)) + (by_masses - by_masses.detach())


def _sinkhorn(
    costs: Tensor, supply: Tensor, demand: Tensor, rule: Sinkhorn
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve entropy-regularised optimal transport by Sinkhorn's iterations, without gradients.

    A RuntimeWarning says so if the row sums of any image's flow miss ``supply`` by more than the
    tolerance, in L2 norm. The flow is returned all the same.

    Args:
        costs: the cost of moving a unit of mass from one token to another, (batch, n, m) float64.
        supply: the sum of each row of a flow, (batch, n).
        demand: the sum of each column, (batch, m).
        rule: the weight of the entropy, the tolerance and the maximum number of iterations.

    Returns:
        The flow (batch, n, m), and the dual variables of supply (batch, n) and demand (batch, m).
    """
    import ot

    with torch.no_grad():
        # Logarithms are needed, because exp(-cost / 0.002) underflows even in float64. All images
        # are one batch on the tensors' device; the exact solver takes them one by one on the CPU
        solution = ot.solve_batch(
            costs,
            reg=rule.regularisation,
            a=supply,
            b=demand,
            method="log_sinkhorn",
            max_iter=rule.steps,
            tol=rule.tolerance,
            grad="detach",
        )
        flow: Tensor = solution.plan
        error = float((flow.sum(dim=2) - supply).norm(dim=1).max())
        if error > rule.tolerance:
            warnings.warn(
                f"sinkhorn's marginals are {error:.1g} off after {rule.steps} steps, more than "
                f"{rule.tolerance:g}, so the closeness is not reliable: choose "
                "'fedefm.emd-solver' 'pot'",
                RuntimeWarning,
                stacklevel=2,
            )
        own, other = solution.potentials
    return flow, rule.regularisation * own, rule.regularisation * other


def _smoothed_flow(costs: Tensor, supply: Tensor, demand: Tensor) -> Tensor:
    """Compute the flow of least cost by cvxpylayers, with gradients for all arguments.

    A term of 0.0005 |x|^2 is added to the cost of a flow x, because a linear program lacks usable
    gradients. The program is solved on the CPU.

    Args:
        costs: the cost of moving a unit of mass from one token to another, (batch, n, m).
        supply: the sum of each row of a flow, (batch, n).
        demand: the sum of each column, (batch, m). The last entry is not used, because all other
            sums determine it.

    Returns:
        The flows, (batch, n, m), on the device of ``costs``.
    """
    layer = _program(costs.shape[1], costs.shape[2])
    with warnings.catch_warnings():
        # The solver warns about the format of its own matrices
        warnings.simplefilter("ignore")
        (flow,) = layer(costs.cpu(), supply.cpu(), demand[:, :-1].cpu())
    placed: Tensor = flow.to(costs.device)
    return placed


@functools.lru_cache(maxsize=4)
def _program(rows: int, columns: int) -> Any:
    """Build the cvxpylayers layer that solves a smoothed transport problem.

    The layer minimises <c, x> + 0.0005 |x|^2 over flows x (rows, columns) without negative entries.
    The rows of a flow sum to the supply, and its columns to the demand. The layer takes the costs
    c, the supply and the demand. The demand comes without its last entry, which all other sums
    determine.
    """
    import cvxpy as cp
    from cvxpylayers.torch import CvxpyLayer

    flow = cp.Variable((rows, columns))
    costs = cp.Parameter((rows, columns))
    supply, demand = cp.Parameter(rows), cp.Parameter(columns - 1)
    # The last column's sum follows from all other sums, so it is left out. As a redundant
    # equation it would make the optimality conditions singular, and gradients are solved from them.
    # A linear objective would make them singular too: hence the smoothing
    limits = [flow >= 0, cp.sum(flow, axis=1) == supply, cp.sum(flow, axis=0)[:-1] == demand]
    objective = cp.sum(cp.multiply(costs, flow)) + SMOOTHING / 2 * cp.sum_squares(flow)
    problem = cp.Problem(cp.Minimize(objective), limits)
    return CvxpyLayer(problem, parameters=[costs, supply, demand], variables=[flow])


def _check_maps(u: Tensor, v: Tensor) -> None:
    """Check that the feature maps of student and teacher can be compared.

    Raises:
        SiteError: the maps differ in shape, are not (batch, n, c), or contain non-finite values.
    """
    if u.shape != v.shape or u.ndim != 3:
        raise SiteError(
            f"the feature maps of student and teacher are {tuple(u.shape)} and {tuple(v.shape)} "
            "(batch, tokens, channels), but must be equal: give all sites the same "
            "'network.name', 'network.width' and 'data.image-size'"
        )
    for who, tokens in (("student", u), ("teacher", v)):
        if not tokens.isfinite().all():
            raise SiteError(
                f"the feature map of the {who} contains non-finite values, because its training "
                "diverged: lower 'train.learning-rate'"
            )


def refuse_large(tokens: int) -> None:
    """Check that a map of ``tokens`` tokens is small enough for the solver cvxpylayers.

    Raises:
        SettingError: there are more than 25 tokens, so the solver would take too long. The message
            estimates the time per image, which grows with the fourth power of the number of tokens.
    """
    if tokens > LARGEST_LAYER:
        raise SettingError(
            f"solver 'cvxpylayers' is for maps of up to {LARGEST_LAYER} tokens, but this one has "
            f"{tokens}: its program would have {tokens**2} variables an image, and take about "
            f"{_LAYER_MS * (tokens / LARGEST_LAYER) ** 4:.0f} ms or more for each; choose "
            "'fedefm.emd-solver' 'pot', or a smaller 'fedefm.emd-grid'"
        )
