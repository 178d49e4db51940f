"""The commands that the pages print: all are parsed, and those that need no hours are run.

Each page runs in order, in one folder; the README and first steps are one story. A run is made
small by settings added at its end, and files that a command downloads are stand-ins.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from fedsilo.api.options import run_sources
from fedsilo.cli.main import main
from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.methods import METHODS
from fedsilo.engines import planning
from fedsilo.server_app.records.progress_hook import ProgressHook
from tests.support.data_folders import write_sorted, write_tables
from tests.support.made_data import write_data
from tests.support.page_commands import commands
from tests.support.parsed_command import parsed

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "fedsilo" / "api" / "project"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
# Pages that are run in one folder, one after the other -> what the folder holds before
STORIES: Mapping[tuple[str, ...], Callable[[Path], object]] = {
    ("README.md", "docs/first-steps.md"): lambda _: None,
    ("docs/comparing.md",): lambda folder: write_data("heart", folder / "DATA"),
    ("docs/plugs.md",): lambda folder: (folder / "docs").symlink_to(ROOT / "docs"),
    ("docs/own-data.md",): lambda folder: write_sorted(folder / "FOLDER"),
    ("docs/tables.md",): lambda folder: write_tables(folder / "FOLDER"),
    ("docs/unseen.md", "docs/many-sites.md", "docs/secure-aggregation.md"): lambda _: None,
    ("docs/experiments.md",): lambda _: None,
    ("docs/report.md",): lambda _: None,
    ("docs/task-tutorials.md",): lambda _: None,
    ("fedsilo/api/project/README.md",): lambda folder: shutil.copytree(
        PROJECT, folder, dirs_exist_ok=True
    ),
}
SLOW = ["docs/task-tutorials.md"]  # tried by make test-soak; each page's commands are parsed always
# Commands that a story leaves out, by their first words -> why
NOT_RUN = {
    "make run": "it installs the packages, and trains what first steps train",
    "make test": "it is the suite that this test is of",
    "python3 -m venv": "tests/packaging installs the wheel into an environment of its own",
    ".": "it activates that environment",
    "pip install": "it needs a package registry",
    "fedsilo fetch hf:": "it needs Hugging Face; tests/fedsilo/api tries it on a stand-in",
    "fedsilo watch runs --port": "it serves until it is interrupted",
    "fedsilo simulate fedavg-heart --set split.partition=dirichlet": "it needs the 740 patients",
    "fedsilo survey fedavg-heart --deployment": "tests/deploy/test_survey.py runs a deployment",
}
DIGITS = [
    "split.silo-train-size=40",
    "split.silo-test-size=10",
    "rounds=2",
    "train.local-epochs=1",
    "width=4",
    "train.mc-passes=2",
]
HEART = ["rounds=2", "picsr.expert-rounds=1", "dataset=heart-synthetic"]  # in place of real files
UEFL = "uefl.iteration-rounds=1 uefl.extension-rounds=1 uefl.codes=4 uefl.centroid-min-count=1"
FOLDER = ["rounds=1", "train.local-epochs=1", "width=4", "train.mc-passes=0"]
# What makes a command's run small -> settings added at its end; the longest beginning counts
SMALL = {
    "fedsilo simulate picsr-heart": HEART,
    "fedsilo simulate fedavg-heart": ["rounds=2"],
    "fedsilo simulate uefl-digits": [*DIGITS, "silos=3", "rounds=3", *UEFL.split()],
    "fedsilo simulate first": ["rounds=1"],
    "fedsilo simulate own": ["rounds=1"],
    "fedsilo simulate fedavg-digits": DIGITS,
    "fedsilo simulate fedavg-digits --engine inline --set secure": [*DIGITS, "silos=4"],
    "fedsilo simulate fedbn-digits": DIGITS,
    "fedsilo simulate fedbn-tumour": ["rounds=1", "train.local-epochs=1"],
    "fedsilo simulate fedavg-findings": ["rounds=1"],
    "fedsilo simulate fedavg-survival": ["rounds=1"],
    "fedsilo simulate fedavg-vessel-masks": ["rounds=1", "train.local-steps=2"],
    "fedsilo simulate fedavg-digits --set network.name=timm": [
        *(*DIGITS[:3], "silos=2", "train.mc-passes=0", "network.name=timm:test_resnet"),
    ],
    "fedsilo simulate fedavg --engine": FOLDER,
    "fedsilo simulate fedavg --engine inline --set dataset=bloodmnist": [
        *(*FOLDER, "silos=2", "split.silo-train-size=10", "split.silo-test-size=1")
    ],
    "fedsilo simulate fedevprompt-phantom": [
        *(
            "split.sample-share=0.01",
            "data.image-size=32",
            "vit.backbone-width=16",
            "vit.backbone-depth=2",
        ),
        *("vit.basic-layers=1", "rounds=1"),
    ],
    "fedsilo simulate fed-align-cl-phantom": [
        *(
            "split.sample-share=0.02",
            "data.image-size=80",
            "rounds=1",
            "train.epoch-steps=2",
            "pace=2",
        ),
        "fedaligncl.warmup-epochs=0",
    ],
    "fedsilo simulate fedavg-mnist-cpu": [
        *(
            "silos=2",
            "split.silo-train-size=10",
            "split.silo-test-size=1",
            "rounds=1",
            "width=4",
            "train.mc-passes=0",
        )
    ],
    # UEFL extends after 15
    "fedsilo compare uefl-digits": [*DIGITS, "silos=2", "split.silo-train-size=16", "rounds=16"],
    "fedsilo compare": [*DIGITS, "silos=3"],
    "fedsilo compare first": ["rounds=1"],
    "fedsilo crossvalidate": ["rounds=21", "train.local-steps=1"],  # PICSR's experts train in 20
    "fedsilo tune": ["rounds=2"],
}
# Options added at a command's end, for the same reason
FEWER = {
    "fedsilo crossvalidate": ["--folds", "2"],
    "fedsilo compare": ["--seeds", "1"],
    "fedsilo tune": ["--trials", "2", "--folds", "2", "--seeds", "1"],
    "fedsilo embeddings": ["--limit", "20"],
    "fedsilo attention": ["--images", "1"],
}


def _of(table: Mapping[str, Any], text: str) -> Any:
    """Return what a table has for the longest beginning of a command, or None."""
    return table.get(max((key for key in table if text.startswith(key)), key=len, default=""))


def _run(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(words)
    assert words[0] == "fedsilo" or _of(NOT_RUN, text), f"{text}: run it, or say why not"
    if _of(NOT_RUN, text):
        return
    if words[1] == "fetch":
        write_data(words[2], Path(words[words.index("--data-dir") + 1]))
        return
    added = [part for one in _of(SMALL, text) or [] for part in ("--set", one)]
    if words[1] == "simulate":  # drawing takes as long as such a run, so that one alone draws
        added += ["--engine", "inline"]
        added += [] if words[2] == "picsr-heart" else ["--no-pictures"]
    arguments = [*words[1:], *added, *(_of(FEWER, text) or [])]
    if words[1:] == ["simulate", "uefl-digits", "--name", "digits"]:  # "interrupt it with Ctrl-C"
        with monkeypatch.context() as patched:
            patched.setattr(ProgressHook, "round_ended", _interrupt)
            assert main(arguments) == 130
        assert '"interrupted"' in (folder / "runs" / "digits" / "progress.json").read_text()
        return
    assert main(arguments) == 0, text


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    "pages",
    [
        pytest.param(pages, marks=[pytest.mark.soak] if pages[0] in SLOW else [], id=pages[0])
        for pages in STORIES
    ],
)
def test_commands_of_a_story_run_in_order(
    pages: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    STORIES[pages](tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for page in pages:
        for words in commands(ROOT / page, tmp_path):
            _run(words, tmp_path, monkeypatch)


def _plan(context: click.Context) -> None:
    """Read the settings of every experiment that a command names."""
    params = context.params
    named = params.get("experiments") or [params.get("experiment")]
    sources = {
        key: params.get(key) for key in ("settings", "config", "file", "plugin") if params.get(key)
    }
    if params.get("file") or params.get("config"):
        return  # a file of the reader's
    for name in filter(None, named):
        try:
            planning.plan_run(str(name), run_sources(sources))  # type: ignore[arg-type]
        except DataError:  # files that are not here; the settings were read before
            continue


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_accepted_by_the_parser(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for words in commands(page, tmp_path):
        if words[0] == "fedsilo" and "..." not in words:
            try:
                _plan(parsed(words[1:]))
            except click.exceptions.Exit:  # --help
                continue
            except Exception as error:
                raise AssertionError(f"{' '.join(words)}: {error}") from error


def test_pages_print_commands(tmp_path: Path) -> None:
    assert sum(len(commands(page, tmp_path)) for page in PAGES) > 100
    assert {"uefl", "fedavg"} < METHODS.keys()


def test_a_command_that_is_wrong_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\nfor m in a b; do\n  fedsilo simulate $m --sed 1   # no\ndone\n```\n")
    found = commands(page, tmp_path)
    assert found == [["fedsilo", "simulate", m, "--sed", "1"] for m in "ab"]
    with pytest.raises(click.UsageError, match="No such option"):
        parsed(found[0][1:])
    for wrong, told in (("uefl-digit", "unknown experiment"), ("uefl --set rouns=1", "rounds")):
        with pytest.raises(SettingError, match=told):
            _plan(parsed(["simulate", *wrong.split()]))
