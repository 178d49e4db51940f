"""Commands whose options are still read by argparse, passed through to it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import typer

from server_app.cli.deploy import add_deploy
from server_app.cli.figures import add_pictures
from server_app.cli.finetune import add_finetune

_PASSED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_commands(app: typer.Typer) -> None:
    """Add ``histograms``, ``embeddings``, ``gradcam``, ``finetune`` and ``deploy``."""
    parser = argparse.ArgumentParser(prog="fedsilo")
    commands = parser.add_subparsers()
    add_pictures(commands)
    add_finetune(commands)
    add_deploy(commands, _add_settings_options)
    helps = {action.dest: action.help or "" for action in commands._choices_actions}
    for name in commands.choices:
        app.command(name, help=helps[name], context_settings=_PASSED)(_passed(parser, name))


def _passed(parser: argparse.ArgumentParser, name: str) -> Callable[..., Any]:
    def command(context: typer.Context) -> None:
        options = parser.parse_args([name, *context.args])
        options.handler(options)

    command.__annotations__["context"] = typer.Context
    return command


def _add_settings_options(parser: argparse.ArgumentParser) -> None:
    from pathlib import Path

    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="changes",
        help="a setting, instead of the experiment's",
    )
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="settings from a file")
    parser.add_argument(
        "--out", type=Path, help="folder of run directories (default: the settings', else runs)"
    )
    parser.add_argument("--file", type=Path, default=None, help="simulation.yaml to read")
