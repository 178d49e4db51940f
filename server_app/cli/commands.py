"""The commands: functions of the API, whose arguments become the options.

The function of the same name in ``results`` shows the returned value; its further arguments become
options too. ``commands.toml`` has the names, the examples and the help texts.
"""

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import click
import typer
import typer.core

from fedsilo.server_app import api
from fedsilo.server_app.cli import results

_GIVEN = {"tell", "watch"}  # arguments that the command line supplies, so they are no options
_UNSHOWN = ("", "()", "None", "False")  # defaults that say nothing
_MODULES = {
    "deploy": api.deploying,
    "doctor": api.checking,
    "hospital": api.hospital,
    "privacy": api.privacy,
}


@cache
def _texts() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))


class _ClickCommand(typer.core.TyperCommand):
    """Lists each argument once, because click 8.5 drops the help that Typer 0.20 adds."""

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print no arguments here, because Typer lists them before the options."""


@dataclass(frozen=True)
class Command:
    """A command: its name, the panel of the help that lists it, and its table's entries."""

    name: str
    panel: str
    example: str
    help: Mapping[str, str] = field(default_factory=dict)
    default: Mapping[str, Any] = field(default_factory=dict)
    required: Sequence[str] = ()
    python: Sequence[str] = ()  # arguments that only Python can give

    def add_to(self, app: typer.Typer) -> None:
        """Add the command to an app."""
        group, _, own = self.name.rpartition(" ")
        function: Callable[..., Any] = getattr(_MODULES.get(group, api), own)
        show = getattr(results, self.name.replace(" ", "_"), results.print_result)
        summary = (function.__doc__ or "").partition("\n")[0].partition(";")[0].rstrip(".")
        callback = self._callback(function, show)
        epilog = f"Example: fedsilo {self.example}"
        words = {"help": summary, "epilog": epilog, "rich_help_panel": self.panel}
        app.command(own, cls=self._made, **words)(callback)  # type: ignore[arg-type]

    def _made(self, **parts: Any) -> typer.core.TyperCommand:
        """Build typer's command and set the help text of each argument."""
        made, texts = _ClickCommand(**parts), _texts()["help"] | self.help
        for one in made.params:
            one.help = texts.get(one.name)
        return made

    def _callback(
        self, function: Callable[..., Any], show: Callable[..., None]
    ) -> Callable[..., None]:
        """Build the function that typer calls; its signature lists the command's options.

        Options of the API function come first, then those of the function that shows its result.
        """
        own, showing = _parameters(function), _parameters(show)
        own = {name: one for name, one in own.items() if name not in self.python}
        options = [p for name, p in (own | showing | own).items() if name not in _GIVEN]

        def call(**given: Any) -> None:
            bar = results.progress_bar(self.name) if "watch" in own else nullcontext()
            with bar as watch:
                given |= {"tell": results.line, "watch": watch}
                result = function(**{name: given[name] for name in own})
                show(result, **{name: given[name] for name in showing})

        signature = [self._option(parameter) for parameter in options]
        call.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in signature}
        return call

    def _option(self, parameter: inspect.Parameter) -> inspect.Parameter:
        """Convert a function's parameter to a typer argument or option.

        Only parameters that ``commands.toml`` lists under ``arguments`` are positional.
        """
        texts, name = _texts(), parameter.name
        default = self.default.get(name, parameter.default)
        default = parameter.empty if name in self.required else default
        words: dict[str, Any] = {"help": (texts["help"] | self.help).get(name)}
        words["show_default"] = str(default) not in _UNSHOWN
        info: Any
        if name in texts["arguments"] and parameter.kind is not parameter.KEYWORD_ONLY:
            info = typer.Argument(metavar=texts["arguments"][name], **words)
        else:
            option = texts["names"].get(name, f"--{name.replace('_', '-')}")
            info = typer.Option(option, metavar=texts["values"].get(name), **words)
        return inspect.Parameter(
            name,
            parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[_command_type(parameter.annotation), info],
        )


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function by name, with resolved types.

    The keys of ``**sources``, a typed dictionary, become one optional parameter each. For a
    function of ``results``, the first parameter is left out, because it is the result to show.
    """
    parameters = list(inspect.signature(function).parameters.values())
    found: dict[str, inspect.Parameter] = {}
    for parameter in parameters[function.__module__ == results.__name__ :]:
        hints = SimpleNamespace(__annotations__={"it": parameter.annotation})
        hint = get_type_hints(hints, function.__globals__)["it"]
        if parameter.kind is not parameter.VAR_KEYWORD:
            found[parameter.name] = parameter.replace(annotation=hint)
            continue
        for name, own in get_type_hints(get_args(hint)[0]).items():
            found[name] = inspect.Parameter(
                name, parameter.KEYWORD_ONLY, default=None, annotation=own
            )
    return found


def _command_type(hint: Any) -> Any:
    """Convert the type of an API argument to a type that the command line can parse.

    A mapping becomes a list of ``key=value`` texts, a union becomes its path or text member, and
    an optional type stays optional.
    """
    members = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else [hint]
    rest = [member for member in members if member is not type(None)]
    if any(get_origin(member) is Mapping for member in rest):
        return list[str]
    if get_origin(rest[0]) is Sequence:
        return list[_command_type(get_args(rest[0])[0])]  # type: ignore[misc]
    chosen = next((kind for kind in (Path, str) if kind in rest), rest[0])
    return chosen if len(rest) == len(members) else chosen | None


def panels() -> list[str]:
    """Return the names of the help's panels, in the order of ``commands.toml``."""
    return [name for name in _texts() if name[0].isupper()]


def add_commands(app: typer.Typer) -> None:
    """Add all commands to an app; a command of two words goes into a group named by the first."""
    groups: dict[str, typer.Typer] = {}
    tables = [(panel, *named) for panel in panels() for named in _texts()[panel].items()]
    for panel, name, table in tables:
        command, group = Command(name, panel, **table), name.partition(" ")[0]
        if group not in _MODULES:
            command.add_to(app)
            continue
        if group not in groups:
            groups[group] = typer.Typer(rich_markup_mode=None)
            words = {"help": _texts()["groups"][group], "rich_help_panel": panel}
            epilog = f"Example: fedsilo {command.example}"
            app.add_typer(groups[group], name=group, epilog=epilog, **words)
        command.add_to(groups[group])
