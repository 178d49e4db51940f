"""The command line as a user meets it: one line per error, exit code 1, nothing half-written."""

import gc
import io
import json
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsilo.cli import __main__ as process
from fedsilo.cli.main import main
from fedsilo.core.settings_schema import Value
from fedsilo.core.versions import FEDSILO

Tiny = Callable[..., dict[str, Value]]


def _simulate(tiny: Tiny, out: Path, method: str = "fedavg", **changes: Value) -> list[str]:
    values = tiny(method, **changes)
    sets = [f"--set={key}={json.dumps(value)}" for key, value in values.items()]
    # Pictures would take longer than the run
    usual = ["--engine", "inline", "--no-pictures", "--out", str(out), "--name", "run"]
    return ["simulate", f"{method}-digits", *usual, *sets]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["simulate", "uefl-digit"],
            "unknown experiment 'uefl-digit'; did you mean 'uefl-digits'",
        ),
        (["simulate", "zz"], "unknown experiment 'zz': 'fedsilo experiments' lists all "),
        (["simulate", "uefl-digits", "--set", "rouns=1"], "did you mean 'rounds'"),
        (["simulate", "uefl-digits", "--set", "rounds=0"], "at least 1"),
        (["simulate", "uefl-digits", "--set", "uefl.gamma=-1"], "at least 0"),
        (["simulate", "uefl-digits", "--set", "method=fedavgg"], "unknown method"),
        (["simulate", "uefl-digits", "--set", "dataset=mnst"], "unknown data set"),
        (["simulate", "uefl-digits", "--file", "nowhere.yaml"], "nowhere.yaml is missing"),
        (["simulate", "uefl-digits", "--config", "nowhere.toml"], "nowhere.toml cannot be read"),
        (["compare", "uefl-digits", "--seeds", "0"], "at least 1"),
        (["compare", "uefl-digits", "--jobs", "-1"], "at least 0"),
        (
            ["compare", "uefl-digits", "--jobs", "2", "--slurm", "mem_gb=4"],
            "--slurm needs --jobs slurm, but --jobs is 2",
        ),
        (
            ["compare", "uefl-digits", "--jobs", "slurm", "--slurm", "mem_gb"],
            "--slurm mem_gb: write KEY=VALUE, for example mem_gb=4",
        ),
        (["pretrain", "nothere"], "unknown experiment 'nothere': 'fedsilo experiments' lists"),
        (["fetch", "mnist"], "give --data-dir, or set $FEDSILO_DATA"),
        (["compare", "uefl-digits", "--jobs", "many"], "at least 0, or slurm, but is 'many'"),
        (["crossvalidate", "local-heart", "--folds", "1"], "--folds must be at least 2, but is 1"),
        (
            ["crossvalidate", "local-heart", "--repeats", "0"],
            "--repeats must be at least 1, but is 0",
        ),
        (
            ["crossvalidate", "local-heart", "--jobs", "-1"],
            "at least 0, or slurm, but is '-1'",
        ),
        (["crossvalidate", "local-hart"], "did you mean 'local-heart'"),
        (
            ["tune", "local-heart", "--jobs", "-1"],
            "at least 0, or slurm, but is '-1'",
        ),
        (["tune", "local-hart"], "did you mean 'local-heart'"),
        (["tune", "local-digits"], "declares a grid of 0 points"),
        (["tune", "local-heart", "--file", "nowhere.yaml"], "nowhere.yaml is missing"),
        (["explain", "nowhere", "--site", "va", "--row", "0"], "nowhere does not exist"),
        (
            ["simulate", "uefl-digits", "--set", "data.dir=5"],
            "'data.dir' must be a text, but is 5 (int)",
        ),
        (["simulate", "uefl-digits", "--name", " "], "must be a plain name"),
        (["fetch", "digits", "--data-dir", "x"], "nothing to fetch"),
        # By Ray, which takes half a minute to start and did not
        (["simulate", "fedavg-mnist-cpu", "--set", "data.dir=/nowhere"], "ubyte.gz is missing in"),
        (["resume", "nowhere"], "nowhere has no config.toml"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(
    arguments: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDSILO_DATA", raising=False)
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert told in error
    assert error.startswith("fedsilo: error")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"fedsilo {FEDSILO}\n"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"silos": 100}, "100 silos of 40 train images need 4000, but 'digits' has 1437"),
        ({"silo_test_size": 400}, "test images need 1200"),
        ({"min_sites": 3, "silos": 9}, ""),
        ({"dataset": "mnist", "data_dir": "/nowhere"}, "train-images-idx3-ubyte.gz is missing in"),
        ({"device": "cuda:99"}, "usable GPU"),
        ({"device": "tpu"}, "auto, cpu, cuda or cuda:N"),
        (
            {"method": "uefl", "uefl.segments": 3},
            "must divide the encoder's 16 channels, but is 3",
        ),
    ],
)
def test_what_only_the_sites_can_see_is_told_too(
    changes: dict[str, Value],
    told: str,
    tiny: Tiny,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    method = str(changes.pop("method", "fedavg"))
    code = main(_simulate(tiny, tmp_path / "runs", method, **changes))
    error = capsys.readouterr().err
    assert code == (1 if told else 0)
    assert told in error
    assert error.count("\n") == (1 if told else 0)
    assert told == "" or not list((tmp_path / "runs").glob("*/summary.json"))


def test_a_name_that_exists_gets_a_number_and_the_old_run_is_left_alone(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    assert main(_simulate(tiny, tmp_path)) == 0
    said = capsys.readouterr().out
    assert f"fedsilo: {tmp_path / 'run'} exists; this run is named run-2\n" in said
    assert "fedsilo report" in said
    assert list((tmp_path / "run").iterdir()) == []
    assert (tmp_path / "run-2" / "summary.json").is_file()


def test_a_run_prints_a_line_per_round_and_the_table(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(_simulate(tiny, tmp_path, "uefl")) == 0
    said = capsys.readouterr().out
    assert "round 1/2" in said
    assert "new codewords for" in said
    assert "perplexity" in said
    assert f"run directory: {tmp_path / 'run'}" in said
    assert main(["plot", str(tmp_path / "run")]) == 0


@pytest.mark.usefixtures("in_process")
def test_compare_runs_resumes_and_reuses(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sets = [
        f"--set={key}={json.dumps(value)}"
        for key, value in tiny("fedavg").items()
        if key not in ("method", "seed")
    ]
    arguments = [
        "compare",
        "fedavg-digits",
        "local-digits",
        "--seeds",
        "2",
        "--out",
        str(tmp_path),
        "--markdown",
        str(tmp_path / "t.md"),
        *sets,
    ]
    assert main(arguments) == 0
    assert "4 runs" in capsys.readouterr().out
    table = (tmp_path / "t.md").read_text()
    assert table.count("fedavg-digits") == table.count("local-digits") == 5
    assert main(arguments) == 0
    assert "runs, " not in capsys.readouterr().out
    assert (tmp_path / "t.md").read_text() == table


def test_settings_and_experiments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings"]) == 0
    assert "gamma = 0.3" in capsys.readouterr().out
    assert main(["experiments"]) == 0
    listed = capsys.readouterr().out
    line = r"^uefl: UEFL \(Zhang.* 2025\): .*\n  uefl-digits +digits, 9 silos"
    assert re.search(line, listed, re.MULTILINE)


def test_runs_lie_where_out_or_the_environment_says(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [f"--set={key}={json.dumps(value)}" for key, value in tiny("local", rounds=1).items()]
    usual = ["--engine", "inline", "--no-pictures", "--name", "run"]
    arguments = ["simulate", "local-digits", *usual, *sets]
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 0
    assert main([*arguments, "--set", f"run.out={tmp_path / 'set'}"]) == 0
    monkeypatch.setenv("FEDSILO_RUNS", str(tmp_path / "env"))
    assert main(arguments) == 0
    assert main([*arguments, "--out", str(tmp_path / "given")]) == 0
    for folder in ("runs", "set", "env", "given"):
        assert (tmp_path / folder / "run" / "summary.json").is_file()


def test_a_folder_that_cannot_be_written_is_one_line(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(_simulate(tiny, tmp_path / "file" / "runs")) == 1
    error = capsys.readouterr().err
    assert error.startswith("fedsilo: error")
    assert "Not a directory" in error
    assert error.count("\n") == 1


def test_a_run_that_fails_before_its_first_round_ends_leaves_its_name_free(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_simulate(tiny, tmp_path, learning_rate=1e30)) == 1
    error = capsys.readouterr().err
    assert "site s1a, site s2a, site s3a, round 1, phase train: training diverged" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("imported", [False, True])
def test_a_process_collects_at_its_end_what_triton_would_print_as_leaks(
    imported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[bool] = []
    # The process wraps its standard output anew, and would take pytest's away
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(gc, "set_threshold", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["fedsilo", "--version"])
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    if imported:
        monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    with pytest.raises(SystemExit):
        process.run()
    assert frozen == [True] * (not imported)


def _open_output(kind: str, at_once: bool) -> Any:
    """Open an output that takes nothing: a full disk, or a pipe whose reader has left.

    At once, as by ``python -u``, each text is written without a buffer.
    """
    buffering = 0 if at_once else -1
    if kind == "full":
        return Path("/dev/full").open("wb", buffering)
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "wb", buffering)


@pytest.mark.parametrize(("kind", "told"), [("full", 1), ("pipe", 0)])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_command_goes_on_without_its_output_and_ends_with_code_1(
    kind: str,
    told: int,
    at_once: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work() -> int:
        assert sys.stdout.write("metrics") == len("metrics")
        sys.stdout.flush()
        sys.stdout.write("lost")  # to the null device
        return 0

    monkeypatch.setattr(process, "main", work)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(gc, "set_threshold", lambda _: None)
    with monkeypatch.context() as patch:
        usual = io.TextIOWrapper(_open_output(kind, at_once), write_through=at_once)
        patch.setattr(sys, "stdout", usual)
        with pytest.raises(SystemExit) as ended:
            process.run()
        output = sys.stdout
    assert isinstance(output, process.StandardOutput)
    assert output.fault
    output.close()
    assert ended.value.code == 1
    assert capsys.readouterr().err.count("standard output cannot be written") == told


def test_a_command_without_an_output_of_text_keeps_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = io.StringIO()
    monkeypatch.setattr(process, "main", lambda: 3)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(gc, "set_threshold", lambda _: None)
    monkeypatch.setattr(sys, "stdout", closed)
    with pytest.raises(SystemExit) as ended:
        process.run()
    assert (ended.value.code, sys.stdout) == (3, closed)
