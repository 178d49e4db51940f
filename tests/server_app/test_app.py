"""The ServerApp's errors: one line of ours, and nothing of Flower's about the same."""

import logging
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedsilo.core.errors import SettingError, SiteError
from fedsilo.server_app import app as module


class InMemoryGrid:
    """A grid of the name that Flower's simulation has, with two nodes."""

    def get_node_ids(self) -> list[int]:
        return [1, 2]


@pytest.fixture(autouse=True)
def _unchanged_log() -> Any:
    log = logging.getLogger("flwr")
    before = list(log.filters)
    yield
    log.filters[:] = before


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"rounds": 0}, "at least 1"), ({"train.initial-weights": "none.pt"}, "'none.pt'")],
)
def test_an_error_of_the_app_is_one_line(
    settings: dict[str, Any],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("flwr")
    monkeypatch.setattr(log, "propagate", True)
    context = Context(1, 1, {}, RecordDict(), settings)
    with pytest.raises((SettingError, SiteError)) as raised:
        module.main(InMemoryGrid(), context)  # type: ignore[arg-type]
    log.error("Simulation raised an exception", exc_info=raised.value)  # as Flower does
    log.error("Exit Code: 700")
    first, *errors = caplog.records
    assert "loading PyTorch" in first.getMessage(), "something is said before anything is loaded"
    assert [told in record.getMessage() for record in errors] == [True]
    log.error("another", exc_info=ValueError("of nobody's"))
    assert len(caplog.records) == 3
