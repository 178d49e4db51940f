"""Arguments that cannot be used, help, and how the command ends: exit codes and streams."""

import contextlib
import functools
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import typer.main

import fedsilo
from fedsilo.cli import main as command_line
from fedsilo.cli.main import main, make_app
from fedsilo.core.settings import removed

PANELS = {
    "Run": "new simulate resume watch fit pretrain",
    "Compare": "compare tune crossvalidate",
    "Look at finished runs": "runs plot attention overlays histograms embeddings gradcam report",
    "Use a model": "explain finetune predict calibrate monitor export card",
    "Deploy": "audit deploy hospital doctor",
    "Data and settings": "fetch datasets manifest survey settings experiments methods privacy",
}
COMMANDS = tuple(" ".join(PANELS.values()).split())
EXAMPLE = re.compile(r"Example: fedsilo ([^\n]+(?:\n  [^\n]+)*)")
NESTED = tuple(
    f"{group} {name}"
    for group, names in {
        "deploy": ("up", "add", "renew", "revoke", "status", "logs", "run", "down"),
        "hospital": ("start",),
        "doctor": ("site", "server", "run"),
        "privacy": ("plan",),
    }.items()
    for name in names
)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["simulate"], "Missing argument 'experiment'"),
        (["simulate", "x", "--engine", "slurm"], "'slurm' is not one of 'auto', 'processes'"),
        (["compare", "x", "--seeds", "two"], "'two' is not a valid integer"),
        (["compare", "x", "--split", "train"], "'train' is not one of 'test', 'val'"),
        (["compare"], "Missing argument"),
        (["finetune"], "Missing option '--task'"),
        (["simulate", "x", "--nonsense"], "No such option"),
        (["deploy"], "Missing command"),
        (["doctor"], "Missing command"),
        (["doctor", "run"], "Missing argument 'experiment'"),
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


@pytest.mark.parametrize("flag", [(), ("-h",), ("--help",)])
def test_help_lists_every_command_by_what_a_person_wants(
    flag: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(flag)
    assert end.value.code == 0
    sections = capsys.readouterr().out.partition("Options:")[2].split("\n\n")[1:]
    listed = {}
    for section in sections:
        title, *lines = section.strip("\n").splitlines()
        names = [line.split()[0] for line in lines if line[2] != " "]  # others go on with a text
        listed[title.rstrip(":")] = " ".join(names)
    assert list(listed.items()) == list(PANELS.items())


@functools.cache
def help_of(command: str) -> str:
    """Return the help that a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    return printed.getvalue()


@functools.cache
def parser() -> click.Command:
    """Return the real parser; to make it for each command takes seconds."""
    return typer.main.get_command(make_app())


@pytest.mark.parametrize("command", [*COMMANDS, *NESTED])
def test_each_command_shows_an_example_that_it_takes(command: str) -> None:
    (shown,) = EXAMPLE.findall(help_of(command))
    words = shlex.split(shown)
    found = parser()
    while isinstance(found, click.Group):
        name = words.pop(0)
        found = found.commands[name]
    assert found.make_context(name, words).params
    assert shown.startswith(command)


@pytest.mark.parametrize("command", [*COMMANDS, *NESTED])
def test_each_argument_of_a_command_is_listed_once_with_help(command: str) -> None:
    printed = help_of(command)
    usage = printed.partition("\n")[0].removeprefix(f"Usage: fedsilo {command}").split()
    for name in usage[1 : None if "COMMAND" not in usage else 1]:
        assert len(re.findall(rf"^  {re.escape(name)}  +\w", printed, re.MULTILINE)) == 1


def test_a_default_of_0_is_shown() -> None:
    assert "counted from 0\n                            [default: 0]" in help_of("explain")


def test_a_misspelt_command_is_suggested_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simualte"])
    assert capsys.readouterr().err.count("Did you mean 'simulate'?") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_and_no_markup_in_it(command: str) -> None:
    printed = help_of(command)
    assert f"Usage: fedsilo {command}" in printed
    assert "\\[" not in printed
    assert "--install-completion" not in printed


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (
            "simulate",
            "set config out file plugin engine ray-address supernodes seed name track no-pictures "
            "dry-run",
        ),
        ("resume", "engine ray-address supernodes track plugin"),
        ("watch", "deployment hospital once port address"),
        ("survey", "deployment set config out file plugin supernodes name"),
        (
            "compare",
            "set config out file plugin engine supernodes seeds jobs slurm split splits metrics "
            "median tests paired unequal no-floor csv markdown latex picture json dry-run",
        ),
        ("tune", "set config out file plugin sampler trials metric folds seeds jobs slurm json"),
        (
            "crossvalidate",
            "folds repeats unequal csv markdown json set config out file plugin jobs slurm",
        ),
        ("fetch", "data-dir base-url accept-licence"),
        ("datasets", "data-dir json"),
        (
            "doctor site",
            "deployment site superlink root-certificates auth-supernode-private-key node-config "
            "host port set config file plugin json kit",
        ),
        (
            "doctor server",
            "deployment ssl-ca-certfile ssl-certfile ssl-keyfile database fleet-api-address host "
            "port hospital json",
        ),
        ("doctor run", "deployment set config file plugin supernodes seed json"),
        ("deploy status", "deployment json"),
        ("privacy plan", "samples epsilon delta counts-noise set config file plugin"),
        ("pretrain", "set config out file plugin save-as"),
        ("explain", "site row split table image data-dir state-dir json-file picture plugin"),
        ("attention", "site split images data-dir state-dir pictures plugin"),
        ("overlays", "site split data-dir state-dir pictures plugin"),
        ("settings", "pyproject json"),
        ("experiments", "method here check file json"),
        ("methods", "plugin json"),
        ("report", "for out audit-log site-file overwrite by decisions data-dir plugin"),
        (
            "predict",
            "out best site images manifest table id split coverage calibration answer-all html "
            "data-dir state-dir plugin json",
        ),
        ("calibrate", "site coverage out data-dir state-dir plugin"),
        ("monitor", "data site coverage calibration data-dir out overwrite plugin json"),
        ("export", "format site out data-dir state-dir plugin"),
        ("card", "site out plugin"),
        ("runs", "method dataset state delete yes json"),
    ],
)
def test_a_command_has_these_options_and_no_others(command: str, options: str) -> None:
    lines = help_of(command).partition("Options:")[2].split("\n")
    found = {line.split()[0].rstrip(",") for line in lines if line.startswith("  --")}
    assert found - {"--help"} == {f"--{option}" for option in options.split()}


def _ending(error: BaseException) -> Callable[[list[str]], int]:
    def invoke(_: list[str]) -> int:
        raise error

    return invoke


def test_an_interrupt_exits_with_130_and_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "fedsilo: interrupted; to continue: fedsilo resume 'runs/a b'\n"
    for error, line in (
        (KeyboardInterrupt(str(Path.cwd() / "runs" / "a b")), said),
        (KeyboardInterrupt(), "fedsilo: interrupted\n"),  # no run has begun
    ):
        monkeypatch.setattr(command_line, "_invoke", _ending(error))
        assert main(["settings"]) == 130
        assert capsys.readouterr().err == line


def test_a_full_disk_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "_invoke", _ending(OSError(28, "No space left", "x.csv")))
    assert main(["settings"]) == 1
    assert capsys.readouterr().err == "fedsilo: error: x.csv: No space left\n"


def test_a_reader_that_leaves_is_no_traceback() -> None:
    # Closed before anything is written, so that the write fails whatever the buffers
    command = f"{sys.executable} -W ignore -m fedsilo.cli settings | true"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parents[3],
    )
    assert "Traceback" not in done.stderr


# Prints, after each command's own lines, the command and what it has loaded
LISTS = """
import contextlib, io, sys
from fedsilo.cli.main import main
heavy = {"torch", "flwr", "pandas", "sklearn"}
for command in ("--help", "experiments", "settings", "datasets", "methods"):
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main([command])
    print(command, bool(shown.getvalue()), *(heavy & sys.modules.keys()))
"""


def test_a_command_that_lists_does_not_load_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LISTS],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[3],
    )
    assert done.stdout.splitlines() == [
        *("--help True", "experiments True", "settings True", "datasets True", "methods True")
    ]


@pytest.mark.parametrize("command", removed.COMMANDS)
def test_a_removed_command_names_what_to_use(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--anything", "runs/x"]) == 1
    said = capsys.readouterr().err
    assert removed.COMMANDS[command] in said
    assert said.count("\n") == 1
    assert command not in COMMANDS
    with pytest.raises(AttributeError, match=re.escape(removed.COMMANDS[command])):
        getattr(fedsilo, command)


@pytest.mark.parametrize(("command", "option"), removed.OPTIONS)
def test_a_removed_option_names_what_to_use(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (option.split(), [option.replace(" ", "=")]):
        assert main([command, "runs/x", *words]) == 1
        said = capsys.readouterr().err
        assert removed.OPTIONS[command, option] in said
        assert said.count("\n") == 1


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--set", "dataset=heart-synthetic", "--out", str(tmp_path / "runs"), "--dry-run"]
    assert main(["simulate", "picsr-heart", "--name", "hearts", *where]) == 0
    printed = capsys.readouterr().out
    assert "picsr on heart-synthetic, 4 sites" in printed
    assert "would write: " in printed
    assert main(["compare", "fedavg-heart", "local-heart", "--seeds", "2", *where]) == 0
    assert "4 of 4 runs to do" in capsys.readouterr().out
    assert main(["compare", "fedavg-heart", "--set", "train.batch-size=0", *where]) == 1
    assert main(["deploy", "run", "fedavg-heart", "--dry-run", "--deployment", "nowhere"]) == 1
    assert not list(tmp_path.iterdir())
