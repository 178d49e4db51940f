"""The options of the commands that draw."""

from typing import get_args

import pytest

from fedsilo.api.drawing import parse_rows
from fedsilo.api.options import Layer, Split
from fedsilo.core.errors import SettingError
from fedsilo.datasets.silo.silos import SPLITS
from fedsilo.explanations.embeddings import LAYERS


def test_rows_are_numbers_with_commas() -> None:
    assert parse_rows("0,3, 7") == [0, 3, 7]
    for wrong in ("", "0,,1", "-1", "a", "1.5"):
        with pytest.raises(SettingError, match="must be row numbers counted from 0, such as 0,3,7"):
            parse_rows(wrong)


def test_the_choices_are_those_that_there_are() -> None:
    assert get_args(Layer) == LAYERS
    assert get_args(Split) == SPLITS
