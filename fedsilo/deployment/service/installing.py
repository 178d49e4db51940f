"""Installs and uninstalls a unit with systemd's own command."""

import os
import pwd
import re
import shutil
import subprocess
from pathlib import Path

from fedsilo.core.files.atomic_files import read_regular, write_atomically
from fedsilo.core.one_line import one_line
from fedsilo.deployment.service.units import MARK, ServiceError, Unit

UNITS = Path("/etc/systemd/system")
RUNS_HERE = Path("/run/systemd/system")  # this folder exists if systemd runs the machine
_NAME = re.compile(r"[A-Za-z0-9:_.-]{1,200}")


def install(unit: Unit) -> str:
    """Install a systemd service: write its unit file, and start it now and at each boot.

    An older unit file of the same name is replaced if fedsilo wrote it. A service that is already
    running uses the new unit only after its next start. The unit's text depends on the version of
    systemd.

    Returns:
        A sentence for the operator.

    Raises:
        ServiceError: systemd is not running here or refuses the unit, or this user may not write
            the file. Also raised if the service's user is root, does not exist or does not own
            the folder. A unit's name is refused if it is invalid or belongs to another program's
            unit.
    """
    path = _find_path(unit.name)
    _refuse_user(unit)
    if path.exists():
        _refuse_foreign(path)
    _write(path, unit.text(_systemd_version()))
    _systemctl("daemon-reload")
    _systemctl("enable", "--now", path.name)
    return f"{path.name} is installed and started: systemctl status {unit.name}"


def uninstall(name: str) -> str:
    """Stop a systemd service, remove its unit file, and return a sentence for the operator.

    The service's folder is kept. ``name`` is the unit's name without ".service".

    Raises:
        ServiceError: the name is not allowed, there is no such unit, or fedsilo did not write
            it. Also raised if systemd is not running here or refuses to stop it, or if this user
            may not remove the file.
    """
    path = _find_path(name)
    if not path.exists():
        raise ServiceError(f"there is no {path}: nothing was changed")
    _refuse_foreign(path)
    # While the file is still there, because systemd disables a unit by what its file says
    _systemctl("disable", "--now", path.name)
    try:
        path.unlink()
    except PermissionError:
        raise _not_permitted(path) from None
    _systemctl("daemon-reload")
    return f"{path.name} is stopped and removed; its folder stays"


def _find_path(name: str) -> Path:
    fault = ""
    if not _NAME.fullmatch(name):
        fault = (
            f"'{one_line(name)}' cannot be the name of a service: rename the folder to letters, "
            "digits, '.', '_' and '-'"
        )
    elif not RUNS_HERE.is_dir() or not shutil.which("systemctl"):
        fault = "systemd does not run this machine: print the unit, and install it where it runs"
    if fault:
        raise ServiceError(fault)
    return UNITS / f"{name}.service"


def _refuse_user(unit: Unit) -> None:
    """Check that the user of a service exists, is not root, and owns the service's folder.

    Raises:
        ServiceError: one of these conditions is not met. The message says how to correct it.
    """
    fault = ""
    try:
        found = pwd.getpwnam(unit.user)
    except KeyError:
        fault = (
            f"there is no user '{unit.user}': make one by 'useradd --system {unit.user}', then "
            f"'chown -R {unit.user} {unit.folder}'"
        )
    else:
        if found.pw_uid == 0:
            fault = "the service would run as root: name another user by --user"
        elif unit.folder.stat().st_uid != found.pw_uid:
            fault = (
                f"{unit.folder} does not belong to the user '{unit.user}': chown -R {unit.user} "
                f"{unit.folder}"
            )
    if fault:
        raise ServiceError(fault)


def _refuse_foreign(path: Path) -> None:
    if not read_regular(path).decode("utf-8", errors="replace").startswith(MARK):
        raise ServiceError(f"{path} was not written by fedsilo: rename it, or remove it yourself")


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except PermissionError:
        raise _not_permitted(path) from None


def _not_permitted(path: Path) -> ServiceError:
    user = pwd.getpwuid(os.geteuid()).pw_name
    return ServiceError(f"{user} may not change {path}: give the command with sudo")


def _systemd_version() -> int:
    """Return the major version of systemd, such as 254; 0 if it cannot be read from its answer."""
    found = re.search(r"systemd (\d+)", _systemctl("--version"))
    if found is None:
        return 0
    return int(found[1])


def _systemctl(*words: str) -> str:
    """Run ``systemctl`` with ``words`` and return its standard output.

    Raises:
        ServiceError: the command failed. The message has the last line of its error output.
    """
    # systemctl explains itself on the last line of standard error
    done = subprocess.run(["systemctl", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ServiceError(f"'systemctl {' '.join(words)}' failed: {one_line(lines[-1], 400)}")
    return done.stdout
