"""Stop work that exceeds the hospital's limits on time or memory, at any point."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

from fedsilo.client_app.site.limits import MEGABYTE
from fedsilo.core.errors import RefusedError

_LOOK = 0.5  # seconds between checks
_SHARE = 0.9  # the share of the machine's memory that is allowed by default


@contextmanager
def watch_usage(seconds: float, megabytes: int) -> Iterator[None]:
    """Run a block, and stop it once it exceeds ``seconds``, or the process ``megabytes``.

    A timer's signal checks the limits, so that decoding, training and measuring need not. They are
    checked again at the end, for blocks shorter than the timer's period. Python delivers signals
    only to the main thread, in which a SuperNode's process answers; in another thread nothing is
    checked.

    Args:
        seconds: the time limit.
        megabytes: the memory limit of the process; 0 for nine tenths of the machine's memory.

    Raises:
        RefusedError: names the exceeded limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    until = time.monotonic() + seconds
    most = megabytes * MEGABYTE or int(_SHARE * psutil.virtual_memory().total)
    process = psutil.Process()

    def look(number: int = 0, frame: FrameType | None = None) -> None:
        if time.monotonic() > until:
            raise RefusedError(
                "the run has taken the time that the hospital gives it ('max-seconds'): ask for "
                "less work, or leave the site out"
            )
        if process.memory_info().rss > most:
            raise RefusedError(
                f"the message takes more than the {most // MEGABYTE} megabytes that the hospital "
                "gives it ('max-memory'): ask for smaller images, batches or networks"
            )

    gradients = _gradients_are_on()
    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, min(_LOOK, max(seconds, 0.001)), _LOOK)
    try:
        yield
        look()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        _turn_gradients(gradients)


def _gradients_are_on() -> bool:
    torch = sys.modules.get("torch")
    return torch is None or bool(torch.is_grad_enabled())


def _turn_gradients(on: bool) -> None:
    """Turn PyTorch's gradients on or off, if the block has imported PyTorch.

    The signal may come inside ``torch.no_grad``'s own exit. Gradients then stay off, and the
    process could train in no later run.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_grad_enabled(on)
