"""What ``progress.json`` costs a run: seconds of the loop, CPU of the thread that writes.

    python benchmarks/watch.py [--rounds 30] [--csv FILE]

FedAvg on nine silos of digits, once as usual and once with 100 silos whose rounds are as short as
can be, in which there is the most to write in the least time. Both by the inline engine, so that
hook and training share one process: the worst place for it. ``loop`` is what the round loop waits
in the hook's methods, ``writer`` the CPU seconds of its thread; ``share`` is both together of the
run's CPU seconds from its first round on.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd

from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records import progress_hook
from fedsilo.server_app.records.progress_hook import ProgressHook

_NOTES = (
    *("run_started", "phase_started", "reply_came", "sites_away", "round_ended"),
    *("site_failed", "participants_changed"),
)
_COMMON: Mapping[str, Value] = {
    "method": "fedavg",
    "dataset": "digits",
    "machine.device": "cpu",
    "seed": 1,
}
CASES: Mapping[str, tuple[int, Mapping[str, Value]]] = {
    "nine silos": (9, {"split.silos": 9}),
    "100 silos, shortest rounds": (
        100,
        {
            "split.silos": 100,
            "split.silo-train-size": 10,
            "split.silo-test-size": 2,
            "network.width": 1,
            "train.mc-passes": 0,
            "train.local-steps": 1,
            "train.batch-size": 8,
        },
    ),
}


@dataclass
class Spent:
    """Seconds in the hook: of the round loop's thread, and CPU of the writing one; writings."""

    loop: float = 0.0
    writer: float = 0.0
    written: int = 0


def measured(case: str, rounds: int) -> dict[str, str | float]:
    """Run a case and return what its progress cost."""
    nodes, values = CASES[case]
    spent = Spent()
    with tempfile.TemporaryDirectory() as out, _counted(spent):
        named = {**_COMMON, **values, "rounds": rounds, "run.out": out, "run.name": "run"}
        wall, cpu = time.monotonic(), time.process_time()
        run_inline(resolve(named), nodes)
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    return {
        "case": case,
        "rounds": rounds,
        "run wall s": round(wall, 1),
        "run CPU s": round(cpu, 1),
        "loop s": round(spent.loop, 3),
        "writer CPU s": round(spent.writer, 3),
        "written": spent.written,
        "share %": round(100 * (spent.loop + spent.writer) / cpu, 2),
    }


def _counted(spent: Spent) -> mock._patch[Any]:
    """Count what the hook's methods and its writing take."""
    changed: dict[str, Callable[..., Any]] = {
        name: _timed(getattr(ProgressHook, name), spent) for name in _NOTES
    }
    write = ProgressHook._write

    def timed_write(self: ProgressHook) -> None:
        began = time.thread_time()
        write(self)
        spent.writer += time.thread_time() - began
        spent.written += 1

    return mock.patch.multiple(progress_hook.ProgressHook, _write=timed_write, **changed)


def _timed(note: Callable[..., None], spent: Spent) -> Callable[..., None]:
    def timed(self: ProgressHook, *args: Any, **kwargs: Any) -> None:
        began = time.monotonic()
        note(self, *args, **kwargs)
        spent.loop += time.monotonic() - began

    return timed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    table = pd.DataFrame([measured(case, given.rounds) for case in CASES])
    print(table.to_string(index=False))
    if given.csv:
        write_atomically(given.csv, table.to_csv(index=False))


if __name__ == "__main__":
    main()
