"""Commands killed at moments drawn by a seed; the same again ends as if nothing had been.

    make test-kill KILLS=200

Each trial starts a command, kills its process alone (SIGKILL) somewhere before its end, waits until
nothing that it started is left, and gives the command again. Then every file must be there that is
there after an undisturbed one, none more, and those that the seed decides must have the same bytes.
``FEDSILO_KILL=3`` repeats trial 3. One thread, for the bytes depend on their number.
"""

import functools
import http.server
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from fedsilo.core.methods import METHODS
from tests.support.tiny import TINY, TINY_METHOD

KILLS = int(os.environ.get("FEDSILO_KILLS", "0"))
ONLY = os.environ.get("FEDSILO_KILL", "")
MARK = "FEDSILO_KILL_TRIAL"
TRIALS = [int(ONLY)] if ONLY else list(range(KILLS))
pytestmark = pytest.mark.skipif(not TRIALS, reason="set FEDSILO_KILLS: make test-kill")
END = 60.0  # seconds until what a killed command started has ended

TABLES = {
    "dataset": "heart-synthetic",
    "rounds": 2,
    "train.local-steps": 2,
    "network.dropout": 0.0,
    "train.mc-passes": 0,
    "machine.device": "cpu",
    "train.batch-size": 16,
}
EXPERIMENTS = {
    **{
        f"digits-{method}": {
            "config": TINY | TINY_METHOD.get(method, {}) | {"method": method, "rounds": 3}
        }
        for method in METHODS
    },
    "averaged": {
        "config": {"method": "fedavg", **TABLES},
        "grid": {"train.learning-rate": [0.01, 0.1]},
    },
    "alone": {"config": {"method": "local", **TABLES}},
    "skin": {
        "config": {
            "method": "fedevprompt",
            "dataset": "dermoscopy-phantom",
            "data.image-size": 32,
            "split.sample-share": 0.003,
            "split.public-share": 0.3,
            "network.name": "vit",
            "vit.backbone-weights": "tiny.safetensors",
            "vit.backbone-width": 16,
            "rounds": 1,
            "vit.backbone-depth": 2,
            "vit.backbone-heads": 2,
            "vit.backbone-patch": 8,
            "machine.device": "cpu",
            "vit.prompt-length": 2,
            "vit.basic-layers": 1,
            "train.local-epochs": 1,
            "network.dropout": 0.0,
            "train.mc-passes": 0,
        }
    },
}
FILE = {
    "tuning": {"trials": 2, "folds": 2, "seeds": 1},
    "pretraining": {"epochs": 2, "train.batch-size": 8, "warmup-epochs": 1},
    "experiments": EXPERIMENTS,
}
FETCHED = "processed.cleveland.data"


@dataclass(frozen=True)
class Command:
    """A command of fedsilo under a folder of its own.

    Attributes:
        first: its arguments.
        again: those after the kill, by the folder.
        once: it writes over nothing that is there, so that what is there must be whole.
        decided: globs of the files whose bytes the seed decides.
    """

    first: Callable[[Path], list[str]]
    decided: tuple[str, ...]
    again: Callable[[Path], list[str]] | None = None
    once: bool = False


def _simulate(method: str, engine: str) -> Command:
    def first(out: Path) -> list[str]:
        told = ["--engine", engine, "--out", str(out), "--name", "run"]
        return ["simulate", f"digits-{method}", "--file", _file(out), *told]

    def again(out: Path) -> list[str]:
        begun = (out / "run" / "config.toml").is_file()
        return ["resume", str(out / "run")] if begun else first(out)

    return Command(first, ("run/metrics.csv", "run/model.safetensors", "run/sites/*/*"), again)


def _file(out: Path) -> str:
    return str(out.parent / "simulation.yaml")


def _many(name: str, *more: str) -> Callable[[Path], list[str]]:
    def first(out: Path) -> list[str]:
        return [name, *more, "--file", _file(out), "--out", str(out), "--jobs", "2"]

    return first


def _table(name: str, *more: str) -> Command:
    made = _many(name, "averaged", "alone", *more)
    return Command(lambda out: [*made(out), "--csv", str(out / "table.csv")], ("table.csv",))


COMMANDS: dict[str, Command] = {
    **{f"inline-{method}": _simulate(method, "inline") for method in METHODS},
    "ray": _simulate("uefl", "ray"),
    "compare": _table("compare", "--seeds", "2"),
    "crossvalidate": _table("crossvalidate", "--folds", "2", "--repeats", "1"),
    "tune": Command(_many("tune", "averaged"), ("tune-averaged/chosen.json",)),
    "pretrain": Command(
        lambda out: [
            *("pretrain", "skin", "--file", _file(out), "--out", str(out)),
            *("--save-as", str(out / "tiny.safetensors")),
        ],
        ("tiny.safetensors",),
        once=True,
    ),
    "finetune": Command(
        lambda out: [
            *("finetune", "--task", "classification", "--weights", "scratch"),
            *("--dataset", "angiogram-phantom", "--seeds", "1", "--epochs", "1"),
            *(
                "--set",
                "split.sample-share=0.03",
                "--set",
                "split.val-folds=2",
                "--set",
                "data.image-size=32",
            ),
            *("--set", "network.width=4", "--set", "train.batch-size=8"),
            *("--device", "cpu", "--out", str(out / "finetuned")),
        ],
        ("finetuned/*.csv",),
        once=True,
    ),
    "predict": Command(
        lambda out: [
            *("predict", str(out.parent / "finished" / "run"), "--site", "cleveland"),
            *("--split", "test", "--out", str(out / "predictions.csv")),
        ],
        ("predictions.csv",),
        once=True,
    ),
}


def _drawn(trial: int) -> tuple[str, random.Random]:
    """Return a trial's command and its random numbers; the long ones less often."""
    draw = random.Random(trial)
    inline = [name for name in COMMANDS if name.startswith("inline")]
    others = [name for name in COMMANDS if not name.startswith("inline")]
    return draw.choice(inline if draw.random() < 0.6 else others), draw


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the simulation file and a finished run to predict by."""
    folder = tmp_path_factory.mktemp("kills")
    (folder / "simulation.yaml").write_text(json.dumps(FILE))  # JSON is YAML
    told = ["--engine", "inline", "--out", str(folder / "finished"), "--name", "run"]
    _run(["simulate", "averaged", "--file", str(folder / "simulation.yaml"), *told])
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Callable[[str], tuple[dict[str, bytes], set[str], float]]:
    """Return what an undisturbed command ends with: bytes, names of files, seconds."""

    @functools.cache
    def run(name: str) -> tuple[dict[str, bytes], set[str], float]:
        out = folder / f"whole-{name}"
        out.mkdir()
        began = time.monotonic()
        _run(COMMANDS[name].first(out))
        return *_found(COMMANDS[name], out), time.monotonic() - began

    return run


def _arguments(command: list[str]) -> list[str]:
    return [sys.executable, "-m", "fedsilo.cli", *command]


def _run(command: list[str], trial: str = "") -> None:
    environment = os.environ | {MARK: trial}
    done = subprocess.run(
        _arguments(command), capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def _found(command: Command, out: Path) -> tuple[dict[str, bytes], set[str]]:
    decided = {
        str(path.relative_to(out)): path.read_bytes()
        for pattern in command.decided
        for path in sorted(out.glob(pattern))
        if path.is_file()
    }
    assert decided, f"nothing in {out} is of {command.decided}"
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    return decided, names


def _left(trial: str) -> list[psutil.Process]:
    left = []
    for process in psutil.process_iter():
        try:
            ended = process.status() == psutil.STATUS_ZOMBIE
            if not ended and process.environ().get(MARK) == trial:
                left.append(process)
        except psutil.Error:
            continue
    return left


@pytest.mark.parametrize("trial", TRIALS)
def test_a_killed_command_given_again_ends_alike(
    trial: int,
    folder: Path,
    whole: Callable[[str], tuple[dict[str, bytes], set[str], float]],
) -> None:
    name, draw = _drawn(trial)
    command, (expected, names, seconds) = COMMANDS[name], whole(name)
    out, mark = folder / f"trial-{trial}-{name}", f"{folder.name}-{trial}"
    out.mkdir()
    after = draw.uniform(0, seconds)
    victim = subprocess.Popen(
        _arguments(command.first(out)),
        env=os.environ | {MARK: mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        victim.wait(after)
    except subprocess.TimeoutExpired:
        victim.send_signal(signal.SIGKILL)
    victim.wait()
    limit = time.monotonic() + END
    while _left(mark) and time.monotonic() < limit:
        time.sleep(0.1)
    told = f"trial {trial}: {name}, killed after {after:.2f} of {seconds:.2f} s"
    assert _left(mark) == [], f"{told}: processes are left"
    if not (command.once and any(out.glob(command.decided[0]))):
        _run((command.again or command.first)(out), mark)
    found, there = _found(command, out)
    assert found.keys() == expected.keys(), told
    assert [key for key in expected if found[key] != expected[key]] == [], told
    assert there - names == set(), f"{told}: files that an undisturbed one has not"
    assert names - there == set(), f"{told}: files are missing"
    assert _left(mark) == [], f"{told}: processes are left"


def test_a_killed_fetch_leaves_no_half_file(tmp_path: Path, real_data: Path) -> None:
    """A server sends slowly; what is killed meanwhile leaves nothing or the complete file.

    What has arrived of an incomplete one is in a hidden folder, which the next command removes.
    """
    source = real_data / "heart_disease"

    class Slow(http.server.SimpleHTTPRequestHandler):
        def copyfile(self, source: object, outputfile: object) -> None:
            data = source.read()  # type: ignore[attr-defined]
            for start in range(0, len(data), 2000):
                outputfile.write(data[start : start + 2000])  # type: ignore[attr-defined]
                time.sleep(0.05)

        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Slow, directory=str(source))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        told = ["--base-url", f"http://127.0.0.1:{server.server_port}", "--accept-licence"]
        for trial in range(max(3, KILLS // 20)):
            data = tmp_path / str(trial)
            command = ["fetch", "heart", "--data-dir", str(data), *told]
            victim = subprocess.Popen(
                _arguments(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            time.sleep(random.Random(trial).uniform(0.5, 6.0))
            victim.kill()
            victim.wait()
            for path in data.glob("heart_disease/*.data"):
                assert path.read_bytes() == (source / path.name).read_bytes()
            _run(command)
            assert [p.name for p in data.rglob("*") if p.is_file()].count(FETCHED) == 1
            server_left = [p for p in data.rglob("*") if p.is_file() and p.suffix != ".data"]
            assert server_left == []
        server.shutdown()
