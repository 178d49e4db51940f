import torch
from torch import nn

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.resnet22 import ResNet22, build_head, still_statistics
from fedsilo.models.networks.site_network import exchanged_arrays
from tests.support.errors import refuses


def test_the_published_architecture_is_met_in_names_shapes_and_numbers() -> None:
    network = ResNet22(in_channels=1)
    arrays = {name: tuple(array.shape) for name, array in network.state_dict().items()}
    assert arrays["first_conv.weight"] == (16, 1, 7, 7)
    assert arrays["layer_list.0.0.downsample.0.weight"] == (16, 16, 1, 1)
    assert arrays["layer_list.4.0.conv1.weight"] == (256, 128, 3, 3)
    assert arrays["layer_list.4.1.bn2.running_mean"] == (256,)
    assert "layer_list.4.1.downsample.0.weight" not in arrays
    assert arrays["final_bn.weight"] == (256,)
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    # 22 layers: the first, two in each of ten blocks, and the head's; shortcuts are not counted
    assert len(convolutions) == 1 + 2 * 10 + 5
    assert all(m.bias is None for m in convolutions)


def test_four_megapixels_become_32_by_32_maps_without_being_computed() -> None:
    with torch.device("meta"):
        network = ResNet22(in_channels=1)
        images = torch.empty(1, 1, 2048, 2048)
        assert network.maps(images).shape == (1, 256, 32, 32)
        assert network(images).shape == (1, 256, 1, 1)


def test_a_block_is_batch_norm_relu_convolution_twice_and_a_shortcut_of_the_activated() -> None:
    torch.manual_seed(0)
    block = ResNet22(in_channels=1, width=2).layer_list[1][0].eval()  # type: ignore[index]
    x = torch.randn(2, 2, 6, 6)
    active = torch.relu(block.bn1(x))
    inner = block.conv2(torch.relu(block.bn2(block.conv1(active))))
    assert torch.equal(block(x), inner + block.downsample(active))
    assert block(x).shape == (2, 4, 3, 3)


def test_the_head_of_256_channels_is_the_papers() -> None:
    head = build_head(256, 2, 0.5)
    linear = [(m.in_features, m.out_features) for m in head if isinstance(m, nn.Linear)]
    assert linear == [(256, 128), (128, 64), (64, 2)]
    assert [m.p for m in head if isinstance(m, nn.Dropout)] == [0.5, 0.5]


def _step(checkpointed: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    network = ResNet22(in_channels=1, width=2, checkpointed=checkpointed)
    network.train()
    images = torch.randn(3, 1, 64, 64)
    network(images).square().sum().backward()
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return gradients, exchanged_arrays(network)


def test_checkpointing_changes_no_bit_of_gradients_and_running_statistics() -> None:
    (plain, before), (again, after) = _step(False), _step(True)
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_still_statistics_leave_running_statistics_and_momenta_unchanged() -> None:
    norm = nn.BatchNorm2d(2).train()
    with still_statistics(norm):
        norm(torch.randn(4, 2, 3, 3) + 5)
    assert torch.equal(norm.running_mean, torch.zeros(2))
    assert norm.momentum == 0.1
    norm(torch.randn(4, 2, 3, 3) + 5)
    assert norm.running_mean.mean() > 0.3


def test_radiographs_are_standardised_each_by_itself() -> None:
    dark = torch.tensor([[0, 2], [4, 6]])
    bright = 10_000 * dark + 3
    images = (torch.stack([dark, bright])[:, None] - 32768).to(torch.int16)
    found = float_inputs(images)
    expected = torch.tensor([-3.0, -1.0, 1.0, 3.0]) / 5**0.5
    assert torch.allclose(found[0].flatten(), expected, atol=1e-6)
    assert torch.allclose(found[1].flatten(), expected, atol=1e-3)  # float32 holds 16 bits


def test_the_classifier_is_built_at_any_size_and_refuses_specks() -> None:
    settings = CommonSettings(network="resnet22", width=4)
    network = build_classifier(settings, NetworkShape((1, 45, 30), 2))
    assert network.channels == 64
    assert network.train()(torch.randn(2, 1, 45, 30)).shape == (2, 2)
    with refuses(SettingError, 16):
        build_classifier(settings, NetworkShape((1, 15, 40), 2))
