import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings_schema import build
from fedsilo.models.methods.cdl import CDLSettings, contrastive_divergence, divergence

EVEN = torch.zeros(1, 2)  # probabilities 1/2, 1/2
SKEWED = torch.tensor([[0.0, math.log(3)]])  # 1/4, 3/4
KL = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)  # of the skewed from the even
BACK = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)  # of the even from the skewed


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True, materialize_grads=True)
    return found


def test_the_divergence_by_hand_and_its_two_directions() -> None:
    assert divergence(SKEWED, EVEN).item() == pytest.approx(KL, abs=1e-6)
    assert divergence(EVEN, SKEWED).item() == pytest.approx(BACK, abs=1e-6)
    assert abs(KL - BACK) > 0.01
    assert divergence(SKEWED + 7, EVEN - 2).item() == pytest.approx(KL, abs=1e-6)


def test_a_batch_has_the_mean_of_its_samples_divergences() -> None:
    found = divergence(torch.cat([SKEWED, EVEN]), torch.cat([EVEN, EVEN]))
    assert found.item() == pytest.approx(KL / 2, abs=1e-6)


@given(st.integers(0, 1000))
def test_it_is_nothing_between_the_same_answers_and_more_between_others(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    one, other = torch.randn(2, 3, 4, generator=draw)
    assert divergence(one, one).item() == pytest.approx(0, abs=1e-6)
    assert divergence(one, other).item() > 0


@pytest.mark.parametrize("beta", [0.25, 0.5, 1.0])
def test_beta_weighs_the_two_terms(beta: float) -> None:
    found = contrastive_divergence(SKEWED, EVEN, beta).item()
    assert found == pytest.approx(beta * KL + (1 - beta) * BACK, abs=1e-6)


def test_each_term_trains_its_own_model_alone() -> None:
    main, support = SKEWED.clone().requires_grad_(), EVEN.clone().requires_grad_()
    whole = contrastive_divergence(main, support, 0.25)
    to_support = divergence(main, EVEN)
    to_main = divergence(support, SKEWED)
    assert torch.allclose(gradient(whole, main), 0.25 * gradient(to_support, main))
    assert torch.allclose(gradient(whole, support), 0.75 * gradient(to_main, support))
    # by hand: d KL(p || q) / d logit_k = p_k (log(p_k / q_k) - KL)
    expected = 0.25 * 0.75 * (math.log(1.5) - KL)
    assert gradient(whole, main)[0, 1].item() == pytest.approx(expected, abs=1e-6)


def test_with_beta_1_the_support_model_is_not_trained() -> None:
    support = EVEN.clone().requires_grad_()
    assert not gradient(contrastive_divergence(SKEWED, support, 1.0), support).any()


@pytest.mark.parametrize("beta", [0.0, -0.5, 1.1, float("nan")])
def test_no_beta_at_all_or_too_much_is_refused(beta: float) -> None:
    with pytest.raises(SettingError, match=r"'cdl.divergence-beta' must be above 0 and at most 1"):
        build(CDLSettings, {"cdl.divergence-beta": beta})


def test_unless_they_are_set_beta_is_a_half_and_the_topology_a_ring() -> None:
    found = build(CDLSettings, {})
    assert (found.divergence_beta, found.divergence_topology) == (0.5, "ring")
    with pytest.raises(
        SettingError, match=r"'cdl.divergence-topology' must be .*complete, ring.*'line'"
    ):
        build(CDLSettings, {"cdl.divergence-topology": "line"})
