"""``fedsilo watch``: a line, a live view, and one line for what cannot be watched."""

import io
import socket
from pathlib import Path

import pytest
from rich.console import Console

import fedsilo
from fedsilo.cli.main import main
from fedsilo.reports.watch.follow import render_view
from fedsilo.server_app.records.progress import FILE
from tests.fedsilo.reports.watch.test_view import written


def _refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["watch", *arguments]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    return told


def test_once_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(written(tmp_path / "trial")), "--once"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("trial: running, round 2 of 3")
    assert printed.count("\n") == 1


def test_a_run_that_is_over_is_shown_and_the_command_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(written(tmp_path / "trial", state="finished"))]) == 0
    printed = capsys.readouterr().out
    assert "trial: finished" in printed
    assert "north" in printed


def test_a_folder_of_runs_is_shown_by_its_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSILO_RUNS", str(tmp_path))
    assert main(["watch", "--once"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: no run yet\n"
    for name in ("trial", "other"):
        (written(tmp_path / name) / ".lock").touch()
    view = fedsilo.watch(tmp_path)()
    assert view.line() == f"{tmp_path}: 2 runs, 2 running"
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render_view(view, 120))
    assert "trial" in console.export_text()


def test_what_cannot_be_watched_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path / "trial")
    assert "there is no deployment in" in _refused(["--deployment", str(tmp_path)], capsys)
    assert "error[run-directory]" in _refused([str(tmp_path / "nowhere")], capsys)
    assert "name either" in _refused([str(run), "--deployment", str(tmp_path)], capsys)
    assert "--port" in _refused([str(run), "--address", "0.0.0.0"], capsys)
    assert "give only one of them" in _refused([str(run), "--once", "--port", "0"], capsys)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port} is in use" in _refused([str(run), "--port", port], capsys)
    text = (run / FILE).read_text()
    (run / FILE).write_text(text.replace('"version": 1', '"version": 7'))
    said = _refused([str(run)], capsys)
    assert "error[run-directory]" in said
    assert "'version'" in said
