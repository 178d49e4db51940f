"""A fixture for tests that make messages themselves; who imports it has it in all of its tests."""

from collections.abc import Iterator

import pytest

from fedsilo.engines.inline_engine import flower_identity


@pytest.fixture(autouse=True, scope="module")
def flower_names() -> Iterator[None]:
    """Let Flower's Message constructor work outside a ServerApp."""
    with flower_identity():
        yield
