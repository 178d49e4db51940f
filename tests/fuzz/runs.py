"""Kinds ``runs-<data set>``: a run directory with one file mutated, and a command that reads it.

A command ends well or by one line; it writes where it was told to and nowhere else.
"""

import io
import json
import shutil
import tomllib
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import tomli_w

from fedsilo.cli.main import main
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from tests.fuzz.driver import Kind, Random, Trial
from tests.fuzz.file_mutations import mutate_file
from tests.fuzz.mutations import mutate_bytes, mutate_text, mutate_tree
from tests.fuzz.replies import listening
from tests.support.tiny import TINY, TINY_METHOD

_HEART: dict[str, Value] = {
    "dataset": "heart-synthetic",
    "network.name": "logistic",
    "train.mc-passes": 0,
    "method": "fedavg",
    "split.val-folds": 4,
    "rounds": 2,
}
_RUNS: dict[str, dict[str, Value]] = {
    "heart-synthetic": _HEART,
    "digits": TINY | {"method": "uefl"} | TINY_METHOD["uefl"],
}
_NODES = {"heart-synthetic": 4, "digits": 3}
# {run} is the mutated run directory, {out} an empty folder, {site} one of the run's
_COMMANDS = (
    "resume {run} --engine inline",
    "plot {run}",
    "report {run} --out {out}/page.html",
    "report {run} --for clinic --out {out}/page.html",
    "report {run} --for dpo --out {out}/page.html",
    "watch {run} --once",
    "predict {run} --site {site} --split test --out {out}/cases.csv",
    "calibrate {run} --site {site} --coverage 0.7",
    "card {run} --out {out}/card.md",
    "explain {run} --site {site} --row 0 --json-file {out}/why.json",
    "histograms {run} --picture {out}/histograms.png",
    "embeddings {run} --limit 5 --picture {out}/embeddings.png",
)
_WEIGHTS = {"summary.json": 4, "silos.json": 4, "config.toml": 3, "metrics.csv": 2}


def kinds() -> list[Kind]:
    """Return a kind for each data set of which there is a run."""
    return [Kind(f"runs-{name}", lambda f, n=name: _runs(f, n), 3) for name in _RUNS]


def _runs(folder: Path, name: str) -> Callable[[Trial], None]:
    settings = resolve(_RUNS[name] | {"run.out": str(folder), "run.name": "run"})
    with redirect_stdout(io.StringIO()):
        run = run_inline(settings, _NODES[name]).path
        main(["calibrate", str(run), "--site", _site(run), "--coverage", "0.7"])

    def trial(one: Trial) -> None:
        own, out = one.folder / "run", one.folder / "out"
        shutil.copytree(run, own, symlinks=True)
        out.mkdir()
        command = one.rng.choice(_COMMANDS)
        if command.startswith("resume"):
            (own / "summary.json").unlink()
        path = _file_of(one.rng, own)
        _mutate(one.rng, path, one.done)
        one.done.append(command)
        words = command.format(run=own, out=out, site=_site(run)).split()
        before = {p.name for p in own.iterdir()}
        with listening(one):
            code = main(words)
        one.refused = code != 0
        strays = {path.name for path in one.folder.iterdir()} - {"run", "out"}
        one.faults += [f"outside: {stray!r}" for stray in strays]
        new = {p.name for p in own.iterdir()} - before
        one.faults += [f"written: {name!r}" for name in new if not name.isprintable()]

    return trial


def _site(run: Path) -> str:
    return sorted(json.loads((run / "silos.json").read_text()))[0]


def _file_of(rng: Random, run: Path) -> Path:
    files = sorted(p for p in run.rglob("*") if p.is_file() and not p.name.startswith("."))
    return rng.choices(files, [_WEIGHTS.get(path.name, 1) for path in files])[0]


def _mutate(rng: Random, path: Path, done: list[str]) -> None:
    if path.suffix == ".toml" and rng.random() < 0.5:
        done.append(path.name)
        tree = mutate_tree(rng, tomllib.loads(path.read_text()), done)
        try:
            text = tomli_w.dumps(tree)
        except (TypeError, ValueError, RecursionError, AttributeError):
            text = mutate_text(rng, path.read_text(), done)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    elif path.suffix == ".safetensors" and rng.random() < 0.5:
        done.append(path.name)
        path.write_bytes(_other_facts(rng, path.read_bytes(), done))
    else:
        mutate_file(rng, path, done)


def _other_facts(rng: Random, content: bytes, done: list[str]) -> bytes:
    """Return a state file whose facts were changed and whose checksum is right again."""
    from safetensors.numpy import load, save

    from fedsilo.core.files.state_files import state_digest

    size = int.from_bytes(content[:8], "little")
    arrays = load(content)
    facts = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["fedsilo"])["facts"]
    # What is a method's own in it is the method's own word, under the file's checksum
    extras = {key: facts.pop(key) for key in ("extras",) if key in facts}
    told = mutate_tree(rng, {"facts": facts}, done).get("facts")
    if isinstance(told, dict):
        told |= extras
    try:
        whole = {"facts": told, "sha256": state_digest(arrays, told)}
        return save(arrays, {"fedsilo": json.dumps(whole)})
    except Exception:
        return mutate_bytes(rng, content, done)
