import pytest
import torch

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.networks.build import build_classifier, network_kind
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import exchanged_arrays

TASK = NetworkShape((1, 16, 16), 10)
ROWS = NetworkShape((5,), 3)


def test_auto_means_conv_for_images_and_logistic_regression_for_tables() -> None:
    assert network_kind(CommonSettings(), TASK) == "conv"
    assert network_kind(CommonSettings(), ROWS) == "logistic"
    for task, name in ((TASK, "conv"), (ROWS, "logistic")):
        auto, named = (build_classifier(CommonSettings(network=n), task) for n in ("auto", name))
        arrays = exchanged_arrays(auto)
        assert arrays.keys() == exchanged_arrays(named).keys()
        assert all(torch.equal(arrays[k], v) for k, v in exchanged_arrays(named).items())


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100", "gtsrb"])
def test_auto_means_vgg_for_uefls_data_in_colour_and_for_no_other_photographs(
    dataset: str,
) -> None:
    colour = NetworkShape((3, 32, 32), 10)
    assert network_kind(CommonSettings(dataset=dataset), colour) == "vgg16-bn"
    assert network_kind(CommonSettings(dataset=dataset, network="conv"), colour) == "conv"
    for other in ("isic2019", "images", "dermoscopy-phantom"):
        assert network_kind(CommonSettings(dataset=other), colour) == "conv"


@pytest.mark.parametrize("network", ["conv", "vgg16-bn"])
def test_an_image_network_on_a_table_is_refused_with_those_that_take_it(network: str) -> None:
    settings = CommonSettings(network=network, dataset="heart")
    said = f"network '{network}' .*data set 'heart', which is a table: .*logistic or mlp"
    for ask in (network_kind, build_classifier):
        with pytest.raises(SettingError, match=said):
            ask(settings, ROWS)


@pytest.mark.parametrize("network", ["logistic", "mlp"])
def test_a_row_network_on_images_is_refused_with_those_that_take_them(network: str) -> None:
    settings = CommonSettings(network=network, dataset="digits")
    said = f"network '{network}' .*data set 'digits', which is images: .*conv or vgg16-bn"
    with pytest.raises(SettingError, match=said):
        build_classifier(settings, TASK)
