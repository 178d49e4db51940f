"""What attacks need: Flower's Message outside a ServerApp, a hospital, and one that lies."""

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from tests.support.hospital import Hospital
from tests.support.identity import flower_names  # noqa: F401

APP = importlib.import_module(
    "fedsilo.client_app.app"
)  # the package has its app by the module's name
Alter = Callable[[RecordDict], None]


@pytest.fixture
def hospital(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Hospital]:
    """Return a builder of a real hospital under its defaults: run config, site, node config.

    The seeds of a hospital's own noise are the same in each run of a test, because drawn noise is
    now and then 0.
    """
    monkeypatch.setattr("secrets.randbits", random.Random(53).getrandbits)

    def make(
        site: str = "cleveland",
        node: dict[str, Any] | None = None,
        unchecked: dict[str, Any] | None = None,
        **run: Any,
    ) -> Hospital:
        named = {key.replace("__", ".").replace("_", "-"): value for key, value in run.items()}
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
