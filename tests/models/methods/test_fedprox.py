import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings_schema import build
from fedsilo.models.methods.fedprox import FedProxSettings, proximal_term


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
    with pytest.raises(SettingError, match=r"'fedprox.proximal-mu' must be above 0"):
        build(FedProxSettings, {"fedprox.proximal-mu": mu})


def test_mu_is_a_hundredth_unless_it_is_set() -> None:
    assert build(FedProxSettings, {}).proximal_mu == 0.01
    assert build(FedProxSettings, {"fedprox.proximal-mu": 1}).proximal_mu == 1.0
