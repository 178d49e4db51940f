import pytest
import torch
from torch import Tensor, nn

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.methods.uefl import UEFLSettings
from fedsilo.models.methods.uefl_network import UEFLNetwork
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import SiteNetwork, TokenClassifier, exchanged_arrays
from tests.support.tiny import VIT_FIELDS


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
    classifier = build_classifier(CommonSettings(width=2), NetworkShape((1, 16, 16), 3))
    book = torch.arange(16.0).reshape(2, 8)
    network = UEFLNetwork(classifier, {"0": book}, UEFLSettings(codes=2))
    tokens = torch.zeros(1, 1, 8)
    assert classifier.features(tokens) is tokens
    torch.testing.assert_close(network.features(tokens)[0, 0], book[0])


TASK = NetworkShape((1, 16, 16), 10)


def test_encode_makes_a_token_of_the_channels_at_each_place() -> None:
    class Fixed(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.arange(8.0).reshape(1, 2, 2, 2)  # channel 0: 0..3, channel 1: 4..7

    network = TokenClassifier(Fixed(), nn.Identity(), tokens=4, channels=2)
    expected = [[0.0, 4.0], [1.0, 5.0], [2.0, 6.0], [3.0, 7.0]]
    assert network.encode(torch.zeros(1)).squeeze(0).tolist() == expected


def test_an_evidential_conv_network_answers_log_alpha_and_its_criterion_is_eq_4_by_hand() -> None:
    settings = CommonSettings(width=2, seed=3, dropout=0.0, loss="evidential")
    network = build_classifier(settings, NetworkShape((1, 16, 16), 2)).eval()
    # alpha (3, 1) of class 0: p = (3/4, 1/4), error 2/16, variances 2 * (3/16) / 5
    alpha = torch.tensor([[3.0, 1.0]])
    found = network.criterion(alpha.log(), torch.tensor([0]))
    assert found.item() == pytest.approx(2 / 16 + 2 * (3 / 16) / 5)
    images = torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = network.head(network.encode(images).flatten(1))
        log_alpha = network(images)
        expected = (nn.functional.softplus(plain) + 1).log()
        assert network.loss(images, torch.tensor([0, 1, 1])).item() == pytest.approx(
            network.criterion(log_alpha, torch.tensor([0, 1, 1])).item()
        )
    torch.testing.assert_close(log_alpha, expected)
    assert list(exchanged_arrays(network)) == list(
        exchanged_arrays(build_classifier(CommonSettings(width=2), NetworkShape((1, 16, 16), 2)))
    )


@pytest.mark.parametrize(
    ("loss", "network", "evidential"),
    [
        ("auto", "auto", False),
        ("auto", "conv", False),
        ("auto", "vit", True),
        ("cross-entropy", "vit", False),
        ("evidential", "conv", True),
    ],
)
def test_auto_is_evidential_for_a_vit_alone(loss: str, network: str, evidential: bool) -> None:
    size = VIT_FIELDS if network == "vit" else {"network": network, "width": 2}
    settings = CommonSettings(**size, loss=loss, evidence="relu")
    found = build_classifier(settings, TASK).evidence
    assert (found is not None) is evidential
    if found is not None:
        assert (found.kind, found.prior.tolist()) == ("relu", [1.0] * 10)
