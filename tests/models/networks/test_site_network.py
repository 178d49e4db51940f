from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.uefl import UEFLNetwork, UEFLSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.models.networks.site_network import SiteNetwork


class Plain(SiteNetwork):
    def encode(self, inputs: Tensor) -> Tensor:
        return inputs + 1

    def classify(self, features: Tensor) -> Tensor:
        return 10 * features

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(inputs), labels)


class Between(Plain):
    def features(self, tokens: Tensor) -> Tensor:
        return -tokens


def test_the_classifier_reads_the_tokens_unless_a_network_puts_something_between() -> None:
    inputs = torch.tensor([[1.0, 2.0]])
    assert Plain()(inputs).tolist() == [[20.0, 30.0]]
    assert Between()(inputs).tolist() == [[-20.0, -30.0]]


def test_a_network_that_lacks_a_step_cannot_be_built() -> None:
    class NoLoss(SiteNetwork):
        def encode(self, inputs: Tensor) -> Tensor:
            return inputs

        def classify(self, features: Tensor) -> Tensor:
            return features

    with pytest.raises(TypeError, match="loss"):
        NoLoss()


def test_uefl_alone_quantises() -> None:
    classifier = build_classifier(CommonSettings(width=2), Task((1, 16, 16), 3))
    book = torch.arange(16.0).reshape(2, 8)
    network = UEFLNetwork(classifier, {"0": book}, UEFLSettings(codes=2))
    tokens = torch.zeros(1, 1, 8)
    assert classifier.features(tokens) is tokens
    torch.testing.assert_close(network.features(tokens)[0, 0], book[0])
