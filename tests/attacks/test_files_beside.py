"""Files that a command meets besides the run's own: logs, searches, secrets, a deployment's file.

Each is read or refused in one line, at once, also if it is a pipe or holds lists within lists.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedsilo.cli.main import main
from fedsilo.comparison.budgets import tuned_over
from fedsilo.comparison.trials import _read_summary
from fedsilo.core.errors import FedsiloError, RunDirectoryError
from fedsilo.deployment.deployment import DeploymentError, plan, read_deployment
from fedsilo.deployment.doctor.credentials import CERTIFICATE, check_secret
from fedsilo.deployment.doctor.findings import Refused
from fedsilo.deployment.doctor.server import _refuse_damaged
from fedsilo.deployment.flower_commands import is_healthy
from fedsilo.deployment.worker import hospital
from fedsilo.reports.hospital_files import read_audit_log, read_own_site_file
from fedsilo.reports.survey.document import read_survey_document
from fedsilo.reports.watch.view import look_at_run
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.progress import read_progress
from fedsilo.server_app.run.meeting import read_meeting

# Nobody ever writes to the pipes of these tests, so a reader that waits for one waits for good. The
# limit is far above what the slowest test takes, which starts Python and imports Flower
_SECONDS = 300


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """Fail a test that waits for a pipe, which would otherwise never end."""

    def end(*_: object) -> None:
        pytest.fail("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def tuned(path: Path) -> int:
    """Read the file as what a search has chosen."""
    settings = resolve(
        {"method": "local", "dataset": "heart-synthetic", "run.out": str(path.parent)}
    )
    folder = path.parent / "tune-local"
    folder.mkdir()
    path.rename(folder / "chosen.json")
    return tuned_over(settings, "local")


def answered(path: Path) -> bool:
    """Look whether a server answers whose authority is in the file."""
    made = plan(path.parent, ["north"], [8000, 9092, 9101], {})
    made.secrets.mkdir()
    path.rename(made.secrets / "ca.crt")
    return is_healthy(made)


READERS: dict[str, Callable[[Path], object]] = {
    "audit log": read_audit_log,
    "site file": read_own_site_file,
    "a search's choice": tuned,
    "a trial's summary": _read_summary,
    "a survey": read_survey_document,
    "a meeting": read_meeting,
    "a certificate": lambda path: check_secret(path, CERTIFICATE, private=False),
    "a database": _refuse_damaged,
    "an authority": answered,
}


@pytest.mark.parametrize("what", READERS)
def test_a_pipe_is_not_waited_for(what: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    os.mkfifo(path)
    if what == "a search's choice":
        assert READERS[what](path) == 0
        return
    with pytest.raises((FedsiloError, Refused), match="is not a file"):
        READERS[what](path)


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_a_server_without_its_authority_s_certificate_is_told_in_a_line(
    text: str | None, tmp_path: Path
) -> None:
    made = plan(tmp_path, ["north"], [8000, 9092, 9101], {})
    made.secrets.mkdir()
    if text is not None:
        (made.secrets / "ca.crt").write_text(text)
    with pytest.raises(DeploymentError, match=r"ca\.crt"):
        is_healthy(made)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"chosen": {}, "budget": {"trials": 1e999}}'])
@pytest.mark.parametrize("what", ["audit log", "a search's choice", "a survey", "a meeting"])
def test_lists_within_lists_and_endless_numbers_are_no_traceback(
    what: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    if what == "a search's choice":
        assert READERS[what](path) == 0
        return
    with pytest.raises(FedsiloError):
        READERS[what](path)


NUMBERS = ("sites.va.bytes-down", "server-memory-bytes", "round", "left-out", "seed", "pid")


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_of_progress_that_no_run_has_is_refused(key: str, tmp_path: Path) -> None:
    now = "2026-01-01T00:00:00Z"
    document = {
        "run": "a",
        "title": "a",
        "method": "fedavg",
        "dataset": "heart",
        "seed": 1,
        "pid": 1,
        "process-started": 1.0,
        "started": now,
        "updated": now,
        "state": "finished",
        "sites": {"va": {"bytes-down": 1}},
    }
    path = tmp_path / "progress.json"
    path.write_text(json.dumps(document))
    assert look_at_run(tmp_path).site_rows()
    *parents, last = key.split(".")
    place: dict[str, object] = document
    for parent in parents:
        place = place[parent]  # type: ignore[assignment]
    place[last] = 10**400
    path.write_text(json.dumps(document))
    with pytest.raises(RunDirectoryError, match="was altered"):
        read_progress(tmp_path)


@pytest.mark.parametrize("name", ["../../../outside", "a/b", "\x1b[2J", "all", "server"])
@pytest.mark.parametrize("part", ["node_config", "nodes"])
def test_a_name_of_a_deployment_that_is_no_site_is_refused(
    part: str, name: str, tmp_path: Path
) -> None:
    plan(tmp_path, ["north"], [8000, 9092, 9101], {}).write()
    path = tmp_path / "deployment.json"
    document = json.loads(path.read_text())
    document[part][name] = {} if part == "node_config" else "1"
    document["ports"][name] = 9102
    path.write_text(json.dumps(document))
    with pytest.raises(DeploymentError, match="was altered") as refused:
        read_deployment(tmp_path)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("ports", [{}, {"http": 8000, "fleet": 0, "north": 1}, {"http": 10**30}])
def test_a_deployment_that_lacks_a_port_is_refused(ports: dict[str, int], tmp_path: Path) -> None:
    plan(tmp_path, ["north"], [8000, 9092, 9101], {}).write()
    path = tmp_path / "deployment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ports": ports}))
    with pytest.raises(DeploymentError, match="was altered"):
        read_deployment(tmp_path)


def test_no_process_of_ours_imports_a_module_that_lies_beside_a_kit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    for module in ("yaml", "flwr", "typer", "numpy"):
        text = f"from pathlib import Path\nPath({str(tmp_path / 'RAN')!r}).touch()\nraise OSError\n"
        (tmp_path / f"{module}.py").write_text(text)
    with pytest.raises(SystemExit):
        main(["--version"])
    words = [sys.executable, "-m", hospital.__name__, "--help"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert not (tmp_path / "RAN").exists(), "a module beside the kit was executed"
    assert done.returncode == 0, done.stderr
