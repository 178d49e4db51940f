"""What a survey counts: cells by hand, pictures by their pixels."""

import numpy as np
import pytest
import torch

from fedsilo.datasets.silo import measures
from fedsilo.datasets.silo.measures import Measure, picture_measures, unit_pixels

NAN = float("nan")


def test_cells_begin_at_their_edge_and_the_last_counts_who_lacks_a_value() -> None:
    values = {"train": np.array([-5.0, 0.0, 0.9, 1.0, 7.0, NAN])}
    assert Measure("age", values, (0.0, 1.0), may_lack=True).counts("train") == [1, 2, 2, 1]
    assert Measure("age", {"train": values["train"][:5]}, (0.0, 1.0)).counts("train") == [1, 2, 2]


def test_levels_are_counted_by_their_place() -> None:
    ward = Measure("ward", {"val": np.array([2.0, 0.0, 2.0])}, levels=("a", "b", "c"))
    assert ward.counts("val") == [1, 0, 2]


def test_without_edges_or_levels_there_is_no_histogram() -> None:
    assert not Measure("age", {"train": np.zeros(3)}).has_histogram


def test_an_empty_split_has_empty_cells() -> None:
    assert Measure("age", {"test": np.zeros(0)}, (0.0,)).counts("test") == [0, 0]


@pytest.mark.parametrize(
    ("dtype", "dark", "bright"), [(torch.uint8, 0, 255), (torch.int16, -32768, 32767)]
)
def test_a_picture_half_bright_has_both_a_half(dtype: torch.dtype, dark: int, bright: int) -> None:
    picture = torch.full((1, 1, 4, 4), dark, dtype=dtype)
    picture[:, :, :2] = bright
    pictures = {"train": picture, "test": picture[:0]}
    brightness, contrast = picture_measures(pictures, unit_pixels)
    assert brightness.values["train"] == pytest.approx([0.5])
    assert contrast.values["train"] == pytest.approx([0.5])
    assert len(brightness.values["test"]) == 0


def test_colours_are_counted_channel_by_channel_over_batches() -> None:
    pictures = torch.zeros(300, 3, 2, 2, dtype=torch.uint8)
    pictures[299, 1] = 255
    measures = picture_measures({"train": pictures}, unit_pixels)
    named = {measure.name: measure.values["train"] for measure in measures}
    assert list(named) == ["brightness", "contrast", "red", "green", "blue"]
    assert named["green"][299] == 1
    assert named["green"][:299].max() == named["red"].max() == 0
    assert named["brightness"][299] == pytest.approx(1 / 3)


def test_a_large_image_is_measured_by_rows_as_a_whole_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pictures = {"train": torch.randint(0, 256, (3, 3, 37, 20), dtype=torch.uint8)}
    whole = picture_measures(pictures, unit_pixels)
    monkeypatch.setattr(measures, "_NUMBERS", 3 * 20 * 5)  # seven times five rows, and two
    by_rows = picture_measures(pictures, unit_pixels)
    assert [one.name for one in by_rows] == [one.name for one in whole]
    for one, other in zip(by_rows, whole, strict=True):
        assert one.values["train"] == pytest.approx(other.values["train"], rel=1e-12)
