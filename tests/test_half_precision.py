"""Every method in bf16 is as accurate as in fp32, within the spread of seeds; CPU only.

`make test-soak` tries all methods. By hand, with a table:

    python -m tests.test_half_precision [METHOD ...]
"""

import contextlib
import io
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from fedsilo.core.methods import METHODS
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from tests.support.soak import in_soak
from tests.support.tiny import TINY, TINY_METHOD

SEEDS = (1, 2, 3)
# Large enough that most methods learn something, small enough for minutes
PROBLEM: dict[str, Value] = {
    "split.silo-train-size": 150,
    "split.silo-test-size": 60,
    "rounds": 4,
    "train.local-epochs": 2,
    "network.width": 8,
    "train.mc-passes": 0,
    "server.evaluate-every": 0,
}
OWN: dict[str, dict[str, Value]] = {"uefl": {"train.mc-passes": 3}}
FLOOR = 0.06  # of accuracy: ten of the 180 test images
TRAINED = sorted(METHODS.keys() - {"glm"})  # which computes sums in float64


def accuracies(method: str, precision: str, out: Path) -> list[float]:
    """Return the mean test accuracy of the final models, seed by seed."""
    found = []
    for seed in SEEDS:
        values: Mapping[str, Value] = {
            **TINY,
            **TINY_METHOD.get(method, {}),
            **PROBLEM,
            **OWN.get(method, {}),
            "method": method,
            "seed": seed,
            "machine.precision": precision,
            "run.name": f"{method}-{precision}-{seed}",
            "run.out": str(out),
        }
        directory = run_inline(resolve(values), 3)
        found.append(float(directory.read_json("summary.json")["mean"]["accuracy"]))
    return found


def compare(method: str, out: Path) -> tuple[float, float, float, float]:
    """Return both mean accuracies, their difference, and what the spread of seeds allows of it."""
    exact, half = accuracies(method, "fp32", out), accuracies(method, "bf16", out)
    apart = statistics.fmean(half) - statistics.fmean(exact)
    spread = 2 * statistics.stdev(exact) / len(SEEDS) ** 0.5
    return statistics.fmean(exact), statistics.fmean(half), apart, max(FLOOR, spread)


@pytest.mark.parametrize("method", in_soak(TRAINED))
def test_bf16_is_as_accurate_as_fp32(method: str, tmp_path: Path) -> None:
    _, _, apart, allowed = compare(method, tmp_path)
    assert abs(apart) <= allowed


if __name__ == "__main__":
    print("method,fp32,bf16,difference,allowed")
    for name in sys.argv[1:] or TRAINED:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            row = compare(name, Path(folder))
        print(name, *(f"{value:.3f}" for value in row), sep=",", flush=True)
