"""Digests of tiny runs of every method and variant, as a change must leave them.

    python -m tests.support.golden            # records those that golden.json does not have
    python -m tests.support.golden fedavg     # records these again

A run is that of ``tests/test_end_to_end.py``: three rounds, inline engine, one thread, seed 7. Held
are the arrays of the final model and the measurements of metrics.csv, bit for bit. Bits are those
of a kind of machine and of PyTorch, which the file names; elsewhere nothing can be said.
"""

import csv
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.files.state_files import load_state, state_digest
from fedsilo.core.settings_schema import Value
from fedsilo.core.site_facts import SPLITS
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.kernels import KERNELS
from tests.support.tiny import TINY, TINY_METHOD, VARIANTS

PATH = Path(__file__).with_name("golden.json")
ROUNDS = 3


def values_of(variant: str) -> dict[str, Value]:
    """Return the settings of a variant's run."""
    own = VARIANTS[variant]
    return TINY | TINY_METHOD.get(str(own["method"]), {}) | own | {"rounds": ROUNDS}


def digests(directory: RunDirectory) -> dict[str, str]:
    """Return a SHA-256 of the final model's arrays, if there is one, and of all measurements."""
    found = {}
    if (model := directory.path / "model.safetensors").is_file():
        found["model"] = state_digest(load_state(model)[0], {})
    with (directory.path / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.reader(file) if row[2] in SPLITS]
    found["measurements"] = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return found


def machine() -> dict[str, str]:
    """Return what bits depend on beside the code."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    vendor = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "vendor": next(vendor, "unknown"),
    }


def recorded() -> dict[str, Any]:
    """Return golden.json."""
    content: dict[str, Any] = json.loads(PATH.read_text())
    return content


def record(variants: Iterable[str]) -> None:
    """Run ``variants``, all of them if the file is another machine's, and write the file."""
    known = recorded()["runs"] if PATH.is_file() and recorded()["machine"] == machine() else {}
    wanted = [name for name in VARIANTS if name in set(variants) or name not in known]
    for name in wanted:
        with tempfile.TemporaryDirectory() as out:
            values = values_of(name) | {"run.name": "run", "run.out": out}
            known[name] = digests(run_inline(resolve(values), 3))
        content = {"machine": machine(), "runs": dict(sorted(known.items()))}
        write_atomically(PATH, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    os.environ |= KERNELS
    record(sys.argv[1:])
