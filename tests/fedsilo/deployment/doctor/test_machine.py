"""Lines of the doctor about a machine: versions, folders, disk, memory and ports."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fedsilo.deployment.doctor import machine
from fedsilo.deployment.doctor.findings import Refused
from tests.support.errors import refuses


def test_a_package_of_another_version_or_none_is_named_with_its_requirement() -> None:
    project = {
        "requires-python": ">=99",
        "dependencies": ["numpy<1", "no-such-package-of-anybody>=2", "psutil>=1"],
    }
    wrong = machine._wrong_versions(project)
    python, numpy, none = wrong.values()
    assert python == "python>=99"
    assert (numpy, none) == ("numpy<1", "no-such-package-of-anybody>=2")
    assert "no no-such-package-of-anybody" in wrong


def test_files_changed_here_are_listed_and_wrong_versions_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app: Any = SimpleNamespace(project={"project": {}}, folder=tmp_path)
    monkeypatch.setattr(machine, "installed_app", lambda: app)
    monkeypatch.setattr(machine, "_wrong_versions", lambda project: {})
    monkeypatch.setattr(machine, "local_changes", lambda folder: [])
    assert machine.check_software().details == ()
    monkeypatch.setattr(machine, "local_changes", lambda folder: ["a.py", "b.py"])
    (detail,) = machine.check_software().details
    assert "a.py, b.py" in detail
    monkeypatch.setattr(machine, "_wrong_versions", lambda project: {"torch 1": "torch>=2"})
    with refuses(Refused) as wrong:
        machine.check_software()
    assert wrong.value.fix == "pip install 'torch>=2'"


def test_a_folder_is_there_and_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.check_writable_folder(tmp_path, "the database's folder") == tmp_path
    with refuses(Refused, tmp_path / "none"):
        machine.check_writable_folder(tmp_path / "none", "the database's folder")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with refuses(Refused, tmp_path, os.getuid()):
        machine.check_writable_folder(tmp_path, "the database's folder")


def test_data_that_cannot_be_read_or_are_none_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refuses(Refused, tmp_path / "none"):
        machine.check_data_folder(tmp_path / "none")
    with refuses(Refused, tmp_path):
        machine.check_data_folder(tmp_path)

    def deny(self: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "iterdir", deny)
    with refuses(Refused, tmp_path, os.getuid()):
        machine.check_data_folder(tmp_path)


def test_a_site_file_may_be_missing_but_not_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "site.yaml"
    assert not machine.has_site_file(path)
    assert not machine.has_site_file(Path("/dev/null"))
    path.touch()
    assert machine.has_site_file(path)
    with refuses(Refused, tmp_path):
        machine.has_site_file(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with refuses(Refused, path, os.getuid()):
        machine.has_site_file(path)


def test_a_disk_without_room_or_that_fails_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.check_disk_space([], 1.0) == ""
    assert machine.check_disk_space([tmp_path], 0.0).startswith(f"{tmp_path}: ")
    with refuses(Refused, tmp_path):
        machine.check_disk_space([tmp_path], 1e9)

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with refuses(Refused, tmp_path, "Input/output error"):
        machine.check_disk_space([tmp_path], 0.0)


def test_a_hospitals_own_bound_of_memory_must_suffice() -> None:
    with refuses(Refused, "max-memory"):
        machine.check_memory(1.0, 0.5)


def test_a_port_is_free_or_used_by_the_expected_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        own = psutil.Process().cmdline()[0]
        assert f"process {os.getpid()}" in machine.check_port("127.0.0.1", port, "the API", own)
        assert machine.runs_on(port, own)
        assert not machine.runs_on(port, "")
        with refuses(Refused, os.getpid()):
            machine.check_port("127.0.0.1", port, "the API", "another word")
    assert not machine.runs_on(port, own)
    assert machine.check_port("127.0.0.1", port, "the API", "").endswith("is free for the API")
    if socket.has_ipv6:
        with refuses(Refused):
            machine.check_port("::2", port, "the API", "")


def test_a_process_hidden_from_this_user_is_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    def hide(**_: object) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", hide)
    assert not machine.runs_on(1, "word")
