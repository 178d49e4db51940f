"""The reference pages that are made from the code, each a function that returns its Markdown."""

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

import click
import typer.main

from fedsilo.api.table import public_names
from fedsilo.cli.main import make_app
from fedsilo.core import errors
from fedsilo.core.methods import METHODS, OURS, about, class_name, settings_class, title_of
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import SettingRule, defaults, groups_of, keys_in, rule_of

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("fedsilo", "models", "datasets", "strategies", "client_app", "server_app")
_ERROR_CLASS = re.compile(r"^class \w+\(.*Error\b", re.MULTILINE)
# Names that the author of a plugin imports: heading -> module and names; without names its __all__
AUTHORS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "A method at the server": ("fedsilo.strategies.loop.method", ()),
    "A method at a site": ("fedsilo.client_app.methods.base", ()),
    "Settings of a method": ("fedsilo.core.settings.own_settings", ("OwnSettings",)),
    "Fields of settings": ("fedsilo.core.settings_schema", ("setting",)),
    "A data set": ("fedsilo.datasets.silo.silos", ("DataSet", "Silo", "Split")),
    "A method as a Flower strategy": ("fedsilo.strategies.flower", ("FlowerStrategy",)),
}


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _table(heads: tuple[str, ...], rows: Iterator[tuple[object, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    yield from (f"| {' | '.join(map(_cell, row))} |" for row in rows)
    yield ""


def _stacked(heads: tuple[str, ...], rows: Iterator[tuple[object, ...]]) -> Iterator[str]:
    """Yield a table whose cells are below one another on a phone."""
    yield from ('<div class="stacked" markdown>', "", *_table(heads, rows), "</div>", "")


def _setting(key: str, default: object, rule: SettingRule) -> tuple[object, ...]:
    shown = f'"{default}"' if isinstance(default, str) else str(default).lower()
    kind = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    allowed = rule.allowed or kind[type(default)]
    return f'`{key}`{{id="{key}"}}', f"`{shown}`", allowed, rule.help


def settings_page() -> str:
    """Build the page of all settings with default, range and meaning, a section for each group."""
    heads = ("setting", "default", "allowed", "meaning")
    lines = [
        "# Settings",
        "Every setting of a run. Give one as `--set KEY=VALUE`, in a file for `--config`, in an "
        "experiment, or in Python as `settings={...}`. `fedsilo settings` prints the same list.",
    ]
    values = defaults(CommonSettings)
    for group, cls in groups_of(CommonSettings).items():
        sentence = inspect.cleandoc(cls.__doc__ or "").splitlines()[0]
        keys = keys_in(CommonSettings, group)
        rows = (_setting(key, values[key], rule_of(CommonSettings, key)) for key in keys)
        title = group or "Without a group"
        lines += ["", f"## {title}", "", sentence, "", *_stacked(heads, rows)]
    lines += ["## Settings of single methods", ""]
    for name, (users, own) in sorted(_own_settings().items()):
        rows = (_setting(key, *of) for key, of in own.items())
        lines += [f"### {name}", "", f"Used by {', '.join(users)}.", "", *_stacked(heads, rows)]
    return "\n".join(lines)


def _own_settings() -> dict[str, tuple[list[str], dict[str, tuple[object, SettingRule]]]]:
    """Return the methods' own settings by their group: the methods that have it, and its keys."""
    found: dict[str, tuple[list[str], dict[str, tuple[object, SettingRule]]]] = {}
    for method in OURS:
        cls = settings_class(method)
        for key, default in defaults(cls).items():
            users, keys = found.setdefault(key.partition(".")[0], ([], {}))
            keys.setdefault(key, (default, rule_of(cls, key)))
            if title_of(method) not in users:
                users.append(title_of(method))
    return found


def methods_page() -> str:
    """Return the table of methods: name, class as a Flower strategy, one line."""
    rows = (
        (f"`{name}`", f"`fedsilo.strategies.{class_name(name)}`", about(name)) for name in METHODS
    )
    return "\n".join(
        [
            "# Methods",
            "",
            "`fedsilo simulate NAME` runs a method, `--set method=NAME` puts it into an "
            "experiment. The class is the same method as a "
            "[Flower strategy](authors.md#a-method-as-a-flower-strategy) for your own ServerApp.",
            "",
            *_stacked(("name", "Flower strategy", "what it does"), rows),
        ]
    )


def commands_page() -> str:
    """Return every command of ``fedsilo`` with its arguments and options."""
    root = typer.main.get_command(make_app())
    assert isinstance(root, click.Group)
    lines = ["# Commands", "", "`fedsilo COMMAND --help` prints the same.", ""]
    for words, command in _commands(root, ()):
        context = click.Context(command, info_name=f"fedsilo {words}")
        usage = command.get_usage(context).removeprefix("Usage: ")
        records = [(p, p.get_help_record(context)) for p in command.params]
        rows = ((f"`{record[0]}`", record[1]) for _, record in records if record)
        lines += [f"## {words}", "", inspect.cleandoc(command.help or ""), ""]
        lines += ["```text", " ".join(usage.split()), "```", ""]
        lines += _stacked(("option", "what it does"), rows)
    return "\n".join(lines)


def _commands(group: click.Group, words: tuple[str, ...]) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, (*words, name))
        elif not command.hidden:
            yield " ".join((*words, name)), command


def errors_page() -> str:
    """Return each code of an error: what it means, how to fix it, the messages that have it."""
    texts = messages()
    lines = [
        "# Errors",
        "",
        "A command that fails prints one line, `fedsilo: error[CODE]: what was wrong, where, what "
        "to do`, and ends with exit code 1. In Python the same line is a `FedsiloError`, whose "
        "`code` is the code. An error of the system, such as a full disk, has none.",
        "",
    ]
    for cls in coded_errors():
        found = sorted(texts[cls.code])
        text = inspect.cleandoc(cls.__doc__ or "").replace("Fix:", "**Fix:**").replace("``", "`")
        lines += [f"## {cls.code}", "", text, ""]
        lines += [f'??? note "Messages with this code ({len(found)})"', ""]
        lines += [f"    - {_message(text)}" for text in found]
        lines += ["", f"In Python: `{cls.__module__}.{cls.__name__}`", ""]
    return "\n".join(lines)


def _message(text: str) -> str:
    return "`` " + text.replace("`", "'") + " ``"


def coded_errors() -> list[type[errors.FedsiloError]]:
    """Return the classes of errors that have a code of their own, in the order of the source."""
    for name in _error_modules():
        import_module(name)
    return [cls for cls in _family(errors.FedsiloError) if "code" in vars(cls) and cls.code]


def _family(cls: type[errors.FedsiloError]) -> Iterator[type[errors.FedsiloError]]:
    yield cls
    for below in cls.__subclasses__():
        yield from _family(below)


def _sources() -> Iterator[tuple[str, str]]:
    """Yield name and text of each module."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            place = path.relative_to(ROOT if room != "fedsilo" else ROOT / room)
            name = ".".join(("fedsilo", *place.with_suffix("").parts))
            yield name, path.read_text(encoding="utf-8")


def _error_modules() -> Iterator[str]:
    """Yield the modules that define a class of error."""
    for name, text in _sources():
        if _ERROR_CLASS.search(text):
            yield name


@cache
def messages() -> dict[str, set[str]]:
    """Return by code the texts with which the source raises its errors, gaps as an ellipsis."""
    codes = {cls.__name__: cls.code for cls in coded_errors()}
    found: dict[str, set[str]] = defaultdict(set)
    for _, source in _sources():
        if "Error(" not in source:  # to parse a file takes long
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                text = _text(node.args[0])
                if text and node.func.id in codes:
                    found[codes[node.func.id]].add(text)
    return found


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(v) if isinstance(v, ast.Constant) else "…" for v in node.values)
    return ""


def python_page() -> str:
    """Return the reference of ``import fedsilo``, read from the docstrings."""
    lines = ["# Python", "", "Import these from `fedsilo`.", ""]
    found = api_names()
    for module in sorted(found, key=lambda path: not path.endswith(".running")):
        heading, summary = module.rpartition(".")[2], inspect.getdoc(import_module(module)) or ""
        lines += [f"## {heading.capitalize()}", "", summary.splitlines()[0], ""]
        lines += [_directive(path, name) for name, path in found[module].items()]
    return "\n".join(lines)


def _directive(path: str, heading: str) -> str:
    return f"::: {path}\n    options:\n      heading: {heading}\n      toc_label: {heading}\n"


def api_names() -> dict[str, dict[str, str]]:
    """Return for each module the names that ``fedsilo`` offers from it, name -> path."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name, place in public_names().items():
        if not name.startswith("_"):
            module, _, own = place.partition(":")
            found[module][name] = f"{module}.{own}"
    return found


def authors_page() -> str:
    """Return the reference of the names that the author of a plugin imports."""
    lines = ["# Names for authors", "", "What the author of a [plugin](../plugs.md) imports.", ""]
    for heading, names in author_names().items():
        lines += [f"## {heading}", "", *(f"::: {name}" for name in names), ""]
    return "\n".join(lines)


def author_names() -> dict[str, list[str]]:
    """Return by heading the paths of what an author imports."""
    found = {}
    for heading, (path, names) in AUTHORS.items():
        module = import_module(path)
        found[heading] = [f"{path}.{name}" for name in names or module.__all__]
    return found


def undocumented() -> list[str]:
    """Return the public names of the reference, and their public members, without a docstring."""
    paths = [path for names in api_names().values() for path in names.values()]
    paths += [path for names in author_names().values() for path in names]
    return [name for path in paths for name in _undocumented(path)]


def _undocumented(path: str) -> Iterator[str]:
    module, _, name = path.rpartition(".")
    value = getattr(import_module(module), name)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return
    if not (value.__doc__ or "").strip():
        yield path
    members = vars(value).items() if inspect.isclass(value) else ()
    for member, part in members:
        bare = getattr(part, "fget", getattr(part, "__func__", getattr(part, "func", part)))
        if member[0] != "_" and inspect.isfunction(bare) and not inspect.getdoc(bare):
            yield f"{path}.{member}"


PAGES = {
    "reference/settings.md": ("Settings", settings_page),
    "reference/methods.md": ("Methods", methods_page),
    "reference/commands.md": ("Commands", commands_page),
    "reference/errors.md": ("Errors", errors_page),
    "reference/python.md": ("Python", python_page),
    "reference/authors.md": ("Names for authors", authors_page),
}
