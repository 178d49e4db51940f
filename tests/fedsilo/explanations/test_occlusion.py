import torch
from torch import Tensor

from fedsilo.datasets.silo.silos import Split
from fedsilo.explanations.occlusion import explain_by_occlusion, occlusion
from tests.fedsilo.explanations.test_gradcam import CPU


class Corner(torch.nn.Module):
    """Answers 1 by how bright the four pixels at the top left are."""

    def forward(self, images: Tensor) -> Tensor:
        bright = images[:, 0, :2, :2].sum(dim=(1, 2))
        return torch.stack([torch.zeros_like(bright), bright], dim=1)


def test_only_the_place_that_the_answer_rests_on_has_a_value() -> None:
    image = torch.zeros(1, 1, 16, 12)
    image[:, :, :2, :2] = 1.0
    values = occlusion(Corner(), image, 1)  # type: ignore[arg-type]
    assert values.shape == (8, 6)
    mean = 4 / (16 * 12)
    fall = torch.sigmoid(torch.tensor(4.0)) - torch.sigmoid(torch.tensor(4 * mean))
    torch.testing.assert_close(values[0, 0], fall)
    assert values.flatten()[1:].abs().max() == 0


def test_an_image_of_odd_size_is_covered_and_explained_in_words() -> None:
    split = Split(torch.rand(2, 3, 17, 9), torch.zeros(2, dtype=torch.int64))
    found = explain_by_occlusion(Corner(), split, 1, "one", ["a", "b"], CPU)  # type: ignore[arg-type]
    assert found.saliency.values.shape == (6, 5)
    assert "rests most on row 1, column 1 of 6 x 5 squares" in found.lines()[-1]
