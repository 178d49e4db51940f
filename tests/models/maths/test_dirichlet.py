"""Evidence by hand: Dirichlet distributions of two and three classes, and torch's own beside."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Dirichlet, kl_divergence

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.maths.dirichlet import (
    PRIOR_FLOOR,
    Evidence,
    annealing,
    belief,
    dirichlet_kl,
    evidence_of,
    evidential_loss,
    evidential_mse,
    skewed_prior,
    vacuity,
)
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import TokenClassifier, evidences

PARAMETER = st.floats(0.02, 80)


def pairs(low: int = 2, high: int = 7) -> st.SearchStrategy[list[tuple[float, float]]]:
    return st.lists(st.tuples(PARAMETER, PARAMETER), min_size=low, max_size=high)


@given(pairs())
def test_the_divergence_is_that_of_torch(parameters: list[tuple[float, float]]) -> None:
    alpha, prior = torch.tensor(parameters, dtype=torch.float64).unbind(1)
    expected = kl_divergence(Dirichlet(alpha), Dirichlet(prior)).item()
    assert dirichlet_kl(alpha, prior).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    single = dirichlet_kl(alpha.float(), prior.float()).item()
    assert single == pytest.approx(expected, rel=1e-3, abs=2e-3)


def test_the_divergence_from_the_uniform_distribution_by_hand() -> None:
    # log(Gamma(3) / Gamma(2)) + (2 - 1) (psi(2) - psi(3)) = log 2 - 1/2
    found = dirichlet_kl(torch.tensor([2.0, 1.0]), torch.ones(2))
    assert found.item() == pytest.approx(math.log(2) - 0.5, abs=1e-6)
    assert dirichlet_kl(torch.tensor([0.5, 1.5]), torch.tensor([0.5, 1.5])).item() == 0


def test_the_divergence_keeps_the_batch() -> None:
    alpha = torch.tensor([[[2.0, 1.0], [1.0, 1.0]], [[1.0, 2.0], [2.0, 1.0]]])
    known = math.log(2) - 0.5
    found = dirichlet_kl(alpha, torch.ones(2))
    assert torch.allclose(found, torch.tensor([[known, 0.0], [known, known]]), atol=1e-6)


def test_a_rare_class_has_the_larger_prior_weight() -> None:
    assert skewed_prior(torch.tensor([3, 1])).tolist() == [0.5, 1.5]  # 2 (1 - 3/4), 2 (1 - 1/4)
    # 3/2 (1 - 1/6), 3/2 (1 - 2/6), 3/2 (1 - 3/6)
    assert skewed_prior(torch.tensor([1, 2, 3])).tolist() == pytest.approx([1.25, 1.0, 0.75])
    assert skewed_prior(torch.tensor([5, 5, 5, 5])).tolist() == [1.0] * 4


def test_a_class_that_holds_all_samples_keeps_the_floor() -> None:
    found = skewed_prior(torch.tensor([7, 0, 0]))  # 0, 1.5, 1.5, of which the first is 0.01
    share = 3 / (PRIOR_FLOOR + 3)
    assert found.tolist() == pytest.approx([PRIOR_FLOOR * share, 1.5 * share, 1.5 * share])
    assert found.dtype == torch.float32


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=12).filter(sum))
def test_prior_weights_are_positive_and_sum_to_the_number_of_classes(counts: list[int]) -> None:
    weights = skewed_prior(torch.tensor(counts))
    assert weights.sum().item() == pytest.approx(len(counts), rel=1e-5)
    assert weights.min().item() >= 0.9 * PRIOR_FLOOR
    order = sorted(range(len(counts)), key=counts.__getitem__)
    assert (weights[order].diff() <= 1e-6).all()


@pytest.mark.parametrize("counts", [[5], [0, 0], [0, 0, 0]])
def test_a_prior_needs_two_classes_and_a_sample(counts: list[int]) -> None:
    with pytest.raises(SettingError, match=rf"two classes and samples, but counts are \{counts}"):
        skewed_prior(torch.tensor(counts))


@given(
    st.lists(st.tuples(st.floats(0, 500), st.integers(0, 50)), min_size=2, max_size=8).filter(
        lambda both: sum(count for _, count in both)
    )
)
def test_beliefs_and_vacuity_sum_to_one(both: list[tuple[float, int]]) -> None:
    evidence, counts = torch.tensor(both).unbind(1)
    prior = skewed_prior(counts)
    alpha = evidence + prior
    total = belief(alpha, prior).sum() + vacuity(alpha)
    assert total.item() == pytest.approx(1, abs=1e-4)


def test_vacuity_is_one_without_evidence_and_falls_with_it() -> None:
    prior = skewed_prior(torch.tensor([3, 1]))
    alphas = torch.stack([prior, prior + torch.tensor([2.0, 0.0]), prior + 3])
    assert vacuity(alphas).tolist() == [1.0, 0.5, 0.25]  # 2 / 2, 2 / 4, 2 / 8
    assert belief(alphas, prior).tolist() == [[0, 0], [0.5, 0], [0.375, 0.375]]


def test_the_evidential_error_by_hand() -> None:
    # mean (3/4, 1/4), variance 3/16 / 5 each; truth 0: 1/16 + 1/16 + 6/80
    alpha, targets = torch.tensor([[3.0, 1.0], [3.0, 1.0]]), torch.eye(2)
    # truth 1: 9/16 + 9/16 + 6/80
    assert evidential_mse(alpha, targets).tolist() == pytest.approx([0.2, 1.2])


@pytest.mark.parametrize("alpha", [[3.2, 0.7, 1.5], [0.3, 0.4, 0.2], [20.0, 1.0, 4.0]])
@pytest.mark.parametrize("truth", [0, 2])
def test_the_evidential_error_is_the_mean_over_the_dirichlet(
    alpha: list[float], truth: int
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        drawn = Dirichlet(torch.tensor(alpha, dtype=torch.float64)).sample((100_000,))
    target = torch.eye(3, dtype=torch.float64)[truth]
    expected = (target - drawn).square().sum(dim=1).mean().item()
    found = evidential_mse(torch.tensor([alpha]), target[None].float()).item()
    assert found == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(("epochs", "weight"), [(0, 0.0), (3, 0.3), (10, 1.0), (75, 1.0)])
def test_the_divergence_is_weighed_in_over_ten_epochs(epochs: int, weight: float) -> None:
    assert annealing(epochs) == weight


def kl_part(alpha: torch.Tensor, labels: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    with_kl, without = (evidential_loss(alpha, labels, prior, weight) for weight in (1.0, 0.0))
    return with_kl - without


def test_the_loss_adds_the_weighted_divergence_and_takes_the_batch_mean_by_hand() -> None:
    alpha, prior = torch.tensor([[3.0, 1.0], [2.0, 3.0]]), torch.ones(2)
    # errors: 0.2; truth 1, mean (2/5, 3/5): 2 * 4/25 + 2 * 6/25 / 6 = 0.4
    # misleading: (1, 1) has none; (2, 1) has log 2 - 1/2
    labels = torch.tensor([0, 1])
    expected = (0.2 + 0.4 + 0.25 * (math.log(2) - 0.5)) / 2
    assert evidential_loss(alpha, labels, prior, 0.25).item() == pytest.approx(expected, abs=1e-6)


@given(pairs(3, 5), st.floats(0.1, 60), st.integers(0, 2))
def test_evidential_loss_does_not_penalise_evidence_for_the_true_class(
    parameters: list[tuple[float, float]], other: float, truth: int
) -> None:
    alpha, prior = torch.tensor(parameters, dtype=torch.float64).unbind(1)
    labels = torch.tensor([truth])
    changed = alpha.clone()
    changed[truth] = other
    before, after = (kl_part(a[None], labels, prior).item() for a in (alpha, changed))
    assert after == pytest.approx(before, abs=1e-9)
    changed[(truth + 1) % len(alpha)] += 5
    assert kl_part(changed[None], labels, prior).item() != pytest.approx(before, abs=1e-9)


def test_the_divergence_has_no_gradient_to_the_true_class() -> None:
    alpha = torch.tensor([[4.0, 2.0, 3.0]], requires_grad=True)
    kl_part(alpha, torch.tensor([1]), torch.ones(3)).backward()  # type: ignore[no-untyped-call]
    assert alpha.grad is not None
    assert abs(alpha.grad[0, 1].item()) < 1e-6  # of the difference of two losses
    assert alpha.grad[0, [0, 2]].min().item() > 0.01


@pytest.mark.parametrize("kind", ["softplus", "relu"])
@given(outputs=st.lists(st.floats(-30, 30), min_size=3, max_size=3))
def test_the_softmax_of_an_evidential_output_is_the_expected_probability(
    kind: str, outputs: list[float]
) -> None:
    part = Evidence(3, kind)
    part.prior.copy_(skewed_prior(torch.tensor([5, 0, 2])))
    scores = torch.tensor([outputs])
    found = part(scores)
    alpha = evidence_of(scores, kind) + part.prior
    assert torch.allclose(found.exp(), alpha, rtol=1e-4)
    assert torch.allclose(found.softmax(dim=-1), alpha / alpha.sum(), atol=1e-5)


def test_softplus_and_relu_make_evidence_of_outputs() -> None:
    scores = torch.tensor([-2.0, 0.0, 3.0])
    assert evidence_of(scores, "relu").tolist() == [0, 0, 3]
    expected = [math.log1p(math.exp(score)) for score in (-2, 0, 3)]
    assert evidence_of(scores).tolist() == pytest.approx(expected)
    assert Evidence(3, "relu")(scores[None]).exp().tolist()[0] == pytest.approx([1, 1, 4])


def test_evidence_is_float32_even_of_half_precision_outputs() -> None:
    found = Evidence(2)(torch.tensor([[3.0, -3.0]], dtype=torch.bfloat16))
    assert found.dtype == torch.float32


def test_the_prior_is_the_sites_own_and_in_no_state_dict() -> None:
    part = Evidence(3)
    assert part.state_dict() == {}
    assert part.prior.tolist() == [1, 1, 1]
    assert [name for name, _ in part.named_parameters()] == []


def test_the_modules_loss_is_that_of_its_prior_and_weight() -> None:
    part = Evidence(2)
    part.prior.copy_(torch.tensor([0.5, 1.5]))
    part.kl_weight = 0.3
    alpha, labels = torch.tensor([[3.0, 2.0], [1.0, 4.0]]), torch.tensor([0, 0])
    expected = evidential_loss(alpha, labels, torch.tensor([0.5, 1.5]), 0.3)
    assert part.loss(alpha.log(), labels).item() == pytest.approx(expected.item(), rel=1e-6)


def build(loss: str) -> TokenClassifier:
    return build_classifier(CommonSettings(network="logistic", loss=loss), NetworkShape((2,), 3))


def test_any_network_can_be_evidential_and_only_then_has_a_prior() -> None:
    usual, evidential = build("auto"), build("evidential")
    assert evidences(usual) == []
    (part,) = evidences(evidential)
    assert part.prior.shape == (3,)
    assert usual.state_dict().keys() == evidential.state_dict().keys()
    rows, labels = torch.tensor([[1.0, -1.0]]), torch.tensor([2])
    with torch.no_grad():
        outputs = usual.eval()(rows)  # the same initial weights: the head's outputs
        found = evidential.eval()(rows)
        assert torch.allclose(found.exp(), evidence_of(outputs) + 1, atol=1e-6)
        assert evidential.loss(rows, labels).item() == part.loss(found, labels).item()
