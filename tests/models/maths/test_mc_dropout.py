import math

import pytest
import torch
from torch import Tensor

from fedsilo.core.seeding import seed_generators
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.maths.mc_dropout import (
    mc_dropout_mean,
    only_dropout_active,
    predictive_entropy,
)
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import TokenClassifier


def _network() -> TokenClassifier:
    return build_classifier(CommonSettings(width=2, dropout=0.5), NetworkShape((1, 8, 8), 3))


def _images() -> Tensor:
    return torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("classes", [2, 5, 10])
def test_the_entropy_of_a_uniform_prediction_is_the_log_of_the_classes(classes: int) -> None:
    uniform = torch.full((3, classes), 1 / classes, dtype=torch.float64)
    assert predictive_entropy(uniform).tolist() == pytest.approx([math.log(classes)] * 3)


def test_a_certain_prediction_has_no_entropy_and_a_zero_does_no_harm() -> None:
    probabilities = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    assert predictive_entropy(probabilities).tolist() == pytest.approx([0.0, math.log(2)])


class _Scripted:
    """Gives one prepared batch of logits per pass."""

    def __init__(self, *logits: list[list[float]]) -> None:
        self.logits = [torch.tensor(batch) for batch in logits]
        self.passes = 0

    def classify(self, features: Tensor) -> Tensor:
        self.passes += 1
        return self.logits[self.passes - 1]


def test_probabilities_are_averaged_over_the_passes_and_not_logits() -> None:
    even, sure = [[0.0, 0.0]], [[math.log(9.0), 0.0]]  # softmax: (.5, .5) and (.9, .1)
    network = _Scripted(even, sure)
    mean = mc_dropout_mean(
        network.classify, torch.zeros(1, 1), 2, lambda logits: logits.softmax(dim=-1)
    )
    assert mean[0].tolist() == pytest.approx([0.7, 0.3])
    assert mean.dtype == torch.float64
    assert network.passes == 2


def test_passes_differ_with_dropout_on_and_agree_in_eval_mode() -> None:
    network, images = _network(), _images()
    with torch.no_grad(), only_dropout_active(network), seed_generators(0, "passes"):
        tokens = network.encode(images)
        assert torch.equal(tokens, network.encode(images))
        assert not torch.equal(network.classify(tokens), network.classify(tokens))
    network.eval()
    assert torch.equal(network.classify(tokens), network.classify(tokens))


def test_batch_norm_statistics_are_untouched_by_dropout_passes() -> None:
    network = _network().train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with only_dropout_active(network):
        network(_images())
    assert all(torch.equal(before[name], now) for name, now in network.state_dict().items())
    network(_images())  # in train mode the same call does move them
    assert any(not torch.equal(before[name], now) for name, now in network.state_dict().items())


def test_dropout_rests_too_where_it_is_not_wanted() -> None:
    network, images = _network().train(), _images()
    with torch.no_grad(), only_dropout_active(network, dropout=False), seed_generators(0, "passes"):
        assert not any(part.training for part in network.modules())
        tokens = network.encode(images)
        first = network.classify(tokens)
        assert torch.equal(first, network.classify(tokens))
    assert all(part.training for part in network.modules())
    with torch.no_grad():
        assert torch.equal(first, network.eval().classify(tokens))


@pytest.mark.parametrize("dropout", [True, False])
def test_every_module_gets_its_own_mode_back_even_after_an_error(dropout: bool) -> None:
    network = _network().train()
    network.encoder.eval()
    before = [part.training for part in network.modules()]
    with pytest.raises(ZeroDivisionError), only_dropout_active(network, dropout):
        raise ZeroDivisionError
    assert [part.training for part in network.modules()] == before
    assert True in before
    assert False in before
