from __future__ import annotations

import pytest
import torch

from models.networks.encoders import float_inputs


def test_8_bit_images_are_scaled_to_minus_one_to_one_and_other_inputs_are_left() -> None:
    found = float_inputs(torch.tensor([0, 51, 255], dtype=torch.uint8))
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([-1.0, -0.6, 1.0])
    for rows in (torch.tensor([0.0, 255.0]), torch.tensor([3], dtype=torch.int64)):
        assert float_inputs(rows) is rows
