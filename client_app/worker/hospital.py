"""A hospital's node: Flower's SuperNode and the worker, started and ended together.

    python -m fedsilo.client_app.worker.hospital --superlink server:9092 ...

Takes the arguments of ``flower-supernode``. The two speak on the loopback, by a secret that is made
for this start and known to nobody else. A worker that is killed is started again, and what it had
begun is finished; with the SuperNode all ends.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from fedsilo.client_app.worker.installed import refuse_other_flower
from fedsilo.client_app.worker.parent import CANNOT
from fedsilo.models.contract.errors import FedsiloError, SettingError

_LOOK = 0.2  # seconds
_LONGEST_PAUSE = 30.0  # seconds before a worker that ended at once is started again
_STEADY = 60.0  # seconds after which a worker counts as started well
_PATIENCE = 10.0  # seconds for what is to end by itself


def commands(arguments: Sequence[str], secret: Path, pid: int) -> tuple[list[str], list[str]]:
    """Return the commands of SuperNode and worker.

    Args:
        arguments: those of ``flower-supernode``.
        secret: the file that both read.
        pid: of this process.

    Raises:
        SettingError: an argument is this program's own to give, or the node config cannot be read.
    """
    told = _told(arguments)
    for option in ("isolation", "superexec_auth_secret_file", "ssl_certfile"):
        if getattr(told, option):
            raise SettingError(
                f"--{option.replace('_', '-')} is not for you to give: SuperNode and worker speak "
                "on the loopback, by a secret of their own; leave it out"
            )
    if told.host not in ("127.0.0.1", "::1", "localhost"):
        raise SettingError(
            f"--host is {told.host}: the Runtime API answers the worker alone; leave it out"
        )
    host = f"[{told.host}]" if ":" in told.host else told.host
    own = ("--isolation", "process", "--superexec-auth-secret-file", str(secret))
    supernode = [sys.executable, "-m", "fedsilo.client_app.worker.supernode", *arguments, *own]
    worker = [sys.executable, "-m", "fedsilo.client_app.worker.parent"]
    worker += ["--runtime", f"{host}:{told.port}", "--secret", str(secret), "--hospital", str(pid)]
    if site_file := _site_file(told.node_config):
        worker += ["--site-file", site_file]
    return supernode, worker


def main(arguments: Sequence[str] | None = None) -> int:
    """Start both and stay until the SuperNode ends."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        refuse_other_flower()
        with tempfile.TemporaryDirectory(prefix="fedsilo-") as folder:
            secret = Path(folder) / "secret"
            secret.touch(mode=0o600)
            secret.write_bytes(secrets.token_bytes(32))
            return _stay(*commands(arguments, secret, os.getpid()))
    except FedsiloError as error:
        print(f"fedsilo: error: {error}", file=sys.stderr)
        return 2


def _stay(supernode: Sequence[str], worker: Sequence[str]) -> int:
    """Start SuperNode and worker; a worker that ends is started again, with the SuperNode all ends.

    Returns:
        The SuperNode's exit code, or the worker's where it would fail again.
    """
    ending: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        ending.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    node, hand = subprocess.Popen(supernode), subprocess.Popen(worker)
    began, pause = time.monotonic(), 1.0
    try:
        while node.poll() is None and not ending:
            code = hand.poll()
            if code == CANNOT:
                return CANNOT
            if code is not None:
                pause = (
                    1.0 if time.monotonic() - began > _STEADY else min(2 * pause, _LONGEST_PAUSE)
                )
                print(
                    f"fedsilo: the worker ended ({_ended(code)}) and is started again in "
                    f"{pause:g} s; a message that it had begun is answered all the same",
                    file=sys.stderr,
                    flush=True,
                )
                _wait(pause, node, ending)
                hand, began = subprocess.Popen(worker), time.monotonic()
            if os.getpid() == 1:
                collect_orphans({node.pid, hand.pid})
            time.sleep(_LOOK)
        return node.returncode if not ending and node.returncode is not None else 0
    finally:
        _end(node, hand)


def collect_orphans(known: Collection[int]) -> None:
    """Collect ended processes that a killed worker left to this one, a container's first."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.pid not in known and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def _wait(seconds: float, node: subprocess.Popen[bytes], ending: Sequence[int]) -> None:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and node.poll() is None and not ending:
        time.sleep(_LOOK)


def _end(*processes: subprocess.Popen[bytes]) -> None:
    """End processes: TERM, and KILL what does not end by it."""
    for process in processes:
        with suppress(ProcessLookupError):
            process.terminate()
    limit = time.monotonic() + _PATIENCE
    for process in processes:
        try:
            process.wait(max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ended(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _told(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what ``flower-supernode`` is told that the worker must know."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="9094")
    parser.add_argument("--node-config", default="")
    for option in ("--isolation", "--superexec-auth-secret-file", "--ssl-certfile"):
        parser.add_argument(option, default="")
    return parser.parse_known_args(arguments)[0]


def _site_file(node_config: str) -> str:
    """Return the site file that a node config names, empty if it names none.

    Raises:
        SettingError: it cannot be read.
    """
    from flwr.common.config import parse_config_args

    try:
        values = parse_config_args([node_config] if node_config else None)
    except Exception as error:  # it is Typer's or TOML's, and ends the SuperNode too
        raise SettingError(f"--node-config cannot be read: {error}") from None
    return str(values.get("site-file", ""))


if __name__ == "__main__":
    sys.exit(main())
