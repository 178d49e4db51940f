"""The kit for a borrowed GPU names only what exists; nothing is trained but in the soak test."""

import argparse
import csv
import gzip
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_kit import cut_data, packages, plans
from fedsilo.api.options import run_sources
from fedsilo.engines.experiments import read_experiments
from fedsilo.engines.planning import planned_settings
from tests.support.page_commands import commands
from tests.support.parsed_command import parsed

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "benchmarks" / "gpu_kit"
PAGE = ROOT / "docs" / "benchmarks.md"
BASH = shutil.which("bash") or "bash"
STAGES = ("setup", "tests", "steps", "modes", "engines")
# Writes down each command in place of running it
RECORDER = """#!/bin/sh
for word; do printf '%s\\0' "$word"; done >> "$FOUND"
printf '\\n\\0' >> "$FOUND"
"""


class Parsed(Exception):
    """A script has parsed its arguments, and would begin to measure."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the simulation file that the borrowed machine has."""
    folder = tmp_path_factory.mktemp("work")
    own = [ROOT / "simulation.yaml", KIT / "experiments.yaml"]
    (folder / "simulation.yaml").write_text("".join(file.read_text() for file in own))
    return folder


def planned(name: str, work: Path) -> list[list[str]]:
    return plans.commands(name, plans.arguments([name, "--work", str(work), "--device", "cpu"]))


@pytest.mark.parametrize("name", plans.PLANS)
def test_every_run_of_a_plan_has_settings(
    name: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # where plugins are named from
    for words in planned(name, work):
        given = parsed(words).params
        assert given["experiments"]
        keys = ("settings", "file", "plugin")
        sources = run_sources({key: given[key] for key in keys})  # type: ignore[typeddict-item]
        for experiment in given["experiments"]:
            assert planned_settings(experiment, sources).common.device == "cpu"


def test_every_experiment_of_the_kit_is_in_a_plan(work: Path) -> None:
    own = read_experiments(work / "simulation.yaml").keys()
    own -= read_experiments(ROOT / "simulation.yaml").keys()
    used: set[str] = set()
    for plan in plans.PLANS.values():
        for table in plan.tables:
            used |= set(table.experiments)
    assert own
    assert own <= used


def test_a_plan_grows_by_a_seed_and_one_on_the_processor_has_all_at_once(work: Path) -> None:
    def seeds(name: str) -> list[str]:
        given = plans.arguments([name, "--seeds", "3"])
        return [words[words.index("--seeds") + 1] for words in plans.commands(name, given)]

    assert seeds("uefl") == ["1", "1", "2", "2", "3", "3"]
    assert seeds("cpu-uefl") == ["3"]


def page_calls(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each set of data of the page with the stages of a call that has it."""
    data = ""
    for words in commands(PAGE, tmp_path):
        if words[1].endswith("prepare.sh"):
            data = words[2]
        else:
            yield data, words[2:]


def test_the_page_has_every_stage_and_plan_with_data_that_it_can_use(tmp_path: Path) -> None:
    seen = set()
    for data, stages in page_calls(tmp_path):
        assert data in cut_data.SETS
        for stage in stages:
            kind, _, names = stage.partition(":")
            seen |= {kind}
            for name in filter(None, names.split(",")):
                assert data in plans.PLANS[name].data, stage
                assert plans.runs_on_cores(name) == (kind == "beside")
                seen.add(name)
    assert seen == {*STAGES, *plans.PLANS, "paper", "beside"}


def recorded(folder: Path, stages: list[str]) -> list[list[str]]:
    """Return the commands that on_device.sh would give, without Python's own name."""
    python, found = folder / "python", folder / "found"
    python.write_text(RECORDER)
    python.chmod(0o755)
    given = {"PY": str(python), "FOUND": str(found), "WORK": str(folder / "work"), "DEVICE": "cpu"}
    given |= {"SMALL": "rounds=1", "ONLY": "fedavg picsr"}
    script = [BASH, str(KIT / "on_device.sh"), *stages]
    subprocess.run(script, env=os.environ | given, capture_output=True, check=True)
    return [line.removesuffix("\0").split("\0") for line in found.read_text().split("\n\0") if line]


def test_the_stages_give_scripts_arguments_that_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *arguments: Any, **named: Any) -> None:
        parse(parser, *arguments, **named)
        raise Parsed

    found = recorded(tmp_path, list(STAGES))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    scripts = [words for words in found if words[0].startswith("benchmarks/")]
    measuring = [words for words in scripts if "gpu_kit" not in words[0]]
    assert len(measuring) == 5
    for words in measuring:
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(Parsed):
            importlib.import_module(f"benchmarks.{Path(words[0]).stem}").main()
    tests = next(words for words in found if words[:2] == ["-m", "pytest"])
    paths = [word for word in tests if word.startswith("tests/")]
    assert len(paths) >= 2
    assert all((ROOT / path).exists() for path in paths)


@pytest.mark.parametrize("script", ["prepare.sh", "on_device.sh"])
def test_a_script_is_bash(script: str) -> None:
    subprocess.run([BASH, "-n", str(KIT / script)], check=True)


def test_the_machine_or_the_wheels_have_every_dependency() -> None:
    assert packages.lacking() == []


def test_a_cut_file_has_the_first_items_of_the_whole(tmp_path: Path) -> None:
    head = bytes([0, 0, 8, 3, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 2])  # three images of 2 x 2
    (tmp_path / "whole.gz").write_bytes(gzip.compress(head + bytes(range(12))))
    for count, kept in ((2, 2), (9, 3)):
        cut_data.cut_idx(tmp_path / "whole.gz", tmp_path / "cut" / "part.gz", count)
        found = gzip.decompress((tmp_path / "cut" / "part.gz").read_bytes())
        assert found == head[:7] + bytes([kept]) + head[8:] + bytes(range(4 * kept))


@pytest.mark.soak
def test_setup_and_engines_run_on_a_processor(tmp_path: Path) -> None:
    given = {"PY": sys.executable, "WORK": str(tmp_path), "DEVICE": "cpu", "SMALL": "rounds=2"}
    given |= {"ONLY": "fedavg"}
    script = [BASH, str(KIT / "on_device.sh"), "setup", "engines"]
    subprocess.run(script, env=os.environ | given, check=True)
    out = tmp_path / "out"
    rows = list(csv.DictReader((out / "engines-gpu.csv").read_text().splitlines()))
    assert {row["engine"]: row["note"] for row in rows} == dict.fromkeys(
        ("inline", "vectorised", "processes", "Flower"), ""
    )
    assert len(list(out.iterdir())) <= 8
