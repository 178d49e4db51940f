"""Arguments that cannot be used, help, and how the command ends: exit codes and streams."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from server_app.cli import main as command_line
from server_app.cli.main import main

COMMANDS = (
    *("simulate", "resume", "compare", "tune", "crossvalidate", "fetch", "pretrain", "plot"),
    *(
        "explain",
        "attention",
        "settings",
        "experiments",
        "sweep",
        "bars",
        "histograms",
        "embeddings",
    ),
    *("gradcam", "report", "finetune", "deploy"),
)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "Missing command"),
        (["nonsense"], "No such command 'nonsense'"),
        (["simulate"], "Missing argument 'experiment'"),
        (["simulate", "x", "--engine", "slurm"], "'slurm' is not one of 'ray', 'inline'"),
        (["compare", "x", "--seeds", "two"], "'two' is not a valid integer"),
        (["compare", "x", "--split", "train"], "'train' is not one of 'test', 'val'"),
        (["compare"], "Missing argument"),
        (["fetch", "mnist"], "Missing option '--data-dir'"),
        (["simulate", "x", "--nonsense"], "No such option"),
        (["deploy"], "Missing command"),
    ],
)
def test_a_usage_error_exits_with_2_on_standard_error(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert told in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_command_in_the_order_of_use(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([flag])
    assert end.value.code == 0
    lines = capsys.readouterr().out.partition("Commands:")[2].splitlines()
    assert tuple(line.split()[0] for line in lines if line.strip()) == COMMANDS


@pytest.mark.parametrize("command", [*COMMANDS, "against"])
def test_each_command_has_help_and_no_markup_in_it(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert f"Usage: fedsilo {command}" in printed
    assert "\\[" not in printed
    assert "--install-completion" not in printed


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("simulate", "set config out file engine supernodes seed name"),
        ("resume", "engine supernodes"),
        (
            "compare",
            "set config out file engine supernodes seeds jobs split splits metrics median tests "
            "paired csv markdown",
        ),
        ("tune", "set config out file trials seeds jobs"),
        ("crossvalidate", "folds repeats csv markdown set config out file jobs"),
        ("fetch", "data-dir base-url"),
        ("pretrain", "set config out file weights"),
        ("explain", "site row split data-dir state-dir json picture"),
        ("attention", "site split images data-dir state-dir out"),
        ("settings", "pyproject"),
        ("experiments", "file"),
        ("sweep", "metric split picture"),
        ("bars", "metrics round split own csv picture"),
        ("against", "metric split picture"),
    ],
)
def test_a_command_has_these_options_and_no_others(
    command: str, options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.partition("Options:")[2].split("\n")
    found = {line.split()[0] for line in lines if line.startswith("  --")}
    assert found - {"--help"} == {f"--{option}" for option in options.split()}


def _ending(error: BaseException) -> Callable[[list[str]], int]:
    def invoke(_: list[str]) -> int:
        raise error

    return invoke


def test_an_interrupt_exits_with_130_and_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "_invoke", _ending(KeyboardInterrupt()))
    assert main(["settings"]) == 130
    assert capsys.readouterr().err == ("fedsilo: interrupted; 'fedsilo resume RUN-DIR' goes on\n")


def test_a_full_disk_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "_invoke", _ending(OSError(28, "No space left", "x.csv")))
    assert main(["settings"]) == 1
    assert capsys.readouterr().err == "fedsilo: error: x.csv: No space left\n"


def test_a_reader_that_leaves_is_no_traceback() -> None:
    # Closed before anything is written, so that the write fails whatever the buffers
    command = f"{sys.executable} -W ignore -m server_app.cli settings | true"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parents[3],
    )
    assert "Traceback" not in done.stderr


def test_help_does_not_load_torch() -> None:
    code = (
        "import sys\nfrom server_app.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[3],
    )
    assert done.stdout.splitlines()[-1] == "False"
