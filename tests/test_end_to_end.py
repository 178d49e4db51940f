"""Every method of the registry from settings to run directory, with the inline engine."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import fedsilo.engines.inline_engine
from fedsilo import predict
from fedsilo.comparison.results import refuse_unmeasured
from fedsilo.core.errors import RunDirectoryError, SiteError
from fedsilo.core.messages import TRAINING
from fedsilo.core.methods import METHODS
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import inline_grid, run_inline
from fedsilo.engines.process_engine import run_with_processes
from fedsilo.pictures import picture_files
from fedsilo.pictures.learning_curves import draw_documents, draw_pictures
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.run import runner
from fedsilo.strategies.meeting.simulated_sites import SimulatedSites
from tests.support import golden
from tests.support.dying_grid import DyingGrid
from tests.support.kernels import KERNELS
from tests.support.soak import in_soak
from tests.support.tiny import VARIANTS

# Their rounds and states are those of another variant: dying once more shows nothing
SAME_STATE = {
    *("feddistill-vit", "fedevprompt-g", "fedproto-nearest", "fedproto-vit"),
    *("fedefm-ring-vit", "star", "cross", "fedaligncl", "local-half-epochs", "mix-half-epochs"),
}
# A run of each of these is started again and must give the same
TWICE = ("uefl", "fedaligncl", "fedefm-ring-vit", "cross")
# One that keeps each kind of state, at the server or at its sites: sums, an optimiser, moments of a
# mean, a former model, a book, maps, a second model. The others die in `make test-soak`
DIE = {
    *("fedavg-secure", "fedavg-optimiser-state", "fedadam", "scaffold-bf16"),
    *("uefl", "fedevprompt", "cdl", "picsr", "distrans"),
}
# Runs with each kind of picture of their own, drawn to the last dot, which takes longer than such a
# run does. Of the others the figures are made, and empty files written
DRAWN = ("cross", "fedaligncl", "fedavg", "fedefm", "fedevprompt", "matcha", "picsr", "uefl")
CURVES = "fedavg"  # drawn of this run alone, because they are the same whatever the method is
Tiny = Callable[..., dict[str, Value]]
InlineRun = Callable[..., RunDirectory]


def _values(tiny: Tiny, variant: str, **changes: Value) -> dict[str, Value]:
    values = VARIANTS[variant]
    return tiny(str(values["method"])) | values | changes


def _bytes(directory: RunDirectory) -> dict[str, bytes]:
    """Return every file whose bytes the seed decides, by its path in the run directory."""
    names = ("metrics.csv", "model.safetensors", "best.safetensors")
    wanted = [directory.path / name for name in names]
    wanted += sorted(directory.path.glob("sites/*/*"))
    return {str(p.relative_to(directory.path)): p.read_bytes() for p in wanted if p.is_file()}


def _draw(directory: RunDirectory, variant: str) -> None:
    """Draw what a run has beside its curves; empty files, unless it is one of those to be drawn."""
    if variant == CURVES:
        draw_pictures(directory, pytest.fail)
        return
    write = picture_files.write_picture
    # The picture of the labels is of the data, so it is the same too
    empty = {"distribution"} if variant in DRAWN else None

    def write_some(path: Path, figure: Figure) -> None:
        if empty is None or path.stem in empty:
            path.write_bytes(b"")
        else:
            write(path, figure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(picture_files, "write_picture", write_some)
        draw_documents(directory)


@pytest.fixture(scope="module")
def finished(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunDirectory]:
    """Return a variant's run of three rounds, run once for all tests that only read it."""

    @functools.cache
    def run(variant: str) -> RunDirectory:
        out = str(tmp_path_factory.mktemp(variant))
        values = _values(tiny, variant, rounds=3) | {"run.name": "run", "run.out": out}
        directory = run_inline(resolve(values), 3)
        if variant in METHODS:  # a variant's are the same
            _draw(directory, variant)
        return directory

    return run


@pytest.fixture
def copied(
    finished: Callable[[str], RunDirectory], tmp_path: Path
) -> Callable[[str], RunDirectory]:
    """Copy a variant's run, without pictures, to where ``inline_run`` would make it.

    For tests that change a finished run: training it once more would take longer.
    """

    def copy(variant: str) -> RunDirectory:
        pictures = shutil.ignore_patterns("*.png", "*.pdf")
        shutil.copytree(finished(variant).path, tmp_path / "run", ignore=pictures)
        return RunDirectory(tmp_path / "run")

    return copy


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_writes_the_whole_run_directory(
    variant: str, finished: Callable[[str], RunDirectory]
) -> None:
    directory = finished(variant)
    summary = directory.read_json("summary.json")
    assert summary["method"] == VARIANTS[variant]["method"]
    assert (summary["rounds"], summary["seed"], summary["dataset"]) == (3, 7, "digits")
    assert list(summary["sites"]) == ["s1a", "s2a", "s3a"]
    for site in summary["sites"].values():
        assert {"accuracy", "entropy", "loss"} <= site.keys()
    refuse_unmeasured(",".join(summary["mean"]), "compare knows each of these before a run")
    assert summary["privacy"]["guarantee"] == "no differential-privacy guarantee"
    assert summary["bytes"]["up"] > 0
    names = {path.name for path in directory.path.iterdir()}
    assert {
        "config.toml",
        "silos.json",
        "metrics.csv",
        "traffic.csv",
        "privacy.json",
        "checkpoints",
    } <= names
    assert ("curves.png" in names) == (variant == CURVES)
    assert ("distribution.png" in names) == (variant in METHODS)
    silos = directory.read_json("silos.json")
    assert silos["s3a"]["sizes"] == {"train": 36, "val": 4, "test": 10}
    rows = directory.read_csv("metrics.csv")
    assert {row["round"] for row in rows} == {"0", "1", "2", "3"}
    traffic = directory.read_csv("traffic.csv")
    assert sum(row["phase"] in TRAINING for row in traffic) == 9
    assert (directory.path / "model.safetensors").is_file() == (summary["method"] != "local")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_has_the_bits_that_were_recorded(
    variant: str, tiny: Tiny, finished: Callable[[str], RunDirectory]
) -> None:
    """What is meant to change them records them again: python -m tests.support.golden."""
    if not KERNELS.items() <= os.environ.items():
        pytest.skip(f"golden.json is of {KERNELS}, and this is tested by other kernels")
    content = golden.recorded()
    if content["machine"] != golden.machine():
        pytest.skip(f"golden.json is of {content['machine']}, and this is {golden.machine()}")
    if variant not in content["runs"]:
        pytest.skip(f"not recorded yet: python -m tests.support.golden {variant}")
    assert golden.values_of(variant) == _values(tiny, variant, rounds=golden.ROUNDS)
    assert golden.digests(finished(variant)) == content["runs"][variant]


@pytest.mark.parametrize("variant", in_soak(VARIANTS, but=METHODS))
def test_predictions_of_the_test_rows_have_the_metrics_of_metrics_csv(
    variant: str, finished: Callable[[str], RunDirectory]
) -> None:
    directory = finished(variant)
    rows = directory.read_csv("metrics.csv")
    for site in ("s1a", "s2a", "s3a"):
        found = predict(directory.path, site=site, split="test")
        metrics = found.document["figures"] | {
            name: values.double().mean().item() for name, values in found.statistics.items()
        }
        told = {
            row["metric"]: float(row["value"])
            for row in rows
            if (row["round"], row["site"], row["split"]) == ("3", site, "test")
        }
        shared = metrics.keys() & told.keys()
        assert {"accuracy", "loss", "entropy", "calibration-error"} <= shared
        assert {name: metrics[name] for name in shared} == {name: told[name] for name in shared}
        assert ("vacuity" in told) == ("vacuity" in found.statistics)


@pytest.mark.parametrize(
    "variant", in_soak(VARIANTS, but=("fedavg", "fedaligncl", "fedavg-secure", "fedavg-bf16"))
)
def test_processes_give_the_same_bytes(
    variant: str, tiny: Tiny, finished: Callable[[str], RunDirectory], tmp_path: Path
) -> None:
    values = _values(tiny, variant, rounds=3) | {"run.name": "run", "run.out": str(tmp_path)}
    resources: dict[str, Value] = {"num-supernodes": 3, "init-args-num-cpus": 2}
    assert _bytes(run_with_processes(resolve(values), resources)) == _bytes(finished(variant))


# Who keeps a state at its sites, measures others' models or asks several times a round
SHARED = ("uefl", "scaffold", "ditto", "fedefm", "picsr", "cross", "fedavg-secure")


@pytest.mark.parametrize("variant", in_soak(VARIANTS, but=SHARED))
def test_sites_that_share_two_supernodes_give_the_same_bytes(
    variant: str, tiny: Tiny, finished: Callable[[str], RunDirectory], tmp_path: Path
) -> None:
    values = _values(tiny, variant, rounds=3) | {"run.name": "run", "run.out": str(tmp_path)}
    settings = resolve(values)
    with inline_grid(settings, 2) as grid:
        shared = runner.run(SimulatedSites(grid, 3), settings)
    assert _bytes(shared) == _bytes(finished(variant))


# A run that dies and is resumed to the same bytes, below, is of the same seed too, and of all
# variants the bits are recorded
@pytest.mark.parametrize(
    "variant", in_soak(VARIANTS, but=("uefl", "fedaligncl", "fedefm-ring-vit", "cross"))
)
def test_the_same_seed_gives_the_same_bytes(
    variant: str, tiny: Tiny, inline_run: InlineRun, finished: Callable[[str], RunDirectory]
) -> None:
    assert _bytes(finished(variant)) == _bytes(inline_run(_values(tiny, variant, rounds=3)))


@pytest.mark.parametrize("variant", in_soak(VARIANTS, but=("fedavg", "local", "uefl")))
def test_another_seed_gives_other_bytes(
    variant: str, tiny: Tiny, inline_run: InlineRun, finished: Callable[[str], RunDirectory]
) -> None:
    first = _bytes(finished(variant))
    other = _bytes(inline_run(_values(tiny, variant, rounds=3, seed=8)))
    assert first["metrics.csv"] != other["metrics.csv"]
    assert all(first[name] != other[name] for name in first.keys() & other.keys())


def _deaths() -> list[tuple[str, int]]:
    """Return variants and after how many messages they die: three hellos, then a round's phases."""
    deaths = dict.fromkeys([name for name in VARIANTS if name not in SAME_STATE], (7, 8, 11))
    deaths["fedavg"] = (2, 4, 7, 8, 11, 13)
    # Of a round's nine messages the last three lay codewords
    deaths |= {name: (7, 10, 11, 12, 13) for name in deaths if name.startswith("uefl")}
    return [(variant, lives) for variant, several in deaths.items() for lives in several]


def _in_every_suite() -> list[tuple[str, int]]:
    """Return a death of most variants, of neighbours different ones; more where phases are many."""
    of = {
        variant: [lives for name, lives in _deaths() if name == variant] for variant, _ in _deaths()
    }
    one = [(name, of[name][index % 3]) for index, name in enumerate(of) if name in DIE]
    return [*one, ("fedavg", 2), ("fedavg", 13)]


@pytest.mark.parametrize(("variant", "lives"), in_soak(_deaths(), but=_in_every_suite()))
def test_a_run_that_dies_after_any_message_resumes_to_the_same_bytes(
    variant: str,
    lives: int,
    tiny: Tiny,
    inline_run: InlineRun,
    finished: Callable[[str], RunDirectory],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values, whole = _values(tiny, variant, rounds=3), _bytes(finished(variant))
    with monkeypatch.context() as patch:
        patch.setattr(fedsilo.engines.inline_engine, "InlineGrid", DyingGrid)
        DyingGrid.lives = lives
        with pytest.raises(KeyboardInterrupt):
            inline_run(values)
    began = (tmp_path / "run").is_dir()  # dying among the hellos leaves nothing behind
    assert began == (lives > 3)
    assert _bytes(inline_run({**values, "resume": began})) == whole


@pytest.mark.parametrize("method", ["fedavg", "ring"])
def test_a_run_killed_as_it_drew_has_all_its_files_once_it_is_resumed(
    method: str,
    tiny: Tiny,
    tmp_path: Path,
    finished: Callable[[str], RunDirectory],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = tiny(method, rounds=3, out=str(tmp_path), run_name="run")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedsilo.server_app.run.ending.evidence_document", die)
        with pytest.raises(KeyboardInterrupt):
            run_inline(resolve(values), 3)
    directory = run_inline(resolve(values | {"resume": True}), 3)
    _draw(directory, method)
    names = {path.name for path in directory.path.iterdir()}
    assert names == {path.name for path in finished(method).path.iterdir()}


def test_a_picture_that_cannot_be_drawn_costs_no_run(
    copied: Callable[[str], RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RunDirectoryError("no picture today")

    curves = "fedsilo.pictures.learning_curves"
    monkeypatch.setattr(f"{curves}.draw_curves", fail)
    directory = copied("fedavg")
    said: list[str] = []
    draw_pictures(directory, said.append)
    assert len(said) == 1, said
    assert "cannot draw metrics.csv (RunDirectoryError: no picture today)" in said[0]
    assert directory.read_json("summary.json")["rounds"] == 3
    assert (directory.path / "distribution.png").is_file(), "the other pictures are drawn"


@pytest.mark.soak
def test_a_killed_process_resumes_to_the_same_bytes(tiny: Tiny, tmp_path: Path) -> None:
    values = _values(tiny, "uefl", rounds=5)
    config = tmp_path / "config.toml"
    config.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items()))

    def command(name: str) -> list[str]:
        return [
            *(sys.executable, "-m", "fedsilo.cli", "simulate", "uefl-digits"),
            *("--engine", "inline", "--config", str(config), "--out", str(tmp_path)),
            *("--name", name),
        ]

    subprocess.run(command("whole"), check=True, capture_output=True)
    victim = subprocess.Popen(command("cut"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoint = tmp_path / "cut" / "checkpoints" / "round-000002.safetensors"
    limit = time.monotonic() + 60
    while not checkpoint.exists() and victim.poll() is None and time.monotonic() < limit:
        time.sleep(0.001)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert not (tmp_path / "cut" / "summary.json").exists()
    resume = [sys.executable, "-m", "fedsilo.cli", "resume", str(tmp_path / "cut")]
    subprocess.run([*resume, "--engine", "inline"], check=True, capture_output=True)
    cut, whole = RunDirectory(tmp_path / "cut"), RunDirectory(tmp_path / "whole")
    assert _bytes(cut) == _bytes(whole)


def test_resuming_with_another_config_or_other_data_is_refused(
    tiny: Tiny, inline_run: InlineRun, copied: Callable[[str], RunDirectory]
) -> None:
    (copied("fedavg").path / "summary.json").unlink()
    with pytest.raises(RunDirectoryError, match="rounds is 3 there and 4 here"):
        inline_run(_values(tiny, "fedavg", resume=True, rounds=4))
    with pytest.raises(RunDirectoryError, match="their data differ from those"):
        inline_run(_values(tiny, "fedavg", resume=True, rounds=3), nodes=2)


@pytest.mark.parametrize("variant", ["local", "fedper", "fedavg-ft", "fedproto", "ring"])
def test_private_state_that_is_gone_stops_a_resumed_run(
    variant: str, tiny: Tiny, inline_run: InlineRun, copied: Callable[[str], RunDirectory]
) -> None:
    directory = copied(variant)
    (directory.path / "summary.json").unlink()
    for path in directory.path.glob("sites/s2a/*"):
        path.unlink()
    with pytest.raises(SiteError, match="private state of site s2a is gone"):
        inline_run(_values(tiny, variant, resume=True, rounds=3))


def test_a_finished_run_has_nothing_to_resume(
    tiny: Tiny,
    inline_run: InlineRun,
    copied: Callable[[str], RunDirectory],
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = copied("fedavg")
    before = (directory.path / "summary.json").stat().st_mtime_ns
    inline_run(_values(tiny, "fedavg", resume=True, rounds=3))
    assert "nothing to resume" in capsys.readouterr().out.replace("\n", " ")
    assert (directory.path / "summary.json").stat().st_mtime_ns == before


def test_fewer_nodes_than_silos_are_named(
    tiny: Tiny, inline_run: InlineRun, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = inline_run(_values(tiny, "fedavg", rounds=1), nodes=2)
    said = capsys.readouterr().out
    assert "2 of 3 silos take part: s1a, s2a; no SuperNode for s3a" in said
    assert list(directory.read_json("summary.json")["sites"]) == ["s1a", "s2a"]


def test_uefl_extends_and_the_new_book_is_in_the_model(
    finished: Callable[[str], RunDirectory],
) -> None:
    from fedsilo.core.files.state_files import load_state

    directory = finished("uefl")
    arrays, facts = load_state(directory.path / "model.safetensors")
    marks = directory.read_json("summary.json")["marks"]
    sites = facts["extras"]["access"]["1"]
    assert marks["1"] == f"new codewords for {', '.join(sites)}; first codewords re-initialised"
    assert arrays["codebook.0"].shape == (4, 16)
    assert arrays["codebook.1"].shape[1] == 16


def test_methods_start_from_the_same_weights(finished: Callable[[str], RunDirectory]) -> None:
    def first(method: str) -> dict[str, str]:
        return {
            row["site"]: row["value"]
            for row in finished(method).read_csv("metrics.csv")
            if (row["round"], row["split"], row["metric"]) == ("0", "test", "loss")
        }

    assert first("fedavg") == first("local")


def test_the_inline_engine_runs_where_ray_is_not_installed(tiny: Tiny, tmp_path: Path) -> None:
    values: Mapping[str, Value] = _values(tiny, "fedavg", rounds=1, out=str(tmp_path))
    code = (
        "import sys, json; sys.modules['ray'] = None\n"
        "from fedsilo.engines.inline_engine import run_inline\n"
        "from fedsilo.server_app.config.settings import resolve\n"
        f"run_inline(resolve(json.loads({json.dumps(json.dumps(dict(values)))})), 3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "run directory" in done.stdout


def test_real_mnist_runs_end_to_end(tiny: Tiny, inline_run: InlineRun, real_data: Path) -> None:
    values = tiny(
        "fedavg",
        dataset="mnist",
        data_dir=str(real_data),
        silo_train_size=200,
        silo_test_size=50,
        rounds=3,
        local_epochs=3,
    )
    directory = inline_run(values)
    summary = directory.read_json("summary.json")
    assert summary["mean"]["accuracy"] > 0.3, "three times better than guessing after three rounds"
    published = FinishedRun(directory.path).paper
    assert not published.numbers, "the paper's table is of nine silos, this run of three"
