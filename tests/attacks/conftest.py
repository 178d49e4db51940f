"""What every attack needs: Flower's Message outside a ServerApp, and a hospital."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsilo.server_app.run.inline_engine import flower_identity
from tests.support.hospital import Hospital


@pytest.fixture(autouse=True, scope="module")
def _identity() -> Iterator[None]:
    with flower_identity():
        yield


@pytest.fixture
def hospital(tmp_path: Path) -> Callable[..., Hospital]:
    """Return a builder of a real hospital under its defaults: run config, site, node config."""

    def make(
        site: str = "cleveland",
        node: dict[str, Any] | None = None,
        unchecked: dict[str, Any] | None = None,
        **run: Any,
    ) -> Hospital:
        named = {key.replace("__", ".").replace("_", "-"): value for key, value in run.items()}
        return Hospital(tmp_path / "own", named, site, dict(node or {}), unchecked or {})

    return make
