"""The commands that the pages show name experiments, settings and methods that there are."""

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsilo.models.contract.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
# Whose operands are names of simulation.yaml
RUNNING = {"simulate", "compare", "tune", "crossvalidate", "pretrain"}


def _commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every ``fedsilo`` command in the page's shell blocks."""
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["fedsilo"]:
                yield words[1:]


def _keys(section: Mapping[str, Any], group: str = "") -> Iterator[str]:
    """Yield the keys of pyproject.toml's run config; those of a group with its name."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _keys(value, f"{group}{key}.")
        else:
            yield group + key


def _operands(words: list[str]) -> list[str]:
    """Return the words before the first option: the operands, as the pages write commands."""
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    return [word for word in words[:first] if "$" not in word and not word.isupper()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_experiment_and_setting_in_a_command_exists(page: Path) -> None:
    experiments = yaml.safe_load((ROOT / "simulation.yaml").read_text())["experiments"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    settings = set(_keys(project["tool"]["flwr"]["app"]["config"]))
    for words in _commands(page):
        if words[0] in RUNNING:
            unknown = set(_operands(words[1:])) - set(experiments) - METHODS.keys()
            assert not unknown, f"{' '.join(words)}: no experiment {unknown}"
        for before, word in pairwise(words):
            if before == "--set":
                key = word.partition("=")[0]
                assert key in settings, f"{' '.join(words)}: no setting {key}"


def test_the_pages_show_commands() -> None:
    assert sum(len(list(_commands(page))) for page in PAGES) > 40
