from types import SimpleNamespace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.core.errors import SettingError
from fedsilo.strategies.topology.matcha import (
    Matcha,
    _round_probabilities,
    _solve,
    activation_probabilities,
    algebraic_connectivity,
    decompose,
    laplacians,
    solve_matcha,
    step_size,
)
from tests.support.errors import refuses

BARBELL = nx.barbell_graph(4, 1)  # two cliques of 4 on either side of a site


@st.composite
def connected_graphs(draw: st.DrawFn) -> nx.Graph:
    """A random tree with some edges more."""
    size = draw(st.integers(2, 9))
    graph = nx.Graph((draw(st.integers(0, node - 1)), node) for node in range(1, size))
    more = draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1))))
    graph.add_edges_from((a, b) for a, b in more if a != b)
    return graph


def remaining(matcha: Matcha, alpha: float) -> float:
    """Return rho at ``alpha``: the largest eigenvalue of E[W'W] - J, from all subsets."""
    parts = laplacians(matcha.size, matcha.matchings)
    found = np.full((matcha.size, matcha.size), -1 / matcha.size)
    for share, active in matcha.cases():
        total = sum((part for used, part in zip(active, parts, strict=True) if used), 0 * parts[0])
        step = np.eye(matcha.size) - alpha * total
        found += share * step @ step
    return float(np.linalg.eigvalsh(found).max())


@given(connected_graphs())
def test_matchings_are_disjoint_edges_whose_union_is_the_graph(graph: nx.Graph) -> None:
    matchings = decompose(graph)
    for matching in matchings:
        ends = [end for edge in matching for end in edge]
        assert len(ends) == len(set(ends)), "a site is in two edges of one matching"
    edges = [edge for matching in matchings for edge in matching]
    assert len(edges) == graph.number_of_edges()
    assert set(edges) == {(min(edge), max(edge)) for edge in graph.edges}


@pytest.mark.parametrize("size", range(2, 13))
def test_a_complete_graph_falls_into_as_few_matchings_as_there_can_be(size: int) -> None:
    fewest = size - 1 if size % 2 == 0 else size
    assert len(decompose(nx.complete_graph(size))) == fewest


@settings(max_examples=20, deadline=None)
@given(connected_graphs(), st.floats(0.05, 1))
def test_probabilities_keep_the_budget_and_connect_no_worse_than_equal_ones(
    graph: nx.Graph, budget: float
) -> None:
    size, matchings = len(graph), decompose(graph)
    found = activation_probabilities(size, matchings, budget)
    assert all(0 <= p <= 1 for p in found)
    assert sum(found) <= budget * len(matchings) + 1e-9
    equal = [budget] * len(matchings)
    reached = algebraic_connectivity(size, matchings, found)
    assert reached >= algebraic_connectivity(size, matchings, equal) - 1e-4 * budget


def test_the_bridges_of_a_barbell_are_used_more_often_than_the_edges_of_its_cliques() -> None:
    matcha = solve_matcha(BARBELL, 0.5, seed=0)
    often = [
        p
        for matching, p in zip(matcha.matchings, matcha.probabilities, strict=True)
        if {(3, 4), (4, 5)} & set(matching)
    ]
    assert min(often) > 0.7
    equal = algebraic_connectivity(9, matcha.matchings, [0.5] * 4)
    assert algebraic_connectivity(9, matcha.matchings, matcha.probabilities) > 1.1 * equal


@pytest.mark.parametrize(
    ("graph", "budget", "probabilities", "alpha", "rho"),
    [
        (nx.path_graph(2), 1.0, (1.0,), 0.5, 0.0),  # the mean of both, in each round
        (nx.path_graph(2), 0.5, (0.5,), 0.5, 0.5),  # in half of the rounds
        (nx.path_graph(3), 1.0, (1.0, 1.0), 0.5, 0.25),  # eigenvalues 1 and 3: 2 / (1 + 3)
        # E[L] = 1.5 and E[L^2] = 1.5^2 + 2 * 0.25 * 3 but for the consensus: 1.5 / 3.75
        (nx.complete_graph(3), 0.5, (0.5, 0.5, 0.5), 0.4, 0.4),
        (nx.complete_graph(4), 1.0, (1.0, 1.0, 1.0), 0.25, 0.0),  # W is the mean of all
    ],
)
def test_probabilities_and_step_are_as_computed_by_hand(
    graph: nx.Graph, budget: float, probabilities: tuple[float, ...], alpha: float, rho: float
) -> None:
    matcha = solve_matcha(graph, budget, seed=0)
    assert matcha.probabilities == pytest.approx(probabilities, abs=2e-6)
    assert matcha.alpha == pytest.approx(alpha, abs=2e-6)
    assert remaining(matcha, matcha.alpha) == pytest.approx(rho, abs=1e-5)


@pytest.mark.parametrize("budget", [0.02, 0.4, 1.0])
def test_no_other_step_brings_the_sites_together_faster(budget: float) -> None:
    matcha = solve_matcha(BARBELL, budget, seed=0)
    best = remaining(matcha, matcha.alpha)
    for other in (0.0, 0.9 * matcha.alpha, 1.1 * matcha.alpha, 1.0):
        assert remaining(matcha, other) > best


def test_the_draws_of_a_round_depend_on_seed_and_round_alone() -> None:
    matcha = solve_matcha(BARBELL, 0.5, seed=3)
    again = solve_matcha(BARBELL, 0.5, seed=3)
    assert again == matcha, "the solver gives the same bits"
    rounds = [matcha.active(round_) for round_ in range(1, 30)]
    assert [again.active(round_) for round_ in range(29, 0, -1)] == rounds[::-1]
    other = Matcha(matcha.size, matcha.matchings, matcha.probabilities, matcha.alpha, seed=4)
    assert [other.active(round_) for round_ in range(1, 30)] != rounds
    assert len(set(rounds)) > 5


class _Program:
    """Ends as told at each accuracy that it is asked for."""

    def __init__(self, *ends: str) -> None:
        self.ends, self.asked, self.status = iter(ends), list[float](), ""

    def solve(self, eps_abs: float, **_: object) -> None:
        self.asked.append(eps_abs)
        self.status = next(self.ends)


def test_a_program_out_of_reach_is_solved_less_accurately_before_it_is_given_up() -> None:
    once, twice, never = (
        _Program("optimal"),
        _Program("optimal_inaccurate", "optimal"),
        _Program("optimal_inaccurate", "infeasible"),
    )
    _solve(once)
    _solve(twice)
    with refuses(SettingError, "infeasible"):
        _solve(never)
    assert (once.asked, twice.asked) == ([1e-9], [1e-9, 1e-7])


def test_matchings_are_drawn_as_often_as_their_probabilities_say() -> None:
    matcha = Matcha(4, (((0, 1),), ((1, 2),), ((2, 3),)), (0.2, 0.7, 1.0), 0.3, seed=1)
    drawn = np.array([matcha.active(round_) for round_ in range(1, 2001)])
    assert drawn.mean(axis=0) == pytest.approx([0.2, 0.7, 1.0], abs=0.04)
    both = (drawn[:, 0] & drawn[:, 1]).mean()
    assert both == pytest.approx(0.14, abs=0.03), "each for itself"


def test_a_round_moves_each_pair_in_use_towards_each_other_by_alpha() -> None:
    matcha = Matcha(4, (((0, 1), (2, 3)), ((1, 2),)), (0.5, 0.5), 0.3, seed=1)
    pairs = [[0.7, 0.3, 0, 0], [0.3, 0.7, 0, 0], [0, 0, 0.7, 0.3], [0, 0, 0.3, 0.7]]
    assert matcha.matrix((True, False)) == pytest.approx(np.array(pairs))
    assert (matcha.matrix((False, False)) == np.eye(4)).all(), "a round may exchange nothing"


def test_where_many_links_at_once_would_make_a_weight_negative_the_step_is_shorter() -> None:
    matcha = solve_matcha(nx.star_graph(5), 1.0, seed=0)
    assert matcha.alpha == pytest.approx(2 / 7, abs=1e-5)  # 1 - 5 * alpha is below 0
    found = matcha.matrix((True,) * 5)
    assert found[0].tolist() == pytest.approx([0, *[0.2] * 5])
    few = matcha.matrix((True, True, False, False, False))
    assert few[0].max() == pytest.approx(1 - 2 * matcha.alpha), "fewer links: the paper's step"


@settings(max_examples=15, deadline=None)
@given(connected_graphs(), st.floats(0.1, 1))
def test_every_rounds_matrix_and_the_expected_one_are_doubly_stochastic(
    graph: nx.Graph, budget: float
) -> None:
    matcha = solve_matcha(graph, budget, seed=5)
    for matrix in [
        *(matcha.matrix(matcha.active(round_)) for round_ in (1, 2)),
        matcha.expected_matrix(),
    ]:
        assert matrix.min() >= 0
        assert matrix.sum(axis=0) == pytest.approx(np.ones(len(graph)))
        assert matrix.sum(axis=1) == pytest.approx(np.ones(len(graph)))


def test_few_matchings_are_gone_through_in_all_their_subsets() -> None:
    matcha = Matcha(3, (((0, 1),), ((1, 2),)), (0.25, 1.0), 0.5, seed=0)
    assert {active: share for share, active in matcha.cases()} == {
        (False, True): 0.75,
        (True, True): 0.25,
    }
    assert matcha.expected_matrix()[0, 1] == pytest.approx(0.25 * 0.5)


def test_of_many_matchings_a_thousand_rounds_stand_for_all() -> None:
    matchings = tuple(((0, leaf),) for leaf in range(1, 14))
    matcha = Matcha(14, matchings, (0.3,) * 13, 0.01, seed=0)
    cases = list(matcha.cases())
    assert len(cases) == 1000
    assert sum(share for share, _ in cases) == pytest.approx(1)
    assert matcha.expected_matrix()[0, 5] == pytest.approx(0.3 * 0.01, rel=0.15)


def test_rounding_never_goes_over_the_budget() -> None:
    found = _round_probabilities(np.array([0.1234567, 0.1234567, 0.1234567]), 3 * 0.1234567)
    assert sum(found) <= 3 * 0.1234567
    assert found == pytest.approx((0.123457,) * 3, abs=2e-6)
    assert _round_probabilities(np.array([1.00000001, -1e-9]), 1.0) == (1.0, 0.0)


def test_a_budget_that_is_as_good_as_none_is_refused() -> None:
    with refuses(SettingError, "matcha.budget", "1e-09"):
        solve_matcha(nx.path_graph(3), 1e-9, seed=0)


def test_a_solver_without_an_answer_is_an_error_that_says_what_to_do() -> None:
    problem = SimpleNamespace(solve=lambda **_: None, status="unbounded")
    with refuses(SettingError, "unbounded", "matcha.budget"):
        _solve(problem)


def test_a_small_budget_does_not_blur_the_step() -> None:
    matchings = decompose(nx.path_graph(2))
    assert step_size(2, matchings, (0.0001,)) == 0.5
