import math

import pytest
import torch

from fedsilo.core.errors import SiteError
from fedsilo.models.privacy.gaussian_mechanism import clip_to_norm
from tests.support.errors import refuses


def test_clipped_to_shortens_all_arrays_as_one_vector() -> None:
    clipped = clip_to_norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}, 1.0)
    assert clipped["a"].tolist() == pytest.approx([0.6])
    assert clipped["b"].tolist() == [pytest.approx([0.8])]


def test_clipped_to_leaves_what_is_short_enough() -> None:
    assert clip_to_norm({"a": torch.tensor([3.0, 4.0])}, 5.0)["a"].tolist() == [3.0, 4.0]


def test_clipped_to_refuses_values_that_are_not_finite() -> None:
    with refuses(SiteError, "train.learning-rate"):
        clip_to_norm({"a": torch.tensor([1.0, math.nan])}, 1.0)
