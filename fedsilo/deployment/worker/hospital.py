"""A hospital's node: Flower's SuperNode and the worker, started and ended together.

    python -m fedsilo.deployment.worker.hospital --superlink server:9092 ...

It takes the arguments of ``flower-supernode``. SuperNode and worker communicate on the loopback,
with a secret that is made for this start. A killed worker is started again, and the messages that
it was answering still get replies. When the SuperNode ends, everything ends.
"""

import argparse
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from fedsilo.core.errors import FedsiloError, SettingError, describe_system_error, error_line
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.one_line import one_line
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.worker.installed import refuse_other_flower

CANNOT = 3  # the exit code of a worker that would fail again
_LOOK = 0.2  # seconds between checks
_LONGEST_PAUSE = 30.0  # seconds before a worker that ended at once is started again
_STEADY = 60.0  # seconds after which a start of the worker counts as a success
_PATIENCE = 10.0  # seconds that a process has to end by itself


def build_commands(arguments: Sequence[str], secret: Path, pid: int) -> tuple[list[str], list[str]]:
    """Build the commands of the two processes of a hospital's node, without starting them.

    Flower's SuperNode receives messages from the server. Fedsilo's worker takes these messages from
    the SuperNode's Runtime API on this machine, and answers them. If the node config names a site
    file, the worker gets its path.

    Args:
        arguments: the arguments of ``flower-supernode``. All are passed to the SuperNode.
        secret: the file with the secret that the worker shows to the SuperNode.
        pid: the id of this process. When the process ends, the worker ends too.

    Returns:
        The words of the SuperNode's command, and those of the worker's command.

    Raises:
        SettingError: an argument is one that fedsilo sets itself (--isolation,
            --superexec-auth-secret-file, --ssl-certfile), the host is not the loopback, or the
            node config cannot be read.
    """
    given = _parse(arguments)
    fault = ""
    for option in ("isolation", "superexec_auth_secret_file", "ssl_certfile"):
        if getattr(given, option):
            fault = (
                f"--{option.replace('_', '-')} is set by fedsilo, because SuperNode and worker "
                "communicate on the loopback with their own secret: remove it"
            )
    # Anybody who reaches the Runtime API could take a hospital's messages
    if given.host not in ("127.0.0.1", "::1", "localhost"):
        fault = f"--host is {given.host}, but the Runtime API answers only the worker: remove it"
    if fault:
        raise SettingError(fault)
    host = given.host
    if ":" in host:  # an IPv6 address
        host = f"[{host}]"
    # These come last, so that they win over an abbreviation such as --isol, which only Flower reads
    own = ("--isolation", "process", "--superexec-auth-secret-file", str(secret))
    supernode = [sys.executable, "-m", "fedsilo.deployment.worker.supernode", *arguments, *own]
    worker = [sys.executable, "-m", "fedsilo.deployment.worker.parent"]
    worker += ["--runtime", f"{host}:{given.port}", "--secret", str(secret), "--hospital", str(pid)]
    site_file = parse_node_config([given.node_config]).get("site-file")
    if site_file:
        worker += ["--site-file", str(site_file)]
    return supernode, worker


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a hospital's node until it ends, and return the exit code for this process.

    The node has two processes: Flower's SuperNode, which receives messages, and fedsilo's worker,
    which answers them. The secret that both share is written to a temporary folder. Calls to this
    machine bypass any proxy.

    Args:
        arguments: the arguments of ``flower-supernode``; None for those of this process.

    Returns:
        The SuperNode's exit code when the SuperNode ends, or 0 after SIGTERM or SIGINT. It is 3 if
        the worker ended because it would fail again, and 2 after an error at the start, which is
        printed to stderr.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    try:
        refuse_other_flower()
        os.environ |= direct_loopback(os.environ)
        with tempfile.TemporaryDirectory(prefix="fedsilo-") as folder:
            secret = Path(folder) / "secret"
            write_atomically(secret, secrets.token_bytes(32), mode=0o600)
            return _supervise(*build_commands(arguments, secret, os.getpid()))
    except FedsiloError as error:
        print(error_line(error), file=sys.stderr)
    except OSError as error:  # a full disk, for the secret
        print(f"fedsilo: error: {describe_system_error(error)}", file=sys.stderr)
    return 2


def direct_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Build values of no_proxy and NO_PROXY with which calls to this machine bypass a proxy.

    Both variables get the same list of hosts, separated by commas: 127.0.0.1, localhost, then the
    hosts that either variable of ``environment`` already lists. ``environment`` is not changed.

    Returns:
        A mapping with the two variables only.
    """
    direct = ["127.0.0.1", "localhost"]
    for name in ("no_proxy", "NO_PROXY"):
        direct += [host for host in environment.get(name, "").split(",") if host not in direct]
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(filter(None, direct)))


def _supervise(supernode: Sequence[str], worker: Sequence[str]) -> int:
    """Start the SuperNode and its worker, and restart the worker until the SuperNode ends.

    The first restart waits 2 seconds. The wait doubles with each restart, up to 30 seconds. A
    worker that has run for more than a minute is restarted after 1 second. Each restart is printed
    to stderr.

    SIGTERM or SIGINT makes the function end both processes and return. If this process is number 1
    of a container, it also reaps orphaned processes.

    Args:
        supernode: the words of the SuperNode's command.
        worker: the words of the worker's command.

    Returns:
        The SuperNode's exit code when it ends, or 0 after a signal. It is 3 (``CANNOT``) if the
        worker ended with this code, which means that a restart would fail too.
    """
    signals: list[int] = []  # signals that asked this process to end

    # The handler only records the signal; the loop below then ends both processes in order
    def end(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    node, working = subprocess.Popen(supernode), subprocess.Popen(worker)
    started, pause = time.monotonic(), 1.0
    try:
        while node.poll() is None and not signals:
            code = working.poll()
            if code == CANNOT:
                return CANNOT
            if code is not None:
                # A worker that ends again and again is started less and less often
                pause = min(2 * pause, _LONGEST_PAUSE)
                if time.monotonic() - started > _STEADY:
                    pause = 1.0
                _tell_restart(code, pause)
                limit = time.monotonic() + pause
                while time.monotonic() < limit and node.poll() is None and not signals:
                    time.sleep(_LOOK)
                working, started = subprocess.Popen(worker), time.monotonic()
            # Process 1 of a container inherits orphans, and nobody else reaps them
            if os.getpid() == 1:
                collect_orphans({node.pid, working.pid})
            time.sleep(_LOOK)
        if signals or node.returncode is None:
            return 0
        return node.returncode
    finally:
        _end_processes(node, working)


def _tell_restart(code: int, pause: float) -> None:
    """Print one line to stderr: the worker has ended, and restarts in ``pause`` seconds.

    ``code`` is the worker's exit code, or -N if the signal N ended it. The line has the code or
    the signal's name.
    """
    how = f"exit code {code}"
    if code < 0:
        how = f"by {signal.Signals(-code).name}"
    print(
        f"fedsilo: the worker ended ({how}) and is started again in {pause:g} s; a message that "
        "it was answering still gets a reply",
        file=sys.stderr,
        flush=True,
    )


def collect_orphans(known: Collection[int]) -> None:
    """Reap the child processes of this process that have ended and have no id in ``known``.

    Process 1 of a container needs this. The system makes it the parent of processes whose own
    parent was killed, such as a worker's tasks. The children in ``known`` are reaped elsewhere.
    Running children are not waited for.
    """
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.pid not in known and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def _end_processes(*processes: subprocess.Popen[bytes]) -> None:
    """End processes by SIGTERM, and kill those that still run after ten seconds."""
    # All are asked before the first is waited for, so that they end at the same time
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


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of ``flower-supernode`` that this module reads.

    They are --host (127.0.0.1 by default), --port (9094 by default), --node-config, --isolation,
    --superexec-auth-secret-file and --ssl-certfile. All are strings, and each of the last four is
    empty by default. Other arguments are ignored, and abbreviated options are not recognised.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="9094")
    parser.add_argument("--node-config", default="")
    for option in ("--isolation", "--superexec-auth-secret-file", "--ssl-certfile"):
        parser.add_argument(option, default="")
    return parser.parse_known_args(arguments)[0]


def parse_node_config(texts: Sequence[str]) -> dict[str, Value]:
    """Parse the entries of a node config, such as ``site="west" max-epsilon=3.0``.

    Flower's own parser is used. Each text has entries key=value, separated by spaces, with values
    in TOML's syntax, so strings need quotes. If a key occurs more than once, in one text or in two,
    the last entry applies. Empty texts are skipped. Keys are not checked.

    Raises:
        SettingError: a text cannot be parsed.
    """
    from flwr.common.config import parse_config_args

    try:
        return dict(parse_config_args([text for text in texts if text]))
    except Exception as error:  # errors of Typer or TOML, which would end the SuperNode too
        raise SettingError(f"--node-config cannot be read: {one_line(error)}") from None


if __name__ == "__main__":
    sys.exit(main())
