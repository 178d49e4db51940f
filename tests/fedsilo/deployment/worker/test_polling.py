"""The worker's poll interval, and Flower's own waits, shortened in the version that was read."""

import subprocess
import sys
import time
from types import ModuleType

import pytest
from flwr.supercore.version import package_version
from flwr.supernode import start_client_internal

from fedsilo.deployment.worker.polling import PollInterval
from fedsilo.deployment.worker.supernode import READ, ShortWaits, shorten_waits


def test_poll_interval_after_an_arrival_is_short_for_ten_seconds() -> None:
    now = [100.0]
    interval = PollInterval(short=0.1, long=2.0, clock=lambda: now[0])
    assert interval.seconds() == 2.0
    interval.note_arrival()
    for passed, wait in ((0.0, 0.1), (9.9, 0.1), (10.0, 2.0), (1e6, 2.0)):
        now[0] = 100.0 + passed
        assert interval.seconds() == wait
    interval.note_arrival()
    assert interval.seconds() == 0.1


def test_installed_flower_is_the_one_whose_waits_were_read() -> None:
    assert package_version == READ
    assert start_client_internal.time is time


def test_shorten_waits_of_a_known_flower_makes_its_loop_poll_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("waits")
    module.time = time  # type: ignore[attr-defined]
    module._push_messages = lambda state: None  # type: ignore[attr-defined]
    exec("def idle(): time.sleep(3)\ndef reply(): time.sleep(0.5)", module.__dict__)
    slept: list[float] = []
    assert shorten_waits(READ, module) is None
    monkeypatch.setattr(time, "sleep", slept.append)
    module.idle()
    module.reply()
    module.idle()
    assert slept == [1.0, 0.05, 0.25], "idle, then a message came"
    waits: ShortWaits = module.time
    assert waits.monotonic is time.monotonic


@pytest.mark.parametrize("version", ["1.39.1", "1.40.0"])
def test_shorten_waits_of_another_flower_leaves_them_and_says_why(version: str) -> None:
    module = ModuleType("waits")
    module.time = time  # type: ignore[attr-defined]
    assert f"this is {version}: the SuperNode keeps Flower's own" in str(
        shorten_waits(version, module)
    )
    assert module.time is time
    del module.time
    assert "keeps Flower's own" in str(shorten_waits(READ, module))


def test_end_with_a_process_that_ends_ends_too() -> None:
    root = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    code = (
        "import time; from fedsilo.core.processes import end_with; "
        f"end_with({root.pid}); print('bound', flush=True); time.sleep(60)"
    )
    bound = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert bound.stdout
    assert bound.stdout.readline() == b"bound\n"
    root.communicate(b"\n")
    assert bound.wait(20) == 1
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1, "it has ended"
