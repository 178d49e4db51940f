"""What needs a GPU: ``make test-gpu`` on a machine with one; elsewhere these tests are skipped."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder where PyTorch finds no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: make test-gpu"))
