import pytest
import torch
from torch import nn

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape, check_network_settings
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays
from tests.support.errors import refuses

SMALL = CommonSettings(width=2, seed=3)
TASK = NetworkShape((1, 16, 16), 10)
ROWS = NetworkShape((5,), 3)


def _network(settings: CommonSettings = SMALL) -> TokenClassifier:
    return build_classifier(settings, TASK)


def test_a_28_pixel_image_becomes_nine_tokens_of_four_widths() -> None:
    network = build_classifier(CommonSettings(width=4), NetworkShape((1, 28, 28), 7))
    images = torch.zeros(2, 1, 28, 28)
    assert network.encode(images).shape == (2, 9, 16)
    assert network(images).shape == (2, 7)
    assert (network.tokens, network.channels) == (9, 16)


def test_head_has_dropout_of_the_settings_before_each_linear_layer() -> None:
    head = list(build_classifier(CommonSettings(width=2, dropout=0.35), TASK).head)
    linear = [index for index, part in enumerate(head) if isinstance(part, nn.Linear)]
    before = [head[index - 1] for index in linear]
    assert all(isinstance(part, nn.Dropout) and part.p == 0.35 for part in before)
    assert isinstance(head[-1], nn.Linear)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    first = exchanged_arrays(_network())
    torch.manual_seed(1)
    again = exchanged_arrays(_network())
    other = exchanged_arrays(_network(CommonSettings(width=2, seed=4)))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.1.weight"], other["head.1.weight"])


def test_images_too_small_for_the_poolings_are_refused_with_their_size() -> None:
    with pytest.raises(SettingError, match="7x16 pixels"):
        build_classifier(SMALL, NetworkShape((1, 7, 16), 10))


def test_colour_images_become_tokens_of_512_vgg_features() -> None:
    settings = CommonSettings(network="vgg16-bn", width=128)
    network = build_classifier(settings, NetworkShape((3, 64, 32), 4))
    images = torch.randn(2, 3, 64, 32, generator=torch.Generator().manual_seed(0))
    network.eval()
    with torch.no_grad():
        assert network.encode(images).shape == (2, 2, 512)
        assert network(images).shape == (2, 4)
    with refuses(SettingError, 32):
        build_classifier(settings, NetworkShape((3, 28, 28), 4))


def test_leading_norms_are_left_out_of_the_grey_encoder_alone() -> None:
    names = exchanged_arrays(_network(CommonSettings(width=2, seed=3, leading_norm=False)))
    assert "encoder.stages.0.bias" in names
    assert "encoder.stages.0.bias" not in exchanged_arrays(_network())
    for network in ("vgg16-bn", "resnet22"):
        settings = CommonSettings(network=network, leading_norm=False)
        with refuses(SettingError, network):
            check_network_settings(settings)
    check_network_settings(CommonSettings(leading_norm=False))
    with refuses(SettingError, "vgg16-bn"):
        check_network_settings(CommonSettings(dataset="gtsrb", leading_norm=False))


def test_logistic_regression_is_one_linear_layer_of_the_features_as_they_are() -> None:
    network = build_classifier(CommonSettings(network="logistic", seed=3), ROWS).eval()
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(network.encode(rows), rows[:, None, :])
    assert set(exchanged_arrays(network)) == {"head.1.weight", "head.1.bias"}
    weights = network.state_dict()
    expected = rows @ weights["head.1.weight"].T + weights["head.1.bias"]
    torch.testing.assert_close(network(rows), expected)
    assert (network.tokens, network.channels) == (1, 5)


def test_an_mlp_has_one_hidden_layer_of_the_settings_width() -> None:
    network = build_classifier(CommonSettings(network="mlp", width=6, seed=3), ROWS).eval()
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    assert network.encode(rows).shape == (4, 1, 6)
    assert network(rows).shape == (4, 3)
    assert (network.tokens, network.channels) == (1, 6)
    shapes = {name: tuple(array.shape) for name, array in exchanged_arrays(network).items()}
    assert shapes == {
        "encoder.layers.0.weight": (6, 5),
        "encoder.layers.0.bias": (6,),
        "head.1.weight": (3, 6),
        "head.1.bias": (3,),
    }
    weights = network.state_dict()
    hidden = nn.functional.gelu(
        rows @ weights["encoder.layers.0.weight"].T + weights["encoder.layers.0.bias"]
    )
    expected = hidden @ weights["head.1.weight"].T + weights["head.1.bias"]
    torch.testing.assert_close(network(rows), expected)


@pytest.mark.parametrize("network", ["logistic", "mlp"])
def test_all_dropout_of_a_row_network_is_in_its_head(network: str) -> None:
    built = build_classifier(CommonSettings(network=network, dropout=0.35), ROWS)
    dropouts = [part for part in built.modules() if isinstance(part, nn.Dropout)]
    assert [part.p for part in dropouts] == [0.35]
    assert dropouts[0] is next(iter(built.head))
