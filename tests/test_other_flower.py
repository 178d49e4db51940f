"""Newer versions of Flower: simulations give the bytes that this one's give.

``FEDSILO_FLOWER`` names Pythons of environments with another Flower, with colons between
(docs/flower-versions.md says how one is made); without it the tests are skipped.
"""

import json
import os
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsilo.core.settings_schema import Value
from fedsilo.core.versions import TRIED_FLOWER, WORKER_FLOWER
from fedsilo.server_app.records.run_directory import RunDirectory

PYTHONS = list(filter(None, os.environ.get("FEDSILO_FLOWER", "").split(":")))
pytestmark = pytest.mark.skipif(
    not PYTHONS, reason="FEDSILO_FLOWER names no Python with another Flower"
)
_SECURE: dict[str, Value] = {"secure-aggregation": "secagg", "clip-norm": 1.0}
_ROBUST: dict[str, Value] = {"aggregation": "trimmed"}


def _said(python: str, *words: str) -> str:
    """Return what a command of the other environment prints."""
    beside = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [python, *words],
        env=os.environ | {"PATH": beside},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _version(python: str) -> str:
    return _said(python, "-c", "from importlib.metadata import version; print(version('flwr'))")


@pytest.mark.parametrize("python", PYTHONS)
def test_the_other_flower_is_newer_than_the_workers_and_is_one_that_pages_name(python: str) -> None:
    numbers = tuple(map(int, _version(python).split(".")[:2]))
    newest = tuple(map(int, TRIED_FLOWER.split(".")))
    assert tuple(map(int, WORKER_FLOWER.split("."))) < numbers <= newest


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("engine", "method", "changes"),
    [
        ("inline", "uefl", {}),
        ("inline", "fedavg", _SECURE),
        ("inline", "fedavg", _ROBUST),
        ("processes", "uefl", {}),
        ("ray", "uefl", {}),
    ],
    ids=["inline", "inline-secagg", "inline-trimmed", "processes", "ray"],
)
def test_a_run_with_another_flower_gives_the_same_bytes(
    engine: str,
    method: str,
    changes: dict[str, Value],
    python: str,
    tiny: Callable[..., dict[str, Value]],
    inline_run: Callable[..., RunDirectory],
    tmp_path: Path,
) -> None:
    values = tiny(method, **changes)
    config = tmp_path / "config.toml"
    config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    told = ("--engine", engine, "--out", str(tmp_path), "--name", "run", "--config", str(config))
    _said(python, "-m", "fedsilo.cli", "simulate", f"{method}-digits", *told)
    there, here = RunDirectory(tmp_path / "run"), inline_run(values, out=tmp_path / "here")
    for name in ("model.safetensors", "metrics.csv"):
        assert (there.path / name).read_bytes() == (here.path / name).read_bytes()
    written = tomllib.loads((there.path / "config.toml").read_text())
    assert written["environment"]["packages"]["flwr"] == _version(python).strip()


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("command", ["worker", "deploy"])
def test_a_hospital_and_a_deployment_refuse_another_flower(
    command: str, python: str, tmp_path: Path
) -> None:
    words = {
        "worker": ("fedsilo.deployment.worker.hospital",),
        "deploy": ("fedsilo.cli", "deploy", "up", "--deployment", str(tmp_path / "d")),
    }[command]
    done = subprocess.run(
        [python, "-m", *words], capture_output=True, text=True, timeout=60, check=False
    )
    (line,) = (done.stdout + done.stderr).splitlines()
    assert done.returncode != 0
    assert f"Flower {_version(python).strip()} is installed" in line
    assert f"pip install 'flwr[simulation]~={WORKER_FLOWER}.0'" in line
