"""``fedsilo watch``: a line, a live view, and one line for what cannot be watched."""

import socket
from pathlib import Path

import pytest

from fedsilo.cli.main import main
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


def test_what_cannot_be_watched_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path / "trial")
    assert "there is no deployment in" in _refused(["--deployment", str(tmp_path)], capsys)
    assert "it is not a run directory" in _refused([str(tmp_path)], capsys)
    assert "name either a run directory, a deployment" in _refused([], capsys)
    assert "name either a run directory, a deployment" in _refused(
        [str(run), "--deployment", str(tmp_path)], capsys
    )
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
