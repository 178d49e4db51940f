"""What masks are worth, by numbers one can check by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.functional.classification import multiclass_jaccard_index
from torchmetrics.functional.segmentation import dice_score

from fedsilo.models.measures.segmentation_metrics import image_dice, overlaps, segmentation_metrics


def mask(*ones: int) -> Tensor:
    """Return a mask (2, 4) that is 1 at ``ones``, counted along the rows."""
    found = torch.zeros(8, dtype=torch.uint8)
    found[list(ones)] = 1
    return found.reshape(2, 4)


def test_segmentation_metrics_of_two_images_by_hand() -> None:
    truth = torch.stack([mask(0, 1, 2), mask(4), mask(), mask(), mask(7)])
    found = torch.stack([mask(1, 2, 3), mask(4), mask(), mask(5), mask()])
    counts = overlaps(found, truth)
    assert counts.tolist() == [
        [2, 1, 4, 1],
        [1, 0, 7, 0],
        [0, 0, 8, 0],
        [0, 1, 7, 0],
        [0, 0, 7, 1],
    ]
    assert torch.equal(overlaps(found[:1], truth[:1]), counts[:1])
    assert image_dice(counts).tolist() == pytest.approx([2 / 3, 1, math.nan, 0, 0], nan_ok=True)
    # Hit 3, falsely marked 2, missed 2, rightly unmarked 33; the third image counts nowhere but
    # in the pixels
    assert segmentation_metrics(found, truth) == pytest.approx(
        {
            "dice": (2 / 3 + 1) / 4,
            "jaccard": (2 / 4 + 1) / 4,
            "dice-pooled": 6 / 10,
            "miou": (3 / 7 + 33 / 37) / 2,
        }
    )


def test_without_any_catheter_only_the_background_is_measured() -> None:
    empty = torch.zeros(2, 3, 3, dtype=torch.uint8)
    assert segmentation_metrics(empty, empty) == {"miou": 1.0}
    everywhere = torch.ones(2, 3, 3, dtype=torch.uint8)
    assert segmentation_metrics(everywhere, empty) == {
        "dice": 0,
        "jaccard": 0,
        "dice-pooled": 0,
        "miou": 0,
    }


@given(
    bits=st.lists(st.booleans(), min_size=36, max_size=36),
    others=st.lists(st.booleans(), min_size=36, max_size=36),
)
def test_segmentation_metrics_equal_those_of_torchmetrics(
    bits: list[bool], others: list[bool]
) -> None:
    found, truth = (torch.tensor(x).reshape(4, 3, 3).int() for x in (bits, others))
    metrics = segmentation_metrics(found, truth)
    each = dice_score(
        found.long(),
        truth.long(),
        2,
        include_background=False,
        average="none",
        input_format="index",
        aggregation_level="samplewise",
    )
    known = each[~each.isnan()]
    if len(known):
        assert metrics["dice"] == pytest.approx(known.mean().item(), abs=1e-6)
    else:
        assert "dice" not in metrics
    if truth.any() and not truth.all():
        miou = multiclass_jaccard_index(found, truth, 2, average="macro").item()
        assert metrics["miou"] == pytest.approx(miou, abs=1e-6)
