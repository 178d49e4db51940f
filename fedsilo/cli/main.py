"""The ``fedsilo`` command: its options, errors and exit codes.

The command line is built from the table of commands: each parameter of a command's function becomes
an option. The function of the same name in ``results`` shows the result; its further parameters are
options too, which only the command line has.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, cast, get_args, get_origin

import click
import typer
import typer.core
import typer.main

from fedsilo.api.options import Option, members_of, option_of, parameters_of
from fedsilo.api.table import COMMANDS, GROUPS, Command
from fedsilo.cli import results
from fedsilo.cli.completion import COMPLETIONS, VARIABLE
from fedsilo.cli.printing import line, print_result
from fedsilo.cli.suggestions import suggest
from fedsilo.core.errors import FedsiloError, SettingError, describe_system_error, error_line
from fedsilo.core.one_line import as_word
from fedsilo.core.processes import VERBOSE
from fedsilo.core.settings import removed
from fedsilo.core.versions import FEDSILO
from fedsilo.pictures.picture_files import picture_path

_SILENT = ("", "()", "None", "False")  # defaults that would not tell the user anything


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code.

    Without arguments it prints the help. An error is printed as one line on standard error. If the
    output is a pipe that its reader has closed, nothing is printed.

    Returns:
        0 for success, 1 for an error or a closed pipe, 130 if the user interrupted the command.

    Raises:
        SystemExit: with code 2 if the arguments cannot be used, and with code 0 after printing
            help. A command may end with another code, such as 3 for a failed check.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    words = list(arguments) or ["--help"]
    # Python puts the working folder before all packages in the processes that we start by '-m'. A
    # kit or a run directory may have been handed over with a yaml.py next to it
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        _refuse_removed(words)
        return _invoke(words)
    except FedsiloError as error:
        print(error_line(error), file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left
        return 1
    except OSError as error:
        print(f"fedsilo: error: {describe_system_error(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        hint = ""
        # An interrupted run names its directory, so that the line can name the command to continue
        if error.args:
            hint = f"; to continue: fedsilo resume {as_word(Path(error.args[0]))}"
        print(f"fedsilo: interrupted{hint}", file=sys.stderr)
        return 130


def _refuse_removed(words: Sequence[str]) -> None:
    """Check that the command line has no command, option or argument that was removed from fedsilo.

    ``words`` are the words of the command line, and the first one is the command.

    Raises:
        SettingError: the command was removed, or one of its options or arguments was. The message
            says how to replace it.
    """
    # Before click parses the words, because it would suggest a name of similar letters in place of
    # the replacement
    command = words[0]
    if command in removed.COMMANDS:
        instead = removed.COMMANDS[command]
        raise SettingError(f"this version has no command '{command}': {instead}")
    options = f" {' '.join(words[1:])} ".replace("=", " ")
    for (of_command, option), instead in removed.OPTIONS.items():
        if of_command == command and f" {option} " in options:
            raise SettingError(f"'fedsilo {command}' has no '{option}' in this version: {instead}")


def _invoke(words: list[str]) -> int:
    """Run one command of the command line.

    If a shell asks for completions, they are printed, and the process ends. Interrupts, closed
    pipes and errors of the command are passed on to the caller, which prints messages for them.

    Returns:
        Always 0. A command with another exit code raises SystemExit.

    Raises:
        SystemExit: the command ended with an exit code, or click rejected the arguments. Click's
            message is then already printed.
    """
    # At an interrupt, click's own ``main`` would print only "Aborted!"; the line of our caller says
    # how to go on. Errors in the arguments are still shown by click, with the usage
    functions = tuple((one.load(), _shown_by(name)) for name, one in _all_commands())
    command = _parser_of(functions)
    # A shell that asks for completions gets them here, and the process ends
    command._main_shell_completion({}, "fedsilo", VARIABLE)
    try:
        with command.make_context("fedsilo", words) as context:
            command.invoke(context)
    except click.exceptions.Exit as end:
        raise SystemExit(end.exit_code) from None
    except click.ClickException as error:
        _show_usage_error(error, words)
        raise SystemExit(error.exit_code) from None
    return 0


@cache
def _parser_of(_: tuple[tuple[Callable[..., Any], ...], ...]) -> click.Command:
    """Build the parser of the command line, or return the one that was built before.

    The argument is the key of the cache, and has the functions of all commands. As long as these
    functions are the same, the same parser is returned. Building it takes a tenth of a second.
    """
    return typer.main.get_command(make_app())


def _all_commands() -> Iterator[tuple[str, Command]]:
    for commands in COMMANDS.values():
        yield from commands.items()


def _shown_by(name: str) -> Callable[..., Any]:
    """Return the function that shows the result of the command ``name``.

    If ``results`` has no function of that name, it is ``print_result``.
    """
    return cast(Callable[..., Any], getattr(results, name.replace(" ", "_"), print_result))


def _show_usage_error(error: click.ClickException, words: Sequence[str]) -> None:
    """Show click's error about the arguments, with the usage of the command.

    If ``suggest`` finds a suggestion for ``words``, the words of the command line, it replaces the
    error's text.
    """
    instead = suggest(error, words)
    if instead and isinstance(error, click.UsageError):
        wrong = getattr(error, "option_name", words[0])
        error = click.UsageError(f"'{wrong}' is not known here. Did you mean: {instead}", error.ctx)
    error.show()


class _ByPanel(typer.core.TyperGroup):
    """Lists commands by panel, and within a panel in the order they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        # Typer adds all groups before all commands, so they are sorted by panel here. The sort is
        # stable, so the order within a panel stays
        return sorted(self.commands, key=lambda name: list(COMMANDS).index(self._panel(name)))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for panel, members in groupby(self.list_commands(ctx), key=self._panel):
            with formatter.section(panel):
                formatter.write_dl([(name, self.commands[name].help or "") for name in members])

    def _panel(self, name: str) -> str:
        return str(getattr(self.commands[name], "rich_help_panel", ""))


def make_app() -> typer.Typer:
    """Build the typer app of the command line, with all commands and their help."""
    # Typer prints escape sequences even in plain help if it may use rich
    typer.core.HAS_RICH = False
    app = typer.Typer(
        name="fedsilo",
        cls=_ByPanel,
        help="Federated learning between hospitals: run, compare, inspect and use experiments.",
        suggest_commands=not hasattr(click, "NoSuchCommand"),  # click 8.4 suggests by itself
        add_completion=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options_of_all)
    _add_commands(app)
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


class _ClickCommand(typer.core.TyperCommand):
    """Lists each argument once, because click 8.5 drops the help that Typer 0.20 adds."""

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Leave out the arguments here, because Typer lists them before the options."""


def _make_command(texts: Mapping[str, str], **words: Any) -> _ClickCommand:
    """Build a typer command, and set the help texts of its arguments and options.

    Typer 0.20 gives options their help but not arguments, so all help texts are set here.

    Args:
        texts: name of an argument or option -> its help. A parameter without an entry keeps the
            help that it has.
        words: the keyword arguments for the command class.
    """
    made = _ClickCommand(**words)
    for parameter in made.params:
        if parameter.name in texts:
            parameter.help = texts[parameter.name]
    return made


@contextmanager
def _silence(quiet: bool) -> Iterator[None]:
    """Make a context manager that discards all standard output of its block.

    If ``quiet`` is False, nothing is discarded.
    """
    if not quiet:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


_QUIET = inspect.Parameter(
    "quiet",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--quiet", "-q", help="print only the result, such as a run's directory")
    ],
)
_DRY_RUN = inspect.Parameter(
    "dry_run",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--dry-run", help="show plan, cost and files; run nothing")
    ],
)


def _add_commands(app: typer.Typer) -> None:
    """Add all commands in ``COMMANDS`` to an app.

    The help of the app lists each command below a heading. A command of two words, such as 'deploy
    up', is added to a group that is named by its first word.
    """
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
    """Add a command to an app. The command calls its function and shows the result.

    The options of the command are, in this order:

    - those of its function
    - those of the function that shows the result, as far as they are new
    - ``--quiet``
    - ``--dry-run``, if ``command.plan`` is set

    ``--dry-run`` only prints the result of ``command.plan``. ``--quiet`` and ``--json`` discard all
    that the function itself prints. If the result then has a path, such as that of a run, only this
    path is printed.

    Args:
        app: the app, or the group of a command of two words.
        name: the name of the command, such as 'deploy up'.
        command: the function, the plan, and the example that the help ends with.
        panel: the heading under which the help lists the command.
    """
    function = command.load()
    show = _shown_by(name)
    own = parameters_of(function)
    showing = parameters_of(show, skip=1)  # the first one is the result
    options: dict[str, Option] = {}
    signature: list[inspect.Parameter] = []
    # A parameter that both functions have, such as --out, becomes one option
    for parameter in [*own.values(), *showing.values()]:
        option = option_of(parameter.annotation)
        if option is not None and parameter.name not in options:
            options[parameter.name] = option
            signature.append(_typer_parameter(parameter, option))
    signature.append(_QUIET)
    if command.plan:
        signature.append(_DRY_RUN)

    def call(**given: Any) -> None:
        # JSON is one document, so nothing else may be printed
        quiet = given.pop("quiet") or given.get("as_json", False)
        if given.pop("dry_run", False):
            plan = resolve_name(command.plan)
            print_result(plan(**_choose(given, parameters_of(plan))))
            return
        _check_output_files({key: given.get(key) for key in showing.keys() - own.keys()})
        bar = results.progress_bar(name) if "watch" in own else nullcontext()
        with bar as watch:
            given |= {"tell": line, "watch": watch}
            with _silence(quiet):
                # Not the checked function: typer has checked the types, and lines appear as they
                # come
                result = inspect.unwrap(function)(**_choose(given, own))
            if quiet and isinstance(getattr(result, "path", None), Path):
                line(result.path)  # a run
            else:
                show(result, **_choose(given, showing))

    # Typer reads signature and annotations of the function that it calls, so ``call``, which takes
    # any argument, gets the signature of the command
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


def _check_output_files(files: Mapping[str, Any]) -> None:
    """Check before a long command that its options for output files can be used.

    Args:
        files: name of an option for a file -> its value. Values that are not a ``Path`` are
            ignored.

    Raises:
        SettingError: a file is an existing folder, or the file of the option ``picture`` does not
            end with .png, .svg or .pdf.
    """
    for name, path in files.items():
        if isinstance(path, Path) and path.is_dir():
            raise SettingError(f"--{name} {path} is a folder: name a file in it")
    picture_path(files.get("picture"))


def _choose(given: Mapping[str, Any], parameters: Mapping[str, object]) -> dict[str, Any]:
    return {name: given[name] for name in parameters if name in given}


def _typer_parameter(parameter: inspect.Parameter, option: Option) -> inspect.Parameter:
    """Convert a function's parameter to an argument or an option of the command line.

    A keyword-only parameter becomes an option, and any other parameter an argument. A parameter
    whose ``option`` has a name always becomes an option with this name. Otherwise an option is
    named by its parameter, with hyphens in place of underscores, such as ``--dry-run``.

    Args:
        parameter: the parameter of the function.
        option: the help of the parameter. If it has a default, this replaces the parameter's
            default. If it is marked as required, there is no default.

    Returns:
        A keyword-only parameter, whose annotation tells typer about the argument or the option.
    """
    name = parameter.name
    default = parameter.default
    if option.default is not None:
        default = option.default
    # Typer requires a parameter without a default
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
            autocompletion=COMPLETIONS.get(name),
        )
    else:
        shown = name
        if get_origin(kind) is list:
            shown = f"{name.removesuffix('s')}..."
        info = typer.Argument(
            metavar=option.value or shown,
            help=option.help,
            show_default=show_default,
            autocompletion=COMPLETIONS.get(name),
        )
    return inspect.Parameter(
        name, parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _command_type(hint: Any) -> Any:
    """Convert the type of a parameter to a type that the command line can parse.

    A mapping becomes a list of strings ``key=value``, and a sequence becomes a list. Neither may
    then be None, but all other types may be None as before. A union becomes ``Path`` if ``Path`` is
    a member, else ``str`` if ``str`` is a member, else its first member.
    """
    members = [member for member in members_of(hint) if member is not type(None)]
    # Settings are a mapping or texts; a command line has only texts. A sequence comes
    # second, because a union with a mapping may have one too
    if any(get_origin(member) is Mapping for member in members):
        return list[str]
    if get_origin(members[0]) is Sequence:
        return list[_command_type(get_args(members[0])[0])]  # type: ignore[misc]
    chosen = members[0]
    # The path wins over the text, because it comes last: typer then makes the path itself
    for kind in (str, Path):
        if kind in members:
            chosen = kind
    if type(None) in members_of(hint):
        return chosen | None
    return chosen
