"""The list of all settings, which is the section of pyproject.toml that Flower reads.

It is written from the classes of settings, and read again to list them: importing the classes of
all methods needs PyTorch and takes seconds.
"""

import difflib
import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

import tomli_w

from fedsilo.core.errors import SettingError
from fedsilo.core.methods import METHODS, about, settings_class
from fedsilo.core.one_line import join_names
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.removed import RENAMED
from fedsilo.core.settings.written_settings import group_settings
from fedsilo.core.settings_schema import (
    SettingRule,
    Value,
    defaults,
    groups_of,
    rules_of,
)
from fedsilo.server_app.config.settings import PROJECT_FILE

SECTION = "tool.flwr.app.config"
_BARE = "experiment"  # the heading over the keys without a group
_WIDEST = 100  # columns of a line, however wide the terminal is
_HEADING = re.compile(rf"\[{re.escape(SECTION)}\.?(.*)\]")


@dataclass(frozen=True)
class ListedSetting:
    """One setting as the list shows it; both texts are as in TOML."""

    key: str
    default: str
    help: str

    def lines(self, width: int) -> Iterator[str]:
        """Yield the key with its default, and below it the help, wrapped."""
        yield f"  {self.key} = {self.default}"
        yield from textwrap.wrap(
            self.help, width, initial_indent=" " * 6, subsequent_indent=" " * 6
        )


@dataclass
class ListedGroup:
    """A group of settings with the sentence that describes it; name "" for no group."""

    name: str
    sentence: str
    settings: list[ListedSetting] = field(default_factory=list)

    def lines(self, width: int) -> Iterator[str]:
        """Yield the heading and the settings."""
        yield from textwrap.wrap(
            f"{self.name or _BARE}: {self.sentence}", width, subsequent_indent="  "
        )
        for setting in self.settings:
            yield from setting.lines(width)


def list_settings(word: str = "") -> Iterator[str]:
    """List the settings in groups, as lines for the terminal.

    Args:
        word: the name of a group, or a text that the setting's key or help must have; empty for
            all settings.

    Raises:
        SettingError: no setting has the word.
    """
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    found = _matching(read_groups(), word)
    for number, group in enumerate(found):
        if number:
            yield ""
        yield from group.lines(width)


def _matching(groups: list[ListedGroup], word: str) -> list[ListedGroup]:
    """Return the group named ``word``, or the groups with only the settings that have the word."""
    for group in groups:
        if word and word == (group.name or _BARE):
            return [group]
    found = _having(groups, word) or _having(groups, RENAMED.get(word, word))
    if not found:
        names = _names(groups) + [setting.key for group in groups for setting in group.settings]
        near = difflib.get_close_matches(word, names, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"groups are {join_names(_names(groups))}"
        raise SettingError(f"no setting has '{word}' in its name or help; {hint}")
    return found


def _having(groups: list[ListedGroup], word: str) -> list[ListedGroup]:
    """Return the groups with only the settings that have the word in their key or help."""
    wanted = word.lower()
    found = []
    for group in groups:
        settings = []
        for setting in group.settings:
            if wanted in setting.key.lower() or wanted in setting.help.lower():
                settings.append(setting)
        if settings:
            found.append(ListedGroup(group.name, group.sentence, settings))
    return found


def _names(groups: list[ListedGroup]) -> list[str]:
    return [group.name or _BARE for group in groups]


def read_groups() -> list[ListedGroup]:
    """Read the groups from pyproject.toml, without the settings that only fedsilo sets."""
    internal = {key for key, rule in rules_of(CommonSettings).items() if rule.is_internal}
    groups: list[ListedGroup] = []
    sentence, inside = "", False
    for line in PROJECT_FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            heading = _HEADING.fullmatch(line)
            inside = heading is not None
            if heading:
                groups.append(ListedGroup(heading[1], sentence))
        elif line.startswith("# "):
            sentence = line.removeprefix("# ")
        elif inside and line:
            setting = _read_setting(line, groups[-1].name)
            if setting.key not in internal:
                groups[-1].settings.append(setting)
    return groups


def _read_setting(line: str, group: str) -> ListedSetting:
    assignment, _, help_ = line.partition("  # ")
    name, _, default = assignment.partition(" = ")
    return ListedSetting(f"{group}.{name}" if group else name, default, help_)


def project_lines() -> Iterator[str]:
    """Yield the section of pyproject.toml, from the code: defaults, with help as comments."""
    known, rules, sentences = _from_code()
    tables = group_settings(known)
    bare = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    grouped = {key: value for key, value in tables.items() if isinstance(value, dict)}
    for group, values in {"": bare, **grouped}.items():
        if group:
            yield ""
        yield f"# {sentences[group]}"
        yield f"[{SECTION}.{group}]" if group else f"[{SECTION}]"
        for name, value in values.items():
            rule = rules[f"{group}.{name}" if group else name]
            help_ = "; ".join(filter(None, (rule.help, rule.allowed)))
            yield f"{tomli_w.dumps({name: value}).strip()}  # {help_}"


def _from_code() -> tuple[dict[str, Value], dict[str, SettingRule], dict[str, str]]:
    """Return the default and the rule of every key, and the sentence of every group."""
    known: dict[str, Value] = {}
    rules: dict[str, SettingRule] = {}
    sentences: dict[str, str] = {}
    classes: list[type] = [CommonSettings, *map(settings_class, METHODS)]
    for cls in classes:
        known |= defaults(cls)
        rules |= rules_of(cls)
        for group, owner in groups_of(cls).items():
            first = (owner.__doc__ or "").strip().partition("\n")[0]
            sentences.setdefault(group, about(group) if group in METHODS else first)
    return known, rules, sentences
