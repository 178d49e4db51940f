"""Experts and their mixture by hand: two experts, two classes, probabilities one can add up."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.mixture import (
    Mixture,
    by_expert,
    expert_array,
    mixed_log_probabilities,
    open_experts,
)
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays

SETTINGS = CommonSettings(seed=3, width=1)
ROWS, IMAGES = NetworkShape((2,), 2), NetworkShape((1, 16, 16), 3)
SITE_NAMES = st.text(st.characters(exclude_characters="/", codec="ascii"), min_size=1, max_size=8)
ARRAY_NAMES = st.text("abc./", min_size=1, max_size=8)


def _experts(task: NetworkShape, sites: tuple[str, ...]) -> dict[str, TokenClassifier]:
    """Return experts that differ: each has its own seed."""
    return {
        site: build_classifier(CommonSettings(seed=index, width=1), task).eval()
        for index, site in enumerate(sites)
    }


def _inputs(task: NetworkShape, count: int = 5) -> Tensor:
    return torch.randn(count, *task.input_shape, generator=torch.Generator().manual_seed(1))


def _on_the_wire(experts: dict[str, TokenClassifier]) -> dict[str, Tensor]:
    return {
        expert_array(site, name): array
        for site, expert in experts.items()
        for name, array in exchanged_arrays(expert).items()
    }


def test_an_experts_arrays_are_named_after_site_and_array() -> None:
    assert expert_array("va", "head.1.bias") == "expert/va/head.1.bias"
    assert expert_array("st.mary", "head.1.bias") == "expert/st.mary/head.1.bias"


def test_wire_names_are_read_back_sorted_by_site_and_others_are_left_out() -> None:
    arrays = {
        "expert/va/head.1.bias": 1,
        "prototype/va": 2,
        "expert/st.mary/head.1.bias": 3,
        "expert/st.mary/head.1.weight": 4,
        "router/importance.bias": 5,
    }
    found = by_expert(arrays)
    assert list(found) == ["st.mary", "va"]
    assert found == {
        "st.mary": {"head.1.bias": 3, "head.1.weight": 4},
        "va": {"head.1.bias": 1},
    }


@given(st.dictionaries(st.tuples(SITE_NAMES, ARRAY_NAMES), st.integers(), max_size=6))
def test_every_wire_name_leads_back_to_its_site_and_array(
    arrays: dict[tuple[str, str], int],
) -> None:
    found = by_expert({expert_array(*key): value for key, value in arrays.items()})
    assert {(site, name): v for site, own in found.items() for name, v in own.items()} == arrays


def test_two_experts_of_two_classes_are_mixed_as_by_hand() -> None:
    # softmax of log odds: expert 1 says (3/4, 1/4), expert 2 says (1/5, 4/5)
    logits = torch.tensor([[[math.log(3.0), 0.0], [0.0, math.log(4.0)]]])
    weights = torch.tensor([[0.6, 0.4]])
    found = mixed_log_probabilities(weights.log(), logits).exp()
    assert found.tolist() == [
        [
            pytest.approx(0.6 * 0.75 + 0.4 * 0.2),  # 0.53
            pytest.approx(0.6 * 0.25 + 0.4 * 0.8),  # 0.47
        ]
    ]


def test_an_expert_of_weight_zero_does_not_speak() -> None:
    logits = torch.tensor([[[math.log(3.0), 0.0], [0.0, 50.0]]])
    found = mixed_log_probabilities(torch.tensor([[0.0, -math.inf]]), logits).exp()
    assert found.tolist() == [[pytest.approx(0.75), pytest.approx(0.25)]]


@given(
    st.lists(st.tuples(*[st.floats(-30, 30)] * 4), min_size=1, max_size=7),
)
def test_mixed_probabilities_sum_to_one_whatever_the_experts_say(
    experts: list[tuple[float, float, float, float]],
) -> None:
    table = torch.tensor([experts])  # a weight's logit and three classes' logits per expert
    found = mixed_log_probabilities(torch.log_softmax(table[..., 0], dim=-1), table[..., 1:])
    assert found.exp().sum().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("task", [ROWS, IMAGES])
@pytest.mark.parametrize("sites", [("a",), ("a", "b"), ("a", "b", "c", "d", "e")])
def test_a_mixture_of_equal_weights_is_the_mean_of_the_experts_probabilities(
    task: NetworkShape, sites: tuple[str, ...]
) -> None:
    experts, inputs = _experts(task, sites), _inputs(task)
    with torch.no_grad():
        said = [torch.softmax(expert(inputs), dim=-1) for expert in experts.values()]
        found = Mixture(experts).eval()(inputs).exp()
    assert torch.allclose(found, torch.stack(said).mean(dim=0), atol=1e-6)
    if len(sites) > 1:
        assert not torch.allclose(said[0], said[1], atol=1e-3)


def test_the_last_channel_of_a_token_is_the_logarithm_of_the_experts_weight() -> None:
    mixture, inputs = Mixture(_experts(ROWS, ("a", "b", "c", "d"))).eval(), _inputs(ROWS)
    tokens = mixture.encode(inputs)
    assert tokens.shape == (5, 4, 2 + 1)  # logistic regression's token is the row itself
    assert torch.equal(tokens[..., :-1], inputs[:, None].expand(5, 4, 2))
    assert torch.allclose(tokens[..., -1], torch.full((5, 4), math.log(0.25)))


def test_other_weights_in_the_last_channel_mix_otherwise() -> None:
    experts, inputs = _experts(ROWS, ("a", "b")), _inputs(ROWS)
    mixture = Mixture(experts).eval()
    tokens = mixture.encode(inputs)
    tokens[..., -1] = torch.tensor([0.25, 0.75]).log()
    with torch.no_grad():
        a, b = (torch.softmax(expert(inputs), dim=-1) for expert in experts.values())
        found = mixture.classify(tokens).exp()
    assert torch.allclose(found, 0.25 * a + 0.75 * b, atol=1e-6)


def test_the_loss_is_minus_the_logarithm_of_the_mixed_probability_of_the_truth() -> None:
    mixture, inputs = Mixture(_experts(ROWS, ("a", "b"))).eval(), _inputs(ROWS, 3)
    labels = torch.tensor([1, 0, 1])
    probabilities = mixture(inputs).exp()
    expected = -sum(math.log(probabilities[i, label].item()) for i, label in enumerate(labels)) / 3
    assert mixture.loss(inputs, labels).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("task", [ROWS, IMAGES])
def test_experts_are_opened_as_they_were_sent(task: NetworkShape) -> None:
    experts, inputs = _experts(task, ("va", "st.mary")), _inputs(task)
    opened = open_experts(SETTINGS, task, _on_the_wire(experts) | {"router/x": torch.zeros(1)})
    assert list(opened) == ["st.mary", "va"]
    for site, expert in opened.items():
        assert torch.equal(expert.eval()(inputs), experts[site](inputs))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"expert/b/head.1.bias": None}, r"missing \['head.1.bias'\]"),
        ({"expert/b/odd": torch.zeros(1)}, r"surplus \['odd'\]"),
        ({"expert/b/head.1.bias": torch.zeros(3)}, r"'head.1.bias' is \(3,\), not \(2,\)"),
    ],
)
def test_experts_whose_arrays_do_not_fit_are_refused(
    change: dict[str, Tensor | None], said: str
) -> None:
    arrays = {**_on_the_wire(_experts(ROWS, ("a", "b"))), **change}
    sent = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(SettingError, match=rf"weights do not fit the network: .*{said}"):
        open_experts(SETTINGS, ROWS, sent)
