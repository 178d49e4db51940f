"""Optimisers without torch._dynamo: the same bits, and no import of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedsilo.client_app.training.eager_optimisers import eager

KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def _trained(kind: type[torch.optim.Optimizer], steps: int) -> tuple[list[Tensor], dict]:
    torch.manual_seed(1)
    layer = nn.Linear(3, 2)
    optimiser = kind(layer.parameters(), lr=0.1, weight_decay=0.01)
    for step in range(steps):
        optimiser.zero_grad()
        layer(torch.full((4, 3), float(step))).square().sum().backward()
        optimiser.step()
    return [p.detach() for p in layer.parameters()], optimiser.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_an_eager_optimiser_trains_to_the_same_bits(kind: type[torch.optim.Optimizer]) -> None:
    ours, state = _trained(eager(kind), 5)
    theirs, expected = _trained(kind, 5)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert state.keys() == expected.keys()
    assert str(state) == str(expected)


def test_a_step_of_an_eager_optimiser_does_not_import_dynamo() -> None:
    code = (
        "import sys, torch\n"
        "from fedsilo.client_app.training.eager_optimisers import eager\n"
        "weight = torch.ones(1, requires_grad=True)\n"
        "optimiser = eager(torch.optim.Adam)([weight])\n"
        "optimiser.zero_grad(); weight.sum().backward(); optimiser.step()\n"
        "optimiser.load_state_dict(optimiser.state_dict())\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout.strip() == "False"
