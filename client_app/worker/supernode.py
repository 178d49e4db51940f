"""Flower's SuperNode, which looks for messages and replies often while there are some.

Flower's own waits are 3 s for a message and 0.5 s for a reply, and no setting changes them. They
are replaced in the very version that was read; another keeps its own, and that is said once. There
too a message that no process will answer is given up (``unanswered``).
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from threading import Thread
from types import ModuleType

from fedsilo.client_app.worker.pace import LONG, SHORT, Pace
from fedsilo.client_app.worker.unanswered import watching

READ = "1.39.0"  # the Flower version whose waits are known
_WAITS = "flwr.supernode.start_client_internal"
_IDLE = 3.0  # Flower's wait for a message, seconds
_LOOK = 1.0  # seconds from one look for messages that nobody answers to the next


class ShortWaits:
    """Stands for the module ``time`` where the SuperNode's loop waits, and sleeps less.

    The wait for a message is long when none has come for a time; a wait for a reply means that
    one has come. Each look for a message is a call to the server, which all hospitals ask: a
    quarter of a second at least. A look for a reply is this process' own.
    """

    def __init__(self) -> None:
        self.pace = Pace(short=LONG / 2, long=2 * LONG)
        self.look: Callable[[], object] | None = None
        self._looked = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep less than ``seconds``."""
        if seconds < _IDLE:
            self.pace.quicken()
            self._look_sometimes()
            time.sleep(SHORT)
        else:
            time.sleep(min(seconds, self.pace.next()))

    def _look_sometimes(self) -> None:
        if self.look and time.monotonic() - self._looked > _LOOK:
            self._looked = time.monotonic()
            self.look()

    def __getattr__(self, name: str) -> object:
        """Return whatever else the module has."""
        return getattr(time, name)


def shorten_waits(version: str, module: ModuleType) -> str:
    """Make the SuperNode's loop in ``module`` look often.

    Args:
        version: Flower's.
        module: the one that waits.

    Returns:
        Why it keeps its own waits; empty if it does not.
    """
    known = getattr(module, "time", None) is time and hasattr(module, "_push_messages")
    if version != READ or not known:
        return (
            f"fedsilo knows the waits of Flower {READ} and this is {version}: the SuperNode keeps "
            "Flower's own, a message takes up to 3 s longer"
        )
    waits = ShortWaits()
    module.time = waits  # type: ignore[attr-defined]  # the name that its functions look up
    module._push_messages = watching(module._push_messages, waits)  # type: ignore[attr-defined]
    return ""


def end_with_parent() -> None:
    """See to it that this process ends soon after the one that started it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LONG)
        os._exit(1)

    Thread(target=watch, name="end-with-parent", daemon=True).start()


def main() -> None:
    """Be ``flower-supernode``, with its arguments."""
    from flwr.supercore.version import package_version
    from flwr.supernode.cli.flower_supernode import flower_supernode

    end_with_parent()
    if why := shorten_waits(package_version, importlib.import_module(_WAITS)):
        print(f"fedsilo: {why}", file=sys.stderr)
    flower_supernode()


if __name__ == "__main__":
    main()
