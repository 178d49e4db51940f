"""MATCHA: each round uses a few random matchings of a graph, so silos need few links at once.

Wang, Sahu, Yang, Joshi, Kar 2019, "MATCHA: Speeding up decentralized SGD via matching decomposition
sampling". Three steps: decompose the graph into matchings; choose their probabilities (the largest
algebraic connectivity within the budget); choose the step size (the smallest spectral norm in their
theorem's bound). Sites are numbers here, their positions among the sorted names.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
import torch
from numpy.typing import NDArray

from fedsilo.core.errors import SettingError
from fedsilo.core.seeding import generator

Edge = tuple[int, int]
Matrix = NDArray[np.float64]

# The second is for budgets just below 1, for which the solver does not reach the first
_ACCURACIES = (1e-9, 1e-7)
_DIGITS = 6  # the solver is exact to about 1e-8; further digits would differ between machines
_ENUMERATED = 12  # all 2^M subsets are enumerated for at most this many matchings
_DRAWN = 1000  # sampled rounds that replace all subsets for more matchings


@dataclass(frozen=True)
class Matcha:
    """A graph's matchings, the probability of each in a round, and the step size for mixing.

    A matching is a set of edges of which no two share a site.
    """

    size: int  # the number of sites
    # Edges (a, b), a < b; within a matching no two share a site, and all together are the graph
    matchings: tuple[tuple[Edge, ...], ...]
    probabilities: tuple[float, ...]  # the probability that a round uses each matching
    alpha: float  # the step size of W = I - alpha * (sum of the Laplacians in use)
    seed: int  # seeds the draws

    def active(self, round_: int) -> tuple[bool, ...]:
        """Return, for each matching, whether ``round_`` uses it.

        Each matching is drawn independently with its own probability. The draws depend only on the
        seed and the round.
        """
        rng = generator(self.seed, "matcha", round_)
        uniform = torch.rand(len(self.matchings), generator=rng, dtype=torch.float64).tolist()
        return tuple(value < p for value, p in zip(uniform, self.probabilities, strict=True))

    def matrix(self, active: Sequence[bool]) -> Matrix:
        """Return the mixing matrix (sites, sites) for the matchings that ``active`` selects.

        The matrix is I - step * (sum of the Laplacians of these matchings), and is doubly
        stochastic. The step is ``alpha``, but at most 1 / d, where d is the largest number of
        selected links at a site. A larger step would give that site's own model a negative weight.
        """
        total = np.zeros((self.size, self.size))
        for is_used, part in zip(active, laplacians(self.size, self.matchings), strict=True):
            if is_used:
                total = total + part
        # The diagonal of ``total`` holds each site's number of links, which are its largest entries
        step = min(self.alpha, 1 / max(1.0, total.max()))
        matrix: Matrix = np.eye(self.size) - step * total
        return matrix.clip(min=0.0)  # rounding makes 1 - (1 / n) * n negative for some n

    def cases(self) -> Iterator[tuple[float, tuple[bool, ...]]]:
        """Yield the possible choices of matchings in a round, as pairs (probability, choice).

        A choice has True for each matching that the round uses. A choice with probability 0 is left
        out. If there are more than 12 matchings, the draws of rounds 1 to 1000 are yielded instead,
        each with probability 1/1000. A choice may then occur more than once.
        """
        if len(self.matchings) > _ENUMERATED:
            for round_ in range(1, _DRAWN + 1):
                yield 1 / _DRAWN, self.active(round_)
            return
        for active in itertools.product((False, True), repeat=len(self.matchings)):
            # Matchings are drawn independently, so their probabilities multiply
            probability = 1.0
            for is_used, p in zip(active, self.probabilities, strict=True):
                if is_used:
                    probability *= p
                else:
                    probability *= 1 - p
            if probability > 0:
                yield probability, active

    def expected_matrix(self) -> Matrix:
        """Return the mean of the mixing matrix over ``cases``, (sites, sites)."""
        expected = np.zeros((self.size, self.size))
        for share, active in self.cases():
            expected = expected + share * self.matrix(active)
        return expected


def solve_matcha(graph: nx.Graph, budget: float, seed: int) -> Matcha:
    """Compute MATCHA's matchings, their probabilities and the step size for a graph.

    A matching is a set of edges that share no site. ``decompose`` splits the graph's edges into
    matchings. ``activation_probabilities`` gives each matching the probability that a round uses
    it. ``step_size`` finds the step size, with which a round's mixing makes the sites agree
    fastest.

    Args:
        graph: the links between sites, connected, with the nodes 0 to n - 1.
        budget: the mean share of matchings that a round uses, above 0 and at most 1.
        seed: the seed of each round's draws, which the result stores.

    Raises:
        SettingError: the budget is so small that some sites would never exchange models, or the
            solver found no optimum.
    """
    size = graph.number_of_nodes()
    matchings = decompose(graph)
    probabilities = activation_probabilities(size, matchings, budget)
    alpha = step_size(size, matchings, probabilities)
    return Matcha(size, matchings, probabilities, alpha, seed)


def laplacians(size: int, matchings: Sequence[Sequence[Edge]]) -> list[Matrix]:
    """Return the graph Laplacian of each matching, (size, size): degrees minus adjacency.

    No two edges of a matching may share a site, which is not checked. Each degree is then 0 or 1.

    Args:
        size: the number of sites.
        matchings: the edges of each matching, as pairs of sites' positions.
    """
    matrices = []
    for edges in matchings:
        laplacian = np.zeros((size, size))
        for a, b in edges:
            laplacian[a, a] = laplacian[b, b] = 1
            laplacian[a, b] = laplacian[b, a] = -1
        matrices.append(laplacian)
    return matrices


def decompose(graph: nx.Graph) -> tuple[tuple[Edge, ...], ...]:
    """Split ``graph`` into matchings by two heuristics, and return the result with fewer matchings.

    One heuristic colours the edges greedily, and the other removes matchings of maximum weight. If
    both find equally many, the result of the colouring is returned. A matching is a sorted tuple of
    edges (a, b) with a < b. Nodes must be numbers, so that all processes get the same result.
    """
    # Not for nodes that are strings, whose order in a set differs between processes
    matchings = min([_split_by_colour(graph), _split_by_matching(graph)], key=len)
    return tuple(tuple(sorted(edges)) for edges in matchings)


def _split_by_colour(graph: nx.Graph) -> list[list[Edge]]:
    """Split the edges into matchings by a greedy edge colouring.

    Edges of one colour share no site, so they form a matching. The edges (a, b) have a < b. There
    may be more matchings than the smallest possible number.
    """
    colours = nx.greedy_color(nx.line_graph(graph), strategy="largest_first", interchange=True)
    matchings: dict[int, list[Edge]] = {}
    for (a, b), colour in colours.items():
        matchings.setdefault(colour, []).append((min(a, b), max(a, b)))
    return [edges for _, edges in sorted(matchings.items())]


def _split_by_matching(graph: nx.Graph) -> list[list[Edge]]:
    """Split a graph's edges into matchings by removing maximum-weight matchings one after another.

    Edges at the sites of the largest remaining degree weigh most. Each matching therefore covers as
    many of these sites as possible, which keeps the number of matchings small. A graph without
    edges gives an empty list.
    """
    left = nx.Graph(graph.edges)
    matchings = []
    while left.number_of_edges():
        degrees = dict(left.degree)
        most = max(degrees.values())
        # A graph whose largest degree is d needs d or d + 1 matchings (Vizing)
        # Heavier than all other edges together, so that sites of the largest degree come first
        heavy = left.number_of_nodes() + 1
        for a, b in left.edges:
            left[a][b]["weight"] = 1 + heavy * ((degrees[a] == most) + (degrees[b] == most))
        matching = [(min(edge), max(edge)) for edge in nx.max_weight_matching(left)]
        matchings.append(matching)
        left.remove_edges_from(matching)
    return matchings


def activation_probabilities(
    size: int, matchings: Sequence[Sequence[Edge]], budget: float
) -> tuple[float, ...]:
    """Compute the probability that a round uses each of the M matchings, to 6 decimal places.

    With p_j the probability and L_j the Laplacian of matching j, the probabilities maximise
    lambda_2(sum p_j L_j), the second smallest eigenvalue. The constraints are sum p_j <= budget * M
    and 0 <= p_j <= 1.

    Args:
        size: the number of sites.
        matchings: the edges of each matching, as pairs of sites' positions.
        budget: the mean share of matchings that a round uses, above 0 and at most 1.

    Raises:
        SettingError: the budget is so small that some sites would never exchange models, or the
            solver found no optimum.
    """
    import cvxpy  # imported here, because it takes 1.2 s and other topologies do not need it

    basis = _disagreement_basis(size)
    parts = [_express_in(basis, part) for part in laplacians(size, matchings)]
    shares = cvxpy.Variable(len(matchings))  # p / budget, so that no variable is tiny
    connectivity = cvxpy.Variable()
    limits = [
        shares >= 0,
        shares <= 1 / budget,
        cvxpy.sum(shares) <= len(matchings),
        _weighted_sum(shares, parts) - connectivity * np.eye(size - 1) >> 0,
    ]
    _solve(cvxpy.Problem(cvxpy.Maximize(connectivity), limits))
    probabilities = _round_probabilities(budget * shares.value, budget * len(matchings))
    if algebraic_connectivity(size, matchings, probabilities) < 10.0**-_DIGITS:
        raise SettingError(
            f"'matcha.budget' is {budget:g}, so some silos would never meet: choose a larger budget"
        )
    return probabilities


def _round_probabilities(values: NDArray[np.float64], total: float) -> tuple[float, ...]:
    """Round probabilities to 6 decimal places in [0, 1], so that their sum is at most ``total``.

    If the rounded sum is above ``total``, the excess is subtracted from the largest probability.
    """
    rounded = np.clip(np.round(values, _DIGITS), 0.0, 1.0)
    # Rounded up to whole units of the last digit, so that the sum stays within the budget
    surplus = math.ceil(max(0.0, rounded.sum() - total - 1e-12) * 10**_DIGITS) / 10**_DIGITS
    largest = int(rounded.argmax())
    rounded[largest] = max(0.0, round(rounded[largest] - surplus, _DIGITS))
    return tuple(rounded.tolist())


def algebraic_connectivity(
    size: int, matchings: Sequence[Sequence[Edge]], probabilities: Sequence[float]
) -> float:
    """Return lambda_2, the second smallest eigenvalue of the expected Laplacian.

    The expected Laplacian is the sum of the matchings' Laplacians, each times its probability.
    lambda_2 is above 0 if and only if the matchings that can be drawn connect all sites.
    """
    expected = _weighted_sum(probabilities, laplacians(size, matchings))
    return float(np.linalg.eigvalsh(expected)[1])


def step_size(
    size: int, matchings: Sequence[Sequence[Edge]], probabilities: Sequence[float]
) -> float:
    """Compute alpha, the step size that makes sites agree fastest, to 6 decimal places.

    A round mixes models by I - alpha L, where L is the Laplacian of the links in use. A
    semidefinite program finds alpha and two other variables, beta and rho. It minimises rho subject
    to alpha^2 <= beta and I - 2 alpha E[L] + beta E[L^2] - J <= rho I, where J has 1 / n
    everywhere.

    Args:
        size: the number of sites, n.
        matchings: the edges of each matching.
        probabilities: the probability of each matching.

    Raises:
        SettingError: the solver found no optimum.
    """
    import cvxpy

    alpha, beta, gain = cvxpy.Variable(), cvxpy.Variable(), cvxpy.Variable()
    mean, square = _laplacian_moments(size, matchings, probabilities)
    # ``gain`` is 1 - rho in units of E[L]'s scale, because a small budget makes E[L] tiny
    basis, scale = _disagreement_basis(size), float(np.trace(mean)) / size
    mean, square = _express_in(basis, mean / scale), _express_in(basis, square / scale)
    limits = [
        cvxpy.square(alpha) <= beta,
        2 * alpha * mean - beta * square - gain * np.eye(size - 1) >> 0,
    ]
    _solve(cvxpy.Problem(cvxpy.Maximize(gain), limits))
    return round(float(alpha.value), _DIGITS)


def _laplacian_moments(
    size: int, matchings: Sequence[Sequence[Edge]], probabilities: Sequence[float]
) -> tuple[Matrix, Matrix]:
    """Return E[L] and E[L^2] of a round's Laplacian L, each (size, size).

    L is the sum of the Laplacians L_j of the matchings that the round draws. Matching j is drawn
    with probability p_j, independently of the others, and L_j^2 = 2 L_j. So E[L] = sum p_j L_j, and
    E[L^2] = E[L]^2 + 2 sum p_j (1 - p_j) L_j.

    Args:
        size: the number of sites.
        matchings: the edges of each matching.
        probabilities: p_j of each matching, in the same order.
    """
    parts = laplacians(size, matchings)
    # Var of a drawn matching is p (1 - p), and L^2 = 2 L gives the factor 2
    often = np.array(probabilities)
    mean = _weighted_sum(often, parts)
    return mean, mean @ mean + 2 * _weighted_sum(often * (1 - often), parts)


def _disagreement_basis(size: int) -> Matrix:
    """Return an orthonormal basis of the space orthogonal to the all-ones vector, (size, size - 1).

    Every Laplacian maps the all-ones vector to 0. Semidefinite programs are therefore solved in
    this space, where they have the interior point that solvers need.
    """
    return np.linalg.qr(np.ones((size, 1)), mode="complete").Q[:, 1:]


def _express_in(basis: Matrix, values: Matrix) -> Matrix:
    """Express a symmetric matrix in ``basis``: basis^T values basis, rounded to 12 decimal places.

    Rounding removes entries of about 1e-17.
    """
    return np.round(basis.T @ values @ basis, 12)


def _weighted_sum(weights: Any, parts: Sequence[Matrix]) -> Any:
    """Return the sum of weight * part. The weights are numbers or a solver's variables."""
    total = 0
    for index, part in enumerate(parts):
        total = total + weights[index] * part
    return total


def _solve(problem: Any) -> None:
    """Solve a semidefinite program, a ``cvxpy.Problem``, and store the optimum in its variables.

    The solver SCS first runs to an accuracy of 1e-9. If it finds no optimum, it runs to an accuracy
    of 1e-7.

    Raises:
        SettingError: the solver found no optimum with either accuracy.
    """
    from cvxpy.error import SolverError

    for accuracy in _ACCURACIES:
        try:
            # At the optimum, several eigenvalues are often equal, and interior-point solvers then
            # fail or warn
            problem.solve(solver="SCS", eps_abs=accuracy, eps_rel=accuracy, max_iters=200_000)
            ended = problem.status
        except SolverError:  # a budget close to 0 makes 1 / budget infinite
            ended = "failed"
        if ended == "optimal":
            return
    raise SettingError(
        f"topology 'matcha': the solver ended with '{ended}', choose another 'matcha.budget' "
        "or topology"
    )
