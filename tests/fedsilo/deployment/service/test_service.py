"""Units that systemd accepts, one command each to install and uninstall, and lines for journald."""

import io
import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fedsilo.cli.main import main
from fedsilo.core.errors import SettingError
from fedsilo.deployment.commands import make_secrets, prepare
from fedsilo.deployment.deployment import SERVER, Deployment, plan, read_deployment
from fedsilo.deployment.kit import AUTHORITY, KEY, KitError, make_kit, read_kit
from fedsilo.deployment.options import ServiceOptions
from fedsilo.deployment.service import installing, journal, serve
from fedsilo.deployment.service.changing import change_hospital_service, change_server_service
from fedsilo.deployment.service.journal import LogLines, RunningRuns, run_logged
from fedsilo.deployment.service.units import (
    ServiceError,
    Unit,
    build_hospital_unit,
    build_server_unit,
)
from fedsilo.server_app.records.progress import Progress, Status, write_progress

ANALYZE = shutil.which("systemd-analyze")


@pytest.fixture
def server(tmp_path: Path) -> Deployment:
    made = plan(tmp_path / "hearts", [], [8000, 9092], {}, "fl.example.org:9092")
    prepare(made)
    make_secrets(made)
    return made


@pytest.fixture
def made_progress(tmp_path: Path) -> Path:
    """Return a folder of runs, of which one runs."""
    now = datetime.now(UTC)
    states: dict[str, Status] = {"hearts": "running", "over": "finished"}
    for name, state in states.items():
        progress = Progress(
            run=name,
            title=name,
            method="fedavg",
            dataset="table",
            seed=1,
            state=state,
            pid=1,
            process_started=0.0,
            started=now,
            updated=now,
            round=2,
        )
        (tmp_path / name).mkdir()
        write_progress(progress, tmp_path / name)
    return tmp_path


@pytest.fixture
def opened(tmp_path: Path) -> Path:
    """Return the folder of a kit that was opened and confirmed; its name has odd characters."""
    folder = tmp_path / 'a 100% odd; $HOME "folder"'
    zipped = tmp_path / "north.zip"
    zipped.write_bytes(
        make_kit("north", "fl:9092", "7", "2026-03-03T09:41:07+00:00", {AUTHORITY: b"a", KEY: b"k"})
    )
    zipped.chmod(0o600)
    folder.mkdir()
    read_kit(zipped).write(folder)
    (folder / "site.yaml").write_text("trust: server\naudit-log: /var/log/fedsilo/north.jsonl\n")
    return folder


def _verify(unit: Unit, folder: Path, systemd: int = 0) -> str:
    """Return what systemd says about a unit; nothing if it is right."""
    if not ANALYZE:
        pytest.skip("this machine has no systemd-analyze")
    path = folder / f"{unit.name}.service"
    path.write_text(unit.text(systemd))
    command = [ANALYZE, "verify", "--recursive-errors=no", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr + str(done.returncode or "")


@pytest.mark.parametrize("arguments", [[], ["one", "two"]])
def test_the_servers_command_takes_one_folder(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(arguments) == 1
    assert "error[setting]" in capsys.readouterr().err


def test_systemd_accepts_the_units(server: Deployment, opened: Path, tmp_path: Path) -> None:
    options: ServiceOptions = {"user": "fedsilo", "data_dir": tmp_path / "data of patients"}
    for unit in (build_server_unit(server, options), build_hospital_unit(opened, options)):
        assert _verify(unit, tmp_path) == ""


def test_the_units_are_confined(server: Deployment, opened: Path, tmp_path: Path) -> None:
    for unit in (build_server_unit(server, {}), build_hospital_unit(opened, {"device": "cpu"})):
        _verify(unit, tmp_path)
        command = [str(ANALYZE), "security", "--offline=true", "--threshold=25"]
        command.append(str(tmp_path / f"{unit.name}.service"))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def _values(text: str, key: str) -> list[str]:
    found = []
    for line in text.splitlines():
        if line.startswith(f"{key}="):
            found.append(line.partition("=")[2])
    return found


def test_a_hospital_writes_its_folder_and_what_it_names(opened: Path) -> None:
    unit = build_hospital_unit(opened, {"node_config": ['cache-dir="/var/cache/fedsilo"']})
    assert unit.writable == [Path("/var/cache/fedsilo"), Path("/var/log/fedsilo")]
    assert _values(unit.text(), "ProtectSystem") == ["strict"]
    assert "PrivateDevices" not in unit.text(), "a GPU is a device"
    assert "PrivateDevices=yes" in build_hospital_unit(opened, {"device": "cpu"}).text()
    assert "--yes" not in unit.command, "a service must not confirm what nobody has read"


def test_restarts_grow_apart_where_systemd_can(opened: Path) -> None:
    unit = build_hospital_unit(opened, {})
    for version, expected in ((252, []), (254, ["6"]), (257, ["6"])):
        text = unit.text(version)
        assert _values(text, "RestartSteps") == expected
        assert _values(text, "Restart") == ["on-failure"]
        assert _values(text, "StartLimitIntervalSec") == ["0"]


def test_nobody_makes_a_service_of_rules_that_nobody_confirmed(opened: Path) -> None:
    (opened / "site.yaml").unlink()
    for kit in (opened, opened.parent / "north.zip", opened.parent / "gone"):
        with pytest.raises(ServiceError):
            build_hospital_unit(kit, {})
    (opened / "site.yaml").write_text("- a list")
    with pytest.raises(ServiceError):
        build_hospital_unit(opened, {})
    (opened / "kit.json").unlink()
    (opened / "site.yaml").write_text("")
    with pytest.raises(KitError):
        build_hospital_unit(opened, {})


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a systemctl that notes its words on the PATH; return the folder of units."""
    folder = tmp_path / "units"
    folder.mkdir()
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/words\necho systemd 257\n'
        f"if [ -e {tmp_path}/broken ]; then echo 'Unit is masked.' >&2; exit 1; fi\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(installing, "UNITS", folder)
    monkeypatch.setattr(installing, "RUNS_HERE", folder)
    return folder


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Let the owner of the test's folders be a user called tester, who is not root."""
    owner = tmp_path.stat().st_uid
    real = pwd.getpwnam

    def getpwnam(name: str) -> pwd.struct_passwd:
        if name != "tester":
            return real(name)
        number = owner or 4711
        return pwd.struct_passwd(("tester", "x", number, number, "", "/", "/bin/sh"))

    monkeypatch.setattr(installing.pwd, "getpwnam", getpwnam)
    if not owner:
        for path in [tmp_path, *tmp_path.rglob("*")]:
            os.chown(path, 4711, 4711)
    return "tester"


def _words(folder: Path) -> list[str]:
    return (folder / "words").read_text().splitlines()


def test_one_command_installs_and_one_uninstalls(
    opened: Path, systemd: Path, user: str, tmp_path: Path
) -> None:
    change_hospital_service(opened, {"user": user}, install=True, uninstall=False)
    unit = systemd / "fedsilo-north.service"
    assert _values(unit.read_text(), "User") == ["tester"]
    assert _values(unit.read_text(), "RestartSteps") == ["6"]
    assert _words(tmp_path)[1:] == ["daemon-reload", "enable --now fedsilo-north.service"]
    change_hospital_service(opened, {}, install=False, uninstall=True)
    assert list(systemd.iterdir()) == []
    assert _words(tmp_path)[3:] == ["disable --now fedsilo-north.service", "daemon-reload"]
    assert (opened / "node.key").is_file()


def test_the_unit_of_a_kit_that_is_gone_is_uninstalled(
    opened: Path, systemd: Path, user: str, tmp_path: Path
) -> None:
    change_hospital_service(opened, {"user": user}, install=True, uninstall=False)
    gone = tmp_path / "north"
    shutil.rmtree(opened)
    change_hospital_service(gone, {}, install=False, uninstall=True)
    assert list(systemd.iterdir()) == []
    with pytest.raises(ServiceError):
        change_hospital_service(gone, {}, install=False, uninstall=True)


@pytest.mark.parametrize("name", ["root", "nobody-of-this-name", "other"])
def test_a_service_has_a_user_of_its_own(
    name: str, server: Deployment, systemd: Path, tmp_path: Path
) -> None:
    if name == "other":  # exists, but does not own the folder
        name = next(one.pw_name for one in pwd.getpwall() if one.pw_uid not in (0, os.getuid()))
    with pytest.raises(ServiceError):
        change_server_service(server.folder, {"user": name}, install=True, uninstall=False)
    assert list(systemd.iterdir()) == []
    assert not (tmp_path / "words").exists()


def test_units_of_others_and_machines_without_systemd_stay(
    server: Deployment, systemd: Path, user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = systemd / "fedsilo-server-hearts.service"
    unit.write_text("[Unit]\nDescription=mine\n")
    for install in (True, False):
        with pytest.raises(ServiceError):
            change_server_service(
                server.folder, {"user": user}, install=install, uninstall=not install
            )
    assert "mine" in unit.read_text()
    unit.unlink()
    (tmp_path / "broken").touch()
    with pytest.raises(ServiceError):
        change_server_service(server.folder, {"user": user}, install=True, uninstall=False)
    with pytest.raises(SettingError):
        change_server_service(server.folder, {}, install=True, uninstall=True)
    monkeypatch.setattr(installing, "RUNS_HERE", tmp_path / "none")
    with pytest.raises(ServiceError):
        change_server_service(server.folder, {"user": user}, install=True, uninstall=False)


def test_without_an_option_the_unit_is_printed_and_nothing_changes(
    server: Deployment, systemd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "service", "--deployment", str(server.folder)]) == 0
    assert "ExecStart=" in capsys.readouterr().out
    assert list(systemd.iterdir()) == []


NOW = datetime(2026, 3, 3, 9, 41, 7, 120_000, UTC)


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        (
            "\x1b[92mINFO \x1b[0m:      Starting Flower SuperLink\n",
            "INFO",
            "Starting Flower SuperLink",
        ),
        ("\x1b[93mWARNING \x1b[0m:   experimental\n", "WARNING", "experimental"),
        ("INFO:     Started server process [3072]\n", "INFO", "Started server process [3072]"),
        ("2026-11-27T02:44:54.235Z INFO [uvicorn.error] Started\n", "INFO", "Started"),
        ("fedsilo: error[kit]: it is gone\n", "ERROR", "fedsilo: error[kit]: it is gone"),
        ("plain\n", "INFO", "plain"),
    ],
)
def test_every_line_has_time_level_and_run_and_no_colour(line: str, level: str, text: str) -> None:
    lines = LogLines(lambda: "hearts round 3", lambda: NOW)
    assert lines.format(line) == f"2026-03-03T09:41:07.120Z {level} [hearts round 3] {text}"
    assert LogLines(now=lambda: NOW).format(line) == f"2026-03-03T09:41:07.120Z {level} {text}"


def test_a_traceback_keeps_its_level_and_blank_lines_are_dropped() -> None:
    lines = LogLines(now=lambda: NOW)
    lines.format("ERROR :   it failed")
    assert " ERROR   File" in lines.format('  File "x.py", line 3')
    assert lines.format("\x1b[0m \n") == ""


def test_successful_polling_is_left_out_and_a_failed_call_is_not() -> None:
    lines = LogLines(now=lambda: NOW)
    call = '2026-11-27T02:56:03.953Z INFO [uvicorn.access] 127.0.0.1:1 - "POST /v1/x HTTP/1.1" '
    assert lines.format(f"{call}200\n") == ""
    assert lines.format(f"{call}500\n").endswith("500")


@pytest.mark.parametrize(
    ("code", "expected"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)]
)
def test_a_failure_is_a_failure_for_systemd(code: str, expected: int) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        command = [sys.executable, "-c", f"import os, sys; {code}"]
        assert run_logged(command, LogLines(), io.StringIO()) == expected
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("exit_code", [7, 0])
def test_a_command_is_logged_and_its_code_returned(exit_code: int) -> None:
    target = io.StringIO()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    code = "import time; "
    if exit_code:
        code += "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); "
    code += "print('INFO :   up', flush=True); time.sleep(60)"

    def end() -> None:
        while not target.getvalue():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    try:
        assert (
            run_logged([sys.executable, "-c", code], LogLines(now=lambda: NOW), target) == exit_code
        )
    finally:
        thread.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert target.getvalue() == "2026-03-03T09:41:07.120Z INFO up\n"


def test_a_server_serves_with_its_own_environment_and_is_known(
    server: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsilo.deployment.service import serve

    ran: list[Sequence[str]] = []

    def fake(command: Sequence[str], lines: LogLines, *rest: object) -> int:
        ran.append(command)
        running = read_deployment(server.folder).process(SERVER)
        assert running
        assert running.pid == os.getpid()
        return 5

    monkeypatch.setattr(serve, "run_logged", fake)
    assert serve.main([str(server.folder)]) == 5
    assert ran == [server.superlink_command()]
    assert serve.main([str(server.folder)]) == 1, "this process is the server already"


def test_running_runs_are_named_with_their_round(tmp_path: Path, made_progress: Path) -> None:
    assert RunningRuns(made_progress)() == "hearts round 2"
    assert RunningRuns(tmp_path / "none")() == ""
    (made_progress / "hearts" / "progress.json").write_text("{")
    assert RunningRuns(made_progress)() == ""
    assert journal.main([sys.executable, "-c", ""]) == 0
