"""An image explained by either kind of map: in words, as a document, as a picture."""

import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from fedsilo.explanations.attention import rollout_map
from fedsilo.explanations.image_explanation import (
    ImageExplanation,
    SaliencyMap,
    draw_image,
    draw_map,
    explain_logits,
)
from fedsilo.explanations.saliency_maps import cam_map

NAMES = ["zero", "one"]


def explained(saliency: SaliencyMap, **changes: Any) -> ImageExplanation:
    facts: dict[str, Any] = {
        "title": "s1a, test row 4: truth one",
        "image": torch.full((1, 4, 6), 255, dtype=torch.uint8),
        "saliency": saliency,
        "classes": NAMES,
        "probabilities": [0.25, 0.75],
        "beliefs": [0.0, 0.5],
        "vacuity": 0.5,
    }
    return ImageExplanation(**facts | changes)


def corner(value: float = 1.0) -> torch.Tensor:
    cells = torch.zeros(2, 3)
    cells[1, 2] = value
    return cells


ROLLOUT, CAM = rollout_map(corner()), cam_map(corner(4.0), 1, NAMES)


@pytest.mark.parametrize(
    ("saliency", "place"),
    [
        (ROLLOUT, "looked most at row 2, column 3 of 2 x 3 patches"),
        (CAM, "Grad-CAM: most for one at row 2, column 3 of 2 x 3"),
    ],
)
def test_an_explanation_in_words_by_hand(saliency: SaliencyMap, place: str) -> None:
    assert explained(saliency).lines() == [
        "s1a, test row 4: truth one",
        "zero: probability 0.250, belief 0.000",
        "one: probability 0.750, belief 0.500",
        "vacuity 0.500 (1: no evidence at all)",
        place,
    ]


def test_a_network_without_evidence_has_no_beliefs_and_a_map_may_be_empty() -> None:
    empty = cam_map(torch.zeros(2, 3), 0, NAMES)
    plain = explained(empty, beliefs=[], vacuity=None)
    assert plain.lines()[1:] == [
        "zero: probability 0.250",
        "one: probability 0.750",
        "Grad-CAM: nothing in the last maps speaks for zero",
    ]
    assert plain.answer() == 1
    assert plain.uncertainty() == ("doubt", 0.25)
    assert explained(ROLLOUT).uncertainty() == ("vacuity", 0.5)


@pytest.mark.parametrize(
    ("saliency", "own"),
    [
        (ROLLOUT, {"rollout": [[0, 0, 0], [0, 0, 1]]}),
        (CAM, {"cam": [[0, 0, 0], [0, 0, 4]], "label": 1}),
    ],
)
def test_the_document_holds_everything_but_the_image(
    saliency: SaliencyMap, own: dict[str, Any]
) -> None:
    document = json.loads(json.dumps(explained(saliency).document()))
    expected = {
        "title": "s1a, test row 4: truth one",
        **own,
        "classes": NAMES,
        "probabilities": [0.25, 0.75],
        "beliefs": [0.0, 0.5],
        "vacuity": 0.5,
    }
    assert document == expected
    assert list(document) == list(expected), "in this order"


def test_answers_are_the_logits_and_with_a_prior_evidence() -> None:
    logits = torch.tensor([[1.0, 3.0]]).log()
    plain = explain_logits("t", torch.zeros(1, 1, 1), CAM, NAMES, logits, None)
    assert plain.probabilities == pytest.approx([0.25, 0.75])
    assert (plain.beliefs, plain.vacuity) == ([], None)
    sure = explain_logits("t", torch.zeros(1, 1, 1), CAM, NAMES, logits, torch.ones(2))
    assert sure.probabilities == pytest.approx([0.25, 0.75])
    assert sure.beliefs == pytest.approx([0, 0.5])
    assert sure.vacuity == pytest.approx(0.5)


def shown(image: Any) -> Any:
    return np.asarray(image.get_array())


@pytest.mark.parametrize(
    ("saliency", "heading"), [(ROLLOUT, "attention rollout"), (CAM, "Grad-CAM of one")]
)
def test_a_picture_is_the_image_and_the_image_under_its_map(
    saliency: SaliencyMap, heading: str
) -> None:
    explanation = explained(saliency)
    figure = explanation.figure()
    left, right = figure.axes
    assert [len(axes.images) for axes in (left, right)] == [1, 2]
    assert shown(left.images[0]).shape == (4, 6, 3)
    assert (shown(left.images[0]) == 1).all(), "255 is white, in all three colours"
    assert right.get_title() == heading
    assert (figure.get_suptitle() or "").splitlines() == explanation.lines()[:-1]
    map_ = right.images[1]
    assert shown(map_).shape == (4, 6)
    assert shown(map_).max() == pytest.approx(1)
    alpha = np.asarray(map_.get_alpha())
    assert alpha[0, 0] == 0, "what does not matter leaves the image clear"
    assert alpha[3, 5] == pytest.approx(0.65)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    assert picture.getvalue().startswith(b"\x89PNG")


@pytest.mark.parametrize("channels", [1, 3])
def test_a_map_is_drawn_over_its_image_at_the_images_size(channels: int) -> None:
    image = torch.linspace(-1, 1, 8 * 8).reshape(1, 8, 8).repeat(channels, 1, 1)
    axes = Figure().subplots()
    draw_map(axes, image, rollout_map(torch.tensor([[0.0, 0.0], [1.0, 0.0]])))
    under, over = axes.images
    pixels = shown(under)
    assert pixels.shape == (8, 8, 3)
    assert pixels[0, 0] == pytest.approx([0, 0, 0])
    assert pixels[-1, -1] == pytest.approx([1, 1, 1])
    drawn = shown(over)
    assert drawn.shape == (8, 8)
    assert np.unravel_index(drawn.argmax(), drawn.shape) in [(r, c) for r in (6, 7) for c in (0, 1)]
    assert drawn[-1, 0] == pytest.approx(1.0)
    assert drawn[:4, 4:].max() < 0.2


def test_a_rollout_is_drawn_from_its_lowest_value_and_a_grad_cam_from_0() -> None:
    cells = torch.tensor([[0.2, 0.3], [0.2, 0.3]])
    rollout = rollout_map(cells).shares((2, 2))
    torch.testing.assert_close(rollout, torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    cam = cam_map(cells, 0, NAMES).shares((2, 2))
    torch.testing.assert_close(cam, torch.tensor([[2 / 3, 1.0], [2 / 3, 1.0]]))
    even = rollout_map(torch.full((2, 2), 0.25)).shares((4, 4))
    assert (even == 0).all(), "a ViT that looked everywhere alike leaves the image clear"


def test_images_are_drawn_by_their_own_range_and_no_larger_than_needed() -> None:
    axes = Figure().subplots()
    radiograph = torch.linspace(-32768, -30000, 2048 * 1024).reshape(1, 2048, 1024).to(torch.int16)
    draw_map(axes, radiograph, cam_map(torch.rand(4, 2), 0, NAMES))
    pixels = shown(axes.images[0])
    assert pixels.shape == (512, 256, 3)
    assert pixels[0, 0].max() < 0.01
    assert pixels[-1, -1].min() > 0.99
    assert shown(axes.images[1]).shape == (512, 256)
    draw_image(axes, torch.tensor([[[51]], [[102]], [[255]]], dtype=torch.uint8))
    assert shown(axes.images[2])[0, 0] == pytest.approx([0.2, 0.4, 1.0])
