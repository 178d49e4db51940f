"""Both sides of a method: the fixtures of the sites' tests and those of the server's."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.client_app.conftest import (
    _forgotten,
    common,
    context,
    message,
    opened,
    resolved,
    silo,
    weights,
)
from tests.strategies.conftest import (
    answering,
    content,
    fake_app,
    measured,
    participants,
    recorder,
    shared_run,
    site_reply,
    spied_run,
    spy_grid,
    started,
    told,
)
from tests.support.identity import flower_names

__all__ = [
    "_forgotten",
    "answering",
    "common",
    "content",
    "context",
    "fake_app",
    "flower_names",
    "measured",
    "message",
    "opened",
    "participants",
    "recorder",
    "resolved",
    "shared_run",
    "silo",
    "site_reply",
    "spied_run",
    "spy_grid",
    "started",
    "told",
    "weights",
]


@pytest.fixture
def vit(tiny: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of a small prompted ViT."""
    wanted = ("network.name", "vit.backbone", "vit.prompt-length", "vit.basic-layers")
    return {key: value for key, value in tiny("fedevprompt").items() if key.startswith(wanted)}
