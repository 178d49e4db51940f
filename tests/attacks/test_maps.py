"""The attack on attention maps: its measures by hand, and what it finds where all is known."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "attack_maps.py"


@pytest.fixture(scope="module")
def attack() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attack_maps", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_psnr_of_a_tenth_off_everywhere_is_20_db(attack: ModuleType) -> None:
    image = torch.full((1, 1, 8, 8), 0.5)
    assert attack.psnr(image, image + 0.1).tolist() == [pytest.approx(20.0, abs=1e-4)]


def test_ssim_of_an_image_with_itself_is_1_and_of_two_even_ones_by_hand(
    attack: ModuleType,
) -> None:
    image = torch.rand(1, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    assert attack.ssim(image, image).item() == pytest.approx(1.0, abs=1e-5)
    dark, light = torch.full((1, 1, 9, 9), 0.2), torch.full((1, 1, 9, 9), 0.6)
    expected = (2 * 0.2 * 0.6 + 1e-4) / (0.2**2 + 0.6**2 + 1e-4)  # no variance, no covariance
    assert attack.ssim(dark, light).item() == pytest.approx(expected, abs=1e-4)


def test_an_image_is_recognised_where_the_nearest_candidate_is_itself(attack: ModuleType) -> None:
    candidates = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]])
    known = torch.tensor([[0.1, 0.9], [0.45, 0.55]])
    assert attack.recognised(known, candidates, torch.tensor([0, 1])).tolist() == [True, False]


def test_ridge_of_one_feature_by_hand(attack: ModuleType) -> None:
    """x -1 and 1 of spread 1, y 0 and 4: slope 4 / (2 + weight), mean 2."""
    x, y = torch.tensor([[-1.0], [1.0]]).double(), torch.tensor([[0.0], [4.0]]).double()
    for weight, slope in ((0.0, 2.0), (2.0, 1.0)):
        found = attack.ridge(x, y, weight)(torch.tensor([[3.0]]).double())
        assert found.item() == pytest.approx(2 + 3 * slope)


def test_images_that_are_linear_in_their_maps_are_given_back(attack: ModuleType) -> None:
    """Two cells: the one pixel is the first cell's attention."""
    first = torch.linspace(0.1, 0.9, 40)
    maps = torch.stack([first, 1 - first], dim=1)
    decode = attack.decoder(maps, first.reshape(-1, 1, 1, 1))
    found = decode(torch.tensor([[0.3, 0.7]]))
    assert found.shape == (1, 1, 1, 1)
    assert found.item() == pytest.approx(0.3, abs=0.01)


def test_cosine_distance_by_hand(attack: ModuleType) -> None:
    """(1, 0, 1) and (1, 1, 0): cosine 1/2; the same direction at another length: 0."""
    first = [torch.tensor([1.0, 0.0]), torch.tensor([1.0])]
    second = [torch.tensor([1.0, 1.0]), torch.tensor([0.0])]
    assert attack.cosine_distance(first, second).item() == pytest.approx(0.5)
    assert attack.cosine_distance(first, [3 * a for a in first]).item() == pytest.approx(
        0, abs=1e-6
    )


class Linear(nn.Module):
    """One linear layer in the place of a ViT."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.layer = nn.Linear(pixels, 2)
        self.criterion = nn.CrossEntropyLoss()

    def encode_with_rollout(self, inputs: Tensor) -> tuple[Tensor, None]:
        return inputs.flatten(1), None

    def classify(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.layer(tokens)
        return outputs


def test_the_gradient_of_a_linear_layer_gives_its_image_back(attack: ModuleType) -> None:
    """Its gradient is the errors of the outputs times (pixels, 1): the direction is the image."""
    torch.manual_seed(0)
    image = torch.tensor([[[[0.5, 0.5], [-0.5, 0.0]]]])
    found = attack.inverted(Linear(4), image, torch.tensor([1]), torch.zeros_like(image), 300)
    assert torch.allclose(found, image, atol=0.05)


def test_the_nearest_gradient_is_that_of_the_image_itself(attack: ModuleType) -> None:
    """Of a linear layer gradients point as (pixels, 1), or the other way for the other label."""
    torch.manual_seed(0)
    inputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1]]).reshape(3, 1, 1, 2)
    labels, rows = torch.tensor([0, 0, 0]), torch.tensor([2, 0])
    assert attack.by_gradient(Linear(2), inputs, labels, rows).tolist() == [True, True]
