"""Starts a command and writes its output as log lines with time, level, run and round.

    python -m fedsilo.deployment.service.journal COMMAND...

Flower's server and node print lines of three forms, some in colour and without a time. All become
``2026-03-03T09:41:07.120Z INFO [hearts round 3] text``. Lines about successful calls of Flower's
API are left out, because polling makes several a second. The command gets SIGTERM and SIGINT that
this process gets, and its exit code becomes this process's: 0 if such a signal ended it.
"""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TextIO

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_LEVELS = "DEBUG|INFO|WARNING|ERROR|CRITICAL"
# Flower's "INFO :   text", uvicorn's "INFO:  text", and "2026-03-03T09:41:07.120Z INFO [name] text"
_FORMS = (
    re.compile(rf"(?P<level>{_LEVELS})\s*:\s+(?P<text>.*)"),
    re.compile(rf"\d{{4}}-\d\d-\d\dT[\d:.]+Z (?P<level>{_LEVELS}) \[[\w.]+\] (?P<text>.*)"),
)
# Flower's polling makes several of these a second
_POLLED = re.compile(r"\S+Z INFO \[uvicorn\.access\] .* 2\d\d")
_BY_SIGNAL = 128  # a shell's exit code for signal N is 128 + N
_FAILED = re.compile(r"fedsilo: error")  # a command's own one-line error


@dataclass
class LogLines:
    """Formats lines of output for a log.

    A line without a level, as in a traceback, gets the level of the line before.

    Args:
        tell_run: returns the run and round that the lines belong to, or an empty text.
        now: returns the time.
    """

    tell_run: Callable[[], str] = str
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    level: str = "INFO"

    def format(self, line: str) -> str:
        """Format one line of output as a log line: time, level, run (if any) and text.

        A line in the format of Flower or uvicorn states its level. A line that begins with
        "fedsilo: error" has the level ERROR. Any other line gets the level of the line before,
        which is INFO at first. ``tell_run`` names the run. Colours are removed.

        The result is empty for a blank line and for uvicorn's frequent lines about successful
        requests (status 2xx).
        """
        text = _COLOURS.sub("", line).rstrip()
        if _POLLED.fullmatch(text):
            return ""
        # The first form that fits decides; other lines belong to the line before
        for form in _FORMS:
            found = form.fullmatch(text)
            if found:
                self.level, text = found["level"], found["text"].rstrip()
                break
        if _FAILED.match(text):
            self.level = "ERROR"
        if not text.strip():
            return ""
        moment = self.now().isoformat(timespec="milliseconds").replace("+00:00", "Z")
        run = self.tell_run()
        if run:
            run = f" [{run}]"
        return f"{moment} {self.level}{run} {text}"


def run_logged(
    command: Sequence[str],
    lines: LogLines,
    target: TextIO,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> int:
    """Run a command, write its output as log lines, and return its exit code.

    Standard error is treated like standard output. The call returns when the command and all
    processes that share its output have ended. From this call on, this process passes SIGTERM and
    SIGINT on to the command, and its signal handlers are not restored.

    Args:
        command: the command's words.
        lines: formats the lines. A line that it formats as an empty text is left out.
        target: gets the lines.
        environment: the command's environment. None means this process's environment.
        folder: the command's working folder. None means this process's folder.

    Returns:
        The command's exit code. It is 0 if a passed-on signal ended the command. If another
        signal with the number N ended it, the code is 128 + N.
    """
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )

    asked: list[int] = []  # the signals that this process got

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        with suppress(ProcessLookupError):
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    assert process.stdout is not None
    # The loop ends when the command and all that it started have closed their output
    for line in process.stdout:
        text = lines.format(line)
        if text:
            target.write(f"{text}\n")
            target.flush()
    code = process.wait()
    if -code in asked:  # it ended as it was asked to
        return 0
    if code < 0:
        return _BY_SIGNAL - code
    return code


@dataclass
class RunningRuns:
    """Names the runs that go on at a server, and the round of each.

    The files are read at most once a second, because a server prints many lines.
    """

    runs: Path  # the folder of run directories
    _text: str = ""
    _read: float = float("-inf")

    def __call__(self) -> str:
        """Return the names and rounds of the runs in progress, such as ``hearts round 3``.

        Several runs are separated by commas. If no run is in progress, the result is an empty
        string. The files are read again only if the last result is more than a second old.
        """
        if time.monotonic() - self._read > 1.0:
            self._read, self._text = time.monotonic(), self._find()
        return self._text

    def _find(self) -> str:
        from fedsilo.core.errors import FedsiloError
        from fedsilo.server_app.records.progress import FILE, read_progress

        found = []
        for path in sorted(self.runs.glob(f"*/{FILE}")):
            # A run writes every 15 seconds; older files need not be read
            with suppress(OSError, FedsiloError):
                if time.time() - path.stat().st_mtime > 60:
                    continue
                progress = read_progress(path.parent)
                if progress and progress.state == "running":
                    found.append(f"{progress.run} round {progress.round}")
        return ", ".join(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, print its output to stdout as log lines, and return its exit code.

    Args:
        arguments: the words of the command. None means the arguments of this process.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    return run_logged(arguments, LogLines(), sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
