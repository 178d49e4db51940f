"""Builds the command line from the table of commands: each parameter becomes an option.

The function of the same name in ``results`` shows a command's result. Its further parameters are
options too, which only the command line has.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import click
import typer
import typer.core

from fedsilo.api.options import Option, members_of, option_of, parameters_of
from fedsilo.api.table import COMMANDS, GROUPS, Command
from fedsilo.cli import results
from fedsilo.core.errors import SettingError

_SILENT = ("", "()", "None", "False")  # defaults that say nothing


class _ClickCommand(typer.core.TyperCommand):
    """Lists each argument once, because click 8.5 drops the help that Typer 0.20 adds."""

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print no arguments here, because Typer lists them before the options."""


def _make_command(texts: Mapping[str, str], **words: Any) -> _ClickCommand:
    """Build typer's command, and give its arguments the help that Typer 0.20 does not pass on."""
    made = _ClickCommand(**words)
    for parameter in made.params:
        if parameter.name in texts:
            parameter.help = texts[parameter.name]
    return made


def panels() -> list[str]:
    """Return the names of the help's panels, in their order."""
    return list(COMMANDS)


def add_commands(app: typer.Typer) -> None:
    """Add all commands to an app; a command of two words goes into a group named by the first."""
    groups: dict[str, typer.Typer] = {}
    for panel, commands in COMMANDS.items():
        for name, command in commands.items():
            group = name.partition(" ")[0]
            if group not in GROUPS:
                _add_command(app, name, command, panel)
                continue
            if group not in groups:
                groups[group] = typer.Typer(rich_markup_mode=None)
                app.add_typer(
                    groups[group],
                    name=group,
                    help=GROUPS[group],
                    epilog=f"Example: fedsilo {command.example}",
                    rich_help_panel=panel,
                )
            _add_command(groups[group], name, command, panel)


def _add_command(app: typer.Typer, name: str, command: Command, panel: str) -> None:
    """Add one command; its options come first, then those of the function that shows its result."""
    function = command.load()
    show = getattr(results, name.replace(" ", "_"), results.print_result)
    own = parameters_of(function)
    showing = parameters_of(show, skip=1)  # the first one is the result
    options: dict[str, Option] = {}
    signature: list[inspect.Parameter] = []
    for parameter in [*own.values(), *showing.values()]:
        option = option_of(parameter.annotation)
        if option is not None and parameter.name not in options:
            options[parameter.name] = option
            signature.append(_typer_parameter(parameter, option))

    def call(**given: Any) -> None:
        _refuse_folders({key: given.get(key) for key in showing.keys() - own.keys()})
        bar = results.progress_bar(name) if "watch" in own else nullcontext()
        with bar as watch:
            given |= {"tell": results.line, "watch": watch}
            # Not the checked function: typer has checked the types, and lines appear as they come
            result = inspect.unwrap(function)(**_choose(given, own))
            show(result, **_choose(given, showing))

    call.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
    texts = {parameter: option.help for parameter, option in options.items()}
    summary = (function.__doc__ or "").partition("\n")[0].partition(";")[0].rstrip(".")
    app.command(
        name.split(" ")[-1],
        cls=partial(_make_command, texts),  # type: ignore[arg-type]
        help=summary,
        epilog=f"Example: fedsilo {command.example}",
        rich_help_panel=panel,
    )(call)


def _refuse_folders(files: Mapping[str, Any]) -> None:
    """Refuse a folder where a result will be written to a file, before the work of hours.

    Raises:
        SettingError: an option names a folder.
    """
    for name, path in files.items():
        if isinstance(path, Path) and path.is_dir():
            raise SettingError(f"--{name} {path} is a folder: name a file in it")


def _choose(given: Mapping[str, Any], parameters: Mapping[str, object]) -> dict[str, Any]:
    return {name: given[name] for name in parameters if name in given}


def _typer_parameter(parameter: inspect.Parameter, option: Option) -> inspect.Parameter:
    """Convert a function's parameter to an argument or option of typer.

    It is an argument if it comes before the ``*`` of the function and its ``Option`` has no name.
    """
    name = parameter.name
    default = parameter.default
    if option.default is not None:
        default = option.default
    if option.required:
        default = parameter.empty
    show_default = str(default) not in _SILENT
    kind = _command_type(parameter.annotation)
    info: Any
    if option.name or parameter.kind is parameter.KEYWORD_ONLY:
        info = typer.Option(
            option.name or f"--{name.replace('_', '-')}",
            metavar=option.value,
            help=option.help,
            show_default=show_default,
        )
    else:
        shown = name
        if get_origin(kind) is list:
            shown = f"{name.removesuffix('s')}..."
        info = typer.Argument(
            metavar=option.value or shown, help=option.help, show_default=show_default
        )
    return inspect.Parameter(
        name, parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _command_type(hint: Any) -> Any:
    """Convert the type of a parameter to a type that the command line can parse.

    A mapping becomes a list of ``key=value`` texts, a sequence a list, a union its path or text
    member or else its first one, and an optional type stays optional.
    """
    members = [member for member in members_of(hint) if member is not type(None)]
    if any(get_origin(member) is Mapping for member in members):
        return list[str]
    if get_origin(members[0]) is Sequence:
        return list[_command_type(get_args(members[0])[0])]  # type: ignore[misc]
    chosen = members[0]
    for kind in (str, Path):
        if kind in members:
            chosen = kind
    return chosen | None if type(None) in members_of(hint) else chosen
