"""The attack on attention maps: its measures by hand, and what it finds where all is known."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from fedsilo.datasets.silo.silos import Split

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(SCRIPTS))  # one imports the other, as when it is run
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def attack() -> ModuleType:
    return script("attack_maps")


@pytest.fixture(scope="module")
def by_gradient() -> ModuleType:
    return script("attack_gradients")


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


def test_an_image_is_recognised_where_the_nearest_candidate_is_itself(
    by_gradient: ModuleType,
) -> None:
    candidates = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]])
    known = torch.tensor([[0.1, 0.9], [0.45, 0.55]])
    assert by_gradient.recognised(known, candidates, torch.tensor([0, 1])).tolist() == [True, False]


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


def test_cosine_distance_by_hand(by_gradient: ModuleType) -> None:
    """(1, 0, 1) and (1, 1, 0): cosine 1/2; the same direction at another length: 0."""
    first = [torch.tensor([1.0, 0.0]), torch.tensor([1.0])]
    second = [torch.tensor([1.0, 1.0]), torch.tensor([0.0])]
    assert by_gradient.cosine_distance(first, second).item() == pytest.approx(0.5)
    assert by_gradient.cosine_distance(first, [3 * a for a in first]).item() == pytest.approx(
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


def test_the_gradient_of_a_linear_layer_gives_its_image_back(by_gradient: ModuleType) -> None:
    """Its gradient is the errors of the outputs times (pixels, 1): the direction is the image."""
    torch.manual_seed(0)
    image = torch.tensor([[[[0.5, 0.5], [-0.5, 0.0]]]])
    found = by_gradient.inverted(Linear(4), image, torch.tensor([1]), torch.zeros_like(image), 300)
    assert torch.allclose(found, image, atol=0.05)


def test_the_image_of_a_gradient_and_those_of_a_batch_are_found_in_an_archive(
    by_gradient: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a linear layer gradients are the outputs' errors times (pixels, 1)."""
    torch.manual_seed(0)
    inputs = torch.randn(6, 1, 3, 3, generator=torch.Generator().manual_seed(1))
    archive = Split(inputs, torch.tensor([0, 1, 0, 1, 0, 1]))
    rows = torch.tensor([4, 1, 3])
    monkeypatch.setattr(by_gradient, "BATCH", 2)
    found = dict(by_gradient.by_archive(Linear(9), archive, rows, count=3))
    assert found["one image: nearest gradient"].tolist() == [True, True, True]
    assert found["2 images: least squares"].tolist() == [True, True]


def test_least_squares_names_those_of_a_batch_and_not_the_nearest(by_gradient: ModuleType) -> None:
    """The mean of (1, 0, 0) and (0, 1, 0) is nearer to (1, 1, 0.1), which is not in the batch."""
    known = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.1]])
    mean = torch.tensor([0.5, 0.5, 0.0])
    assert by_gradient.in_batch(mean, known, torch.tensor([0, 1])).tolist() == [True, True]
    assert by_gradient.in_batch(mean, known, torch.tensor([0, 2])).tolist() == [True, False]


def test_members_are_those_whose_gradients_oppose_the_update(by_gradient: ModuleType) -> None:
    """Cosines with -(1, 0): members 1 and 0, others -1 and 0.6, so 3 of 4 pairs are in order."""
    each = torch.tensor([[-2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [-0.6, 0.8]])
    update = torch.tensor([1.0, 0.0])
    assert by_gradient.member_auc(each, update, 2).item() == pytest.approx(0.75)
