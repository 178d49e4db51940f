import signal
import threading
import time

import pytest

from fedsilo.client_app.site.watch import watch_usage
from fedsilo.core.errors import RefusedError
from tests.support.errors import refuses


def work_for_ever(seconds: float, megabytes: int) -> None:
    with watch_usage(seconds, megabytes):
        while True:
            sum(range(1000))


def test_work_that_takes_too_long_is_stopped() -> None:
    began = time.monotonic()
    with refuses(RefusedError, "max-seconds"):
        work_for_ever(0.2, 0)
    assert time.monotonic() - began < 10


def test_a_process_that_is_too_large_is_stopped() -> None:
    with pytest.raises(RefusedError, match="more than the 1 megabytes"):
        work_for_ever(60.0, 1)


def test_the_timer_ends_with_the_block() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with watch_usage(60.0, 0):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == before


def test_another_thread_is_not_watched() -> None:
    done = []

    def work() -> None:
        with watch_usage(0.001, 0):
            time.sleep(0.01)
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done


def sleep_without_gradients() -> None:
    import torch

    with watch_usage(0.05, 0):
        torch.set_grad_enabled(False)
        time.sleep(10)


def test_stopped_work_leaves_gradients_on() -> None:
    """The signal may come while PyTorch turns gradients on again after ``no_grad``."""
    import torch

    try:
        with refuses(RefusedError, "max-seconds"):
            sleep_without_gradients()
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
