"""The ServerApp's errors: one line of ours, and nothing of Flower's about the same."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedsilo.core.errors import RunDirectoryError, SettingError, SiteError
from fedsilo.core.processes import LAUNCH
from fedsilo.core.settings_schema import Value
from fedsilo.server_app import app as module
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.run import meeting, runner, survey


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


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Play a meeting, a survey and a run, and return the names of those that begin."""
    names: list[str] = []
    monkeypatch.setattr(meeting, "write_meeting", lambda *_: names.append("meet"))
    monkeypatch.setattr(survey, "run_survey", lambda *_: names.append("survey"))

    def run(grid: object, settings: object, launch: dict[str, Any]) -> RunDirectory:
        names.append(f"train {launch.get('engine', '')}".strip())
        return RunDirectory(Path("my runs/r"))

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.delenv(LAUNCH, raising=False)
    return names


class DeployedGrid:
    """A grid that is not a simulation's."""


def _main(**settings: Value) -> None:
    values = {key.replace("_", "."): value for key, value in settings.items()}
    module.main(DeployedGrid(), Context(1, 1, {}, RecordDict(), values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("purpose", "name"), [("meet", "meet"), ("survey", "survey"), ("train", "train")]
)
def test_the_purpose_of_a_run_says_what_is_done(
    purpose: str, name: str, begun: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _main(run_purpose=purpose)
    assert begun == [name]
    drawn = "fedsilo plot 'my runs/r'" in capsys.readouterr().out
    assert drawn is (purpose == "train"), "'flwr run' by hand draws no pictures"


def test_a_run_of_an_engine_leaves_its_pictures_to_it(
    begun: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LAUNCH, json.dumps({"engine": "ray"}))
    _main()
    assert begun == ["train ray"]
    assert capsys.readouterr().out == ""


def test_an_error_of_the_system_is_one_line_and_a_fault_of_the_run_directory(
    begun: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fill(*_: object) -> None:
        raise OSError(28, "No space left on device", "/runs/r/metrics.csv")

    monkeypatch.setattr(runner, "run", fill)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    with pytest.raises(RunDirectoryError) as full:
        _main()
    assert "/runs/r/metrics.csv" in str(full.value)
    assert caplog.records[-1].getMessage() == f"fedsilo: {full.value}"
