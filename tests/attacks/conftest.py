"""What attacks need: Flower's Message outside a ServerApp, a hospital, and one that lies."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsilo.server_app.run.inline_engine import flower_identity
from tests.support.hospital import Hospital
from tests.support.keys import as_keys

APP = importlib.import_module(
    "fedsilo.client_app.app"
)  # the package has its app by the module's name
Alter = Callable[[RecordDict], None]


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
        named = as_keys(run)
        return Hospital(tmp_path / "own", named, site, dict(node or {}), unchecked or {})

    return make


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that has what some nodes answer altered before it leaves."""
    honest: ClientApp = APP.app

    def install(alter: Alter, *liars: int) -> None:
        def app(message: Message, context: Context) -> Message:
            reply = honest(message, context)
            if context.node_config.get("partition-id") in (liars or (2,)) and reply.has_content():
                alter(reply.content)
            return reply

        monkeypatch.setattr(APP, "app", app)

    return install
