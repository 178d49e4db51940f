"""The example of a pretrained network: which array goes where, pixels as in pretraining, tokens."""

from pathlib import Path
from types import ModuleType

import pytest
import timm
import torch
from torch import Tensor

from tests.support.scripts import module_of

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "lite0.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return module_of(EXAMPLE)


@pytest.fixture(scope="module")
def published(example: ModuleType) -> dict[str, Tensor]:
    """Arrays of the package's form: other names, timm's order, counters among them."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        whole = timm.create_model(example.NAME, num_classes=1000).state_dict()
    named = enumerate(whole.items())
    return {f"_{place}.{name.rpartition('.')[2]}": array for place, (name, array) in named}


def test_an_encoder_with_the_packages_arrays_is_timms_network_up_to_stride_16(
    example: ModuleType, published: dict[str, Tensor]
) -> None:
    whole = timm.create_model(example.NAME, num_classes=1000)
    own = list(whole.state_dict())
    whole.load_state_dict(dict(zip(own, published.values(), strict=True)))
    network = example.build((3, 32, 32), 43)
    filled = network.load_state_dict(example.encoder_arrays(published), strict=False)
    assert filled.unexpected_keys == []
    assert {name.partition(".")[0] for name in filled.missing_keys if "tracked" not in name} == {
        "head"
    }
    images = 255 * torch.rand(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    maps = (images / 255 - 0.5) / 0.5  # as in the package's pretraining
    whole.eval()
    network.eval()
    with torch.no_grad():
        maps = whole.bn1(whole.conv_stem(maps))
        for stage in whole.blocks[:5]:
            maps = stage(maps)
        tokens = network.encode(images)
    assert tokens.shape == (2, network.tokens, network.channels) == (2, 9, 112)
    assert torch.allclose(tokens, maps.flatten(2).transpose(1, 2), atol=1e-4)


def test_images_of_32_pixels_give_as_many_tokens_and_logits_of_the_classes(
    example: ModuleType,
) -> None:
    network = example.build((3, 32, 32), 43)
    images = torch.zeros(2, 3, 32, 32)
    assert network.encode(images).shape == (2, 9, 112)
    assert network(images).shape == (2, 43)


def test_other_arrays_than_the_packages_are_refused(
    example: ModuleType, published: dict[str, Tensor]
) -> None:
    lacking = dict(list(published.items())[:-1])
    with pytest.raises(ValueError, match="246 arrays are not the 247 of tf_efficientnet_lite0"):
        example.encoder_arrays(lacking)
