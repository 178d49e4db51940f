"""The guard of a run with Flower's engines, given the run's home and the command to guard.

It starts the command (SuperLink) and reads from a pipe that only fedsilo's own process can write
to. When the pipe ends, that process wants the run to end, or has ended itself, even by a kill. Then
all processes of the run are ended, including those with sessions and parents of their own, and the
run's folder HOME is removed.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from fedsilo.server_app.run.processes import end_run

_LOOK = 0.5  # seconds between checks of the command
_ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def guard(home: Path, command: Sequence[str], pipe: int) -> int:
    """Run ``command`` until it or ``pipe`` ends; then end all processes that belong to ``home``.

    Nothing is ever written to the pipe, a file descriptor. Return the command's exit code, or 0 if
    it was ended from here.
    """
    for number in _ENDINGS:
        signal.signal(number, _leave)
    pipe_ended = False
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        pipe_ended = _pipe_ended_before(process, pipe)
        return 0 if pipe_ended else process.returncode
    finally:
        for number in _ENDINGS:
            signal.signal(number, signal.SIG_IGN)
        end_run(home)
        if pipe_ended:  # or fedsilo reads there why SuperLink ended, and removes it
            shutil.rmtree(home, ignore_errors=True)


def _pipe_ended_before(process: subprocess.Popen[bytes], pipe: int) -> bool:
    while process.poll() is None:
        ready, _, _ = select.select([pipe], [], [], _LOOK)
        if ready and not os.read(pipe, 1024):
            return True
    return False


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(guard(Path(sys.argv[1]), sys.argv[2:], sys.stdin.fileno()))
