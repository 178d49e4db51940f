"""The commands that wait for a GPU are accepted by their scripts; nothing is measured."""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.page_commands import commands

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"


class Parsed(Exception):
    """The script has parsed its arguments, and would begin to measure."""


def test_scripts_take_the_arguments_that_the_page_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser, *arguments: Any, **named: Any) -> None:
        parse(parser, *arguments, **named)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    scripts = [words[1:] for words in commands(PAGE, tmp_path) if words[0] == "python"]
    assert len(scripts) >= 4
    for words in scripts:
        assert (ROOT / words[0]).is_file(), words[0]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(Parsed):
            importlib.import_module(f"benchmarks.{Path(words[0]).stem}").main()
