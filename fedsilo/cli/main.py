"""Federated learning between hospitals: run, compare, inspect and use experiments."""

import os
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import click
import typer
import typer.core
import typer.main

from fedsilo.cli.commands import add_commands, panels
from fedsilo.core.errors import FedsiloError, SettingError, error_line
from fedsilo.core.one_line import as_word, one_line
from fedsilo.core.processes import VERBOSE
from fedsilo.core.settings.removed import COMMANDS, OPTIONS
from fedsilo.core.versions import FEDSILO


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0 success, 1 an error (one line says which), 130 interrupted.

    Raises:
        SystemExit: the arguments cannot be used (2), or help was printed (0).
    """
    words = sys.argv[1:] if arguments is None else arguments
    # Python puts the working folder before all packages in the processes that we start by '-m'. A
    # kit or a run directory may have been handed over with a yaml.py next to it
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        _refuse_removed(words)
        return _invoke(list(words))
    except FedsiloError as error:
        print(error_line(error), file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left
        return 1
    except OSError as error:
        reason = error.strerror or one_line(error)
        said = f"fedsilo: error: {error.filename or 'system'}: {reason}"
        print(one_line(said, 1000), file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        hint = f"; to continue: fedsilo resume {as_word(Path(error.args[0]))}" if error.args else ""
        print(f"fedsilo: interrupted{hint}", file=sys.stderr)
        return 130


def _refuse_removed(words: Sequence[str]) -> None:
    """Refuse a command or an option that an earlier version had, and name its replacement.

    Raises:
        SettingError: the first word is a removed command, or a removed option follows its command.
    """
    command = words[0] if words else ""
    if command in COMMANDS:
        raise SettingError(f"this version has no command '{command}': {COMMANDS[command]}")
    options = f" {' '.join(words[1:])} ".replace("=", " ")
    for (of_command, option), instead in OPTIONS.items():
        if of_command == command and f" {option} " in options:
            raise SettingError(f"'fedsilo {command}' has no '{option}' in this version: {instead}")


def _invoke(words: list[str]) -> int:
    """Run one command, without click's own handling of broken pipes and interrupts."""
    command = typer.main.get_command(make_app())
    try:
        with command.make_context("fedsilo", words) as context:
            command.invoke(context)
    except click.exceptions.Exit as end:
        raise SystemExit(end.exit_code) from None
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    return 0


class _ByPanel(typer.core.TyperGroup):
    """Lists commands by panel, and within a panel in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.commands, key=lambda name: panels().index(self._panel(name)))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for panel, members in groupby(self.list_commands(ctx), key=self._panel):
            with formatter.section(panel):
                formatter.write_dl([(name, self.commands[name].help or "") for name in members])

    def _panel(self, name: str) -> str:
        return str(getattr(self.commands[name], "rich_help_panel", ""))


def make_app() -> typer.Typer:
    """Build the typer app with all commands."""
    typer.core.HAS_RICH = False  # with rich, typer prints escape sequences even in plain help
    app = typer.Typer(
        name="fedsilo",
        cls=_ByPanel,
        help=__doc__,
        suggest_commands=not hasattr(click, "NoSuchCommand"),  # click 8.4 suggests by itself
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options_of_all)
    add_commands(app)
    return app


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"fedsilo {FEDSILO}")
        raise typer.Exit


def _options_of_all(
    version: Annotated[
        bool,
        typer.Option("--version", help="print the version", callback=_say_version, is_eager=True),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="show what Flower prints")] = False,
) -> None:
    if verbose:
        os.environ[VERBOSE] = "1"
