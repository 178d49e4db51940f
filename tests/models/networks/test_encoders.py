import pytest
import torch
from torch import nn

from fedsilo.models.networks.encoders import ConvEncoder, ResidualBlock, VggEncoder, float_inputs


def test_8_bit_images_are_scaled_to_minus_one_to_one_and_other_inputs_are_left() -> None:
    found = float_inputs(torch.tensor([0, 51, 255], dtype=torch.uint8))
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([-1.0, -0.6, 1.0])
    for rows in (torch.tensor([0.0, 255.0]), torch.tensor([3], dtype=torch.int64)):
        assert float_inputs(rows) is rows


def test_without_leading_norms_a_stage_is_convolution_block_and_pooling() -> None:
    encoder = ConvEncoder(in_channels=1, width=1, leading_norm=False).eval()
    kinds = [type(part) for part in encoder.stages]
    assert kinds == [nn.Conv2d, ResidualBlock, nn.MaxPool2d] * 3
    first, block, pool = encoder.stages[:3]
    with torch.no_grad():
        first.weight.zero_()
        first.weight[0, 0, 1, 1] = 1
        first.bias.fill_(-2)
        block.body[-1].weight.zero_()  # the block adds nothing
        image = torch.tensor([[[[1.0, 2.0], [5.0, 3.0]]]])
        assert pool(block(first(image))).tolist() == [[[[3.0]]]]
    assert encoder(torch.zeros(2, 1, 28, 28)).shape == (2, 4, 3, 3)


def test_leading_norms_are_there_unless_they_are_left_out() -> None:
    kinds = [type(part) for part in ConvEncoder(in_channels=1, width=1).stages]
    assert kinds == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, ResidualBlock, nn.MaxPool2d] * 3


def test_at_width_128_vgg_is_timms_and_torchvisions_array_by_array() -> None:
    from timm.models.vgg import vgg16_bn
    from torchvision.models.vgg import cfgs, make_layers

    ours = VggEncoder(in_channels=3, width=128).features.eval()
    shapes = {name: array.shape for name, array in ours.state_dict().items()}
    theirs = vgg16_bn(mlp_ratio=1 / 4096).get_submodule("features").eval()
    for other in (theirs, make_layers(cfgs["D"], batch_norm=True)):
        assert {name: array.shape for name, array in other.state_dict().items()} == shapes
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))


@pytest.mark.parametrize(("width", "first", "last"), [(32, 16, 128), (2, 1, 8), (1, 1, 4)])
def test_a_narrower_vgg_has_every_stage_narrower(width: int, first: int, last: int) -> None:
    encoder = VggEncoder(in_channels=3, width=width).eval()
    convolutions = [part for part in encoder.features if isinstance(part, nn.Conv2d)]
    assert len(convolutions) == 13
    assert (convolutions[0].out_channels, convolutions[-1].out_channels) == (first, last)
    assert encoder.channels == last
    assert encoder(torch.zeros(2, 3, 32, 64)).shape == (2, last, 1, 2)
