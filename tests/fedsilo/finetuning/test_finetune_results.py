"""Overlays of segmentation: which images, which colours, which captions."""

import torch

from fedsilo.finetuning.finetune_results import (
    FALSE,
    HIT,
    MISSED,
    colour_masks,
    draw_overlays,
    spread_rows,
)


def test_the_first_images_of_each_site_are_drawn_before_any_second() -> None:
    origin = ["a", "a", "a", "b", "c", "c"]
    assert spread_rows(origin, 3) == [0, 3, 4]
    assert spread_rows(origin, 4) == [0, 1, 3, 4]
    assert spread_rows(origin, 5) == [0, 1, 3, 4, 5]
    assert spread_rows(origin, 9) == [0, 1, 2, 3, 4, 5]


def test_hits_misses_and_false_marks_have_their_colours_and_the_rest_is_clear() -> None:
    found, truth = torch.tensor([[1, 1, 0, 0]]), torch.tensor([[1, 0, 1, 0]])
    layer = colour_masks(found, truth)[0]
    for pixel, colour in zip(layer, (HIT, FALSE, MISSED), strict=False):
        assert torch.equal(pixel[:3], torch.tensor(colour))
        assert pixel[3] > 0
    assert layer[3, 3] == 0


def test_a_sheet_has_a_row_per_image_and_a_column_per_start() -> None:
    images = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    masks = torch.zeros(2, 4, 4, dtype=torch.uint8)
    masks[0, 0] = 1
    half = torch.zeros(2, 4, 4, dtype=torch.int64)
    half[0, 0, :2] = 1
    found = {"run": masks, "scratch": half}
    figure = draw_overlays(images, masks, found, ["a, test row 0", "b, test row 0"], "title")
    panels = [figure.axes[:4], figure.axes[4:]]
    assert [axes.get_title() for axes in panels[0]] == ["image", "truth", "run", "scratch"]
    captions = [[axes.get_xlabel() for axes in row] for row in panels]
    assert captions == [
        ["a, test row 0", "", "Dice 1.00", "Dice 0.67"],
        ["b, test row 0", "(no catheter)", "(rightly none)", "(rightly none)"],
    ]
    assert [[len(axes.images) for axes in row] for row in panels] == [[1, 2, 2, 2]] * 2


def test_a_large_image_is_drawn_smaller_and_its_mask_lies_on_it() -> None:
    side = 1200
    images = torch.zeros(1, 1, side, side, dtype=torch.uint8)
    masks = torch.ones(1, side, side, dtype=torch.uint8)
    figure = draw_overlays(images, masks, {"run": masks}, ["a"], "title")
    image, layer = figure.axes[1].images
    assert image.get_extent() == layer.get_extent()
