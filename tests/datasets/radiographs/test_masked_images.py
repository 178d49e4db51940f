import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.radiographs.masked_images import (
    MASK_CLASSES,
    load_masked_silo,
    masked_data_sets,
    masked_silo,
)
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.networks.kinds import NetworkShape
from tests.support.errors import refuses


def split(count: int) -> Split:
    """Return images of two channels, of which the last is image number modulo 2."""
    inputs = torch.zeros(count, 2, 3, 3, dtype=torch.uint8)
    inputs[:, 0] = 7
    inputs[:, 1] = (torch.arange(count) % 2)[:, None, None]
    return Split(inputs, torch.zeros(count, dtype=torch.int64))


def test_the_last_channel_becomes_the_mask_and_the_others_stay_the_image() -> None:
    silo = Silo("north", "north", NetworkShape((2, 3, 3), 1), split(3), split(0), split(2), {})
    masked = masked_silo(silo)
    assert (masked.name, masked.classes) == ("north", MASK_CLASSES)
    assert {name: len(part) for name, part in masked.splits().items()} == {
        "train": 3,
        "val": 0,
        "test": 2,
    }
    assert masked.train.inputs.shape == (3, 1, 3, 3)
    assert (masked.train.inputs == 7).all()
    assert masked.train.labels.dtype == torch.uint8
    assert masked.train.labels[:, 1, 1].tolist() == [0, 1, 0]
    assert (masked.val.inputs.shape, masked.val.labels.shape) == ((0, 1, 3, 3), (0, 3, 3))


def test_a_data_set_without_masks_is_answered_with_those_that_have_some(tmp_path: Path) -> None:
    names = ["angiogram-phantom", "endovascular", "masks", "vessels-synthetic"]
    assert masked_data_sets() == names
    said = f"data set 'digits' has no masks: take one of {', '.join(names)}"
    with pytest.raises(DataError, match=f"^{re.escape(said)}$"):
        load_masked_silo("any", CommonSettings(dataset="digits"), Places(None, tmp_path))
    with refuses(SettingError, "angiogram"):
        load_masked_silo("any", CommonSettings(dataset="angiogram"))


def test_masked_silos_lie_where_the_settings_say_unless_places_are_given(tmp_path: Path) -> None:
    settings = CommonSettings(
        dataset="angiogram-phantom",
        image_size=16,
        sample_share=0.01,
        cache_dir=str(tmp_path / "own"),
    )
    first = load_masked_silo("human", settings)
    assert (tmp_path / "own").is_dir()
    again = load_masked_silo("human", settings, Places(None, tmp_path / "other"))
    for part, other in zip(first.splits().values(), again.splits().values(), strict=True):
        assert np.array_equal(part.inputs, other.inputs)
        assert np.array_equal(part.labels, other.labels)
