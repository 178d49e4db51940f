"""What a change must not change: digests of runs of every method, and of what the command prints.

    python benchmarks/golden.py record BEFORE.json          # at the state to hold on to
    python benchmarks/golden.py again BEFORE.json AFTER.json
    python benchmarks/golden.py compare BEFORE.json AFTER.json

``record`` runs every method of the table, and variants, on tiny silos by the command line (it
takes two processes and about a quarter of an hour, most of it Ray's). A digest is of arrays, of CSV
without seconds, of JSON without seconds, memory and paths, of pictures whole. Bits depend on the
machine: a record is of use where it was made, so none is committed.
"""

import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ("inline", "ray")
TEXTS = [
    "simulate",
    "resume",
    "compare",
    "tune",
    "crossvalidate",
    "fetch",
    "pretrain",
    "plot",
    "explain",
    "attention",
]
TEXTS += ["settings", "experiments", "histograms", "embeddings", "gradcam", "finetune"]
_TIMES = {
    *("seconds", "peak-memory-bytes", "peak-memory", "bytes_down", "bytes_up", "bytes"),
    *("bytes up", "bytes down", "compute-seconds", "visit-seconds", "cycle-times"),
}


def variants() -> dict[str, dict[str, Any]]:
    """Return the settings of every method's tiny run, and of variants, by name."""
    sys.path.insert(0, str(ROOT))
    try:
        from tests.support.tiny import TINY, TINY_METHOD, VARIANTS
    except ImportError:  # the layout before tests/support
        from tests.conftest import TINY, TINY_METHOD
        from tests.test_end_to_end import VARIANTS
    return {
        name: TINY | TINY_METHOD.get(str(values["method"]), {}) | values
        for name, values in VARIANTS.items()
    }


def command(*arguments: str, **environment: str) -> str:
    """Run fedsilo's command line of this checkout and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "fedsilo.cli", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"fedsilo {' '.join(arguments)}: {done.stdout[-500:]} {done.stderr}")
    return done.stdout


def digests(values: Mapping[str, Any], engine: str, cache: str) -> dict[str, str]:
    """Run ``values`` and return a digest of each file of the run directory."""
    with tempfile.TemporaryDirectory() as folder:
        experiments = {"experiments": {"golden": {"config": dict(values)}}}
        file = Path(folder) / "simulation.yaml"
        file.write_text(json.dumps(experiments))  # JSON is YAML
        options = ("--engine", engine, "--name", "run", "--out", folder, "--file", str(file))
        command("simulate", "golden", *options, FEDSILO_CACHE=cache)
        run = Path(folder) / "run"
        files = sorted(path for path in run.rglob("*") if path.is_file())
        return {str(p.relative_to(run)): digest(p) for p in files if p.name != "config.toml"}


def digest(path: Path) -> str:
    """Return a digest of what a file says, without what differs from run to run."""
    if path.suffix == ".json":
        document = json.loads(path.read_text())
        if path.name == "summary.json":
            document = _with_published(document, path.parent)
        content: bytes = json.dumps(_timeless(document)).encode()
    elif path.suffix == ".csv":
        rows = csv.DictReader(io.StringIO(path.read_text()))
        content = json.dumps([_timeless(row) for row in rows]).encode()
    elif path.suffix == ".safetensors":
        with safe_open(path, framework="numpy") as file:
            names = sorted(file.keys())
            parts = [
                (name, str(file.get_tensor(name).dtype), file.get_tensor(name)) for name in names
            ]
        content = b"".join(
            f"{name} {kind} {array.shape}".encode() + array.tobytes() for name, kind, array in parts
        )
    else:
        content = path.read_bytes()
    return hashlib.sha256(content).hexdigest()[:16]


def _with_published(summary: dict[str, Any], run: Path) -> dict[str, Any]:
    """Add the papers' numbers, which summary.json of version 0.1 had after the validation's."""
    if "published" in summary:
        return summary
    sys.path.insert(0, str(ROOT))
    from fedsilo.runs.finished_run import FinishedRun

    found = FinishedRun(run).paper
    content: dict[str, Any] = {}
    for key, value in summary.items():
        content[key] = value
        if key == "validation":
            content["published"] = found.numbers or None
            content["published-unlike"] = found.unlike or None
    return content


def _timeless(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _timeless(value) for key, value in content.items() if key not in _TIMES}
    if isinstance(content, list):
        return [_timeless(value) for value in content]
    return content


def record(path: Path, known: Mapping[str, dict[str, Any]]) -> None:
    """Run every variant by both engines and write their digests to ``path``."""
    content: dict[str, Any] = {"variants": dict(known), "texts": {}}
    engines = os.environ.get("GOLDEN_ENGINES", ",".join(ENGINES)).split(",")
    content["texts"] = {name: command(name, "--help") for name in TEXTS}
    content["texts"]["settings"] = command("settings")
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(2) as pool:
        jobs = {
            f"{name} {engine}": pool.submit(digests, values, engine, cache)
            for engine in engines
            for name, values in known.items()
        }
        content["runs"] = {}
        for key, job in jobs.items():
            try:
                content["runs"][key] = job.result()
            except RuntimeError as error:  # hours of other runs are worth keeping
                content["runs"][key] = {"the run failed": str(error)[-2000:]}
            print(key, len(content["runs"][key]), "files", flush=True)
            path.write_text(json.dumps(content, indent=1))


def compare(before: Path, after: Path) -> int:
    """Print what differs between two records; return how many places do."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    common = old["runs"].keys() & new["runs"].keys()
    differing = [
        f"text of {title}"
        for title in old["texts"]
        if old["texts"][title] != new["texts"].get(title)
    ]
    for key in sorted(common):
        files, earlier = new["runs"][key], old["runs"][key]
        differing_files = [
            file
            for file in sorted(files.keys() | earlier.keys())
            if files.get(file) != earlier.get(file)
        ]
        differing += [f"{key}: {name}" for name in differing_files]
    print("\n".join(differing) or "equal", f"\n{len(differing)} of", end=" ")
    compared = sum(len(new["runs"][key]) for key in common)
    print(f"{compared} files of {len(common)} runs and {len(old['texts'])} texts differ")
    return len(differing)


def main() -> int:
    """Record, record again, or compare."""
    action, *files = sys.argv[1:]
    paths = [Path(name).resolve() for name in files]
    if action == "record":
        record(paths[0], variants())
    elif action == "again":
        record(paths[1], json.loads(paths[0].read_text())["variants"])
        return bool(compare(*paths))
    else:
        return bool(compare(*paths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
