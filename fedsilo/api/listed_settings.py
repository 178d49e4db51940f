"""Lists all settings, from the section of pyproject.toml where Flower reads the defaults.

``project_lines`` writes that section from the classes of settings. ``list_settings`` reads it again
instead of the classes, because importing the classes of all methods takes seconds.
"""

import difflib
import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

import tomli_w

from fedsilo.core.errors import SettingError
from fedsilo.core.methods import OURS, about, settings_class
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
    """One setting as the list shows it."""

    key: str  # the full key, such as 'train.batch-size'
    default: str  # the default, written as in TOML
    help: str  # the description and the allowed values

    def lines(self, width: int) -> Iterator[str]:
        """Yield the key with its default (not wrapped), then the help, wrapped to ``width``."""
        yield f"  {self.key} = {self.default}"
        yield from textwrap.wrap(
            self.help, width, initial_indent=" " * 6, subsequent_indent=" " * 6
        )


@dataclass
class ListedGroup:
    """A group of settings with the sentence that describes it."""

    name: str  # the group, such as 'train'; "" for the settings without a group
    sentence: str
    settings: list[ListedSetting] = field(default_factory=list)

    def lines(self, width: int) -> Iterator[str]:
        """Yield the lines of the group for the terminal, wrapped to ``width`` characters.

        First comes the heading: the name of the group, or 'experiment' if it has none, and the
        sentence that describes it. Then each setting has a line with its key and default, and lines
        with its help.
        """
        yield from textwrap.wrap(
            f"{self.name or _BARE}: {self.sentence}", width, subsequent_indent="  "
        )
        for setting in self.settings:
            yield from setting.lines(width)


def list_settings(word: str = "") -> Iterator[str]:
    """Yield the list of settings as lines for the terminal, with an empty line between groups.

    Help texts are wrapped to the terminal's width, but to at most 100 characters. A line with a key
    and its default is not wrapped.

    Args:
        word: the name of a group, or a text to find in the keys and help of settings. Upper and
            lower case are alike. Empty for all settings.

    Raises:
        SettingError: ``word`` matches no group and no setting. The message suggests a similar name
            or lists the groups.
    """
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    found = find_settings(word)
    for number, group in enumerate(found):
        if number:
            yield ""
        yield from group.lines(width)


def find_settings(word: str) -> list[ListedGroup]:
    """Find the settings that a user searches for by a word.

    The first of these rules that finds settings decides:

    1. ``word`` is the name of a group: all settings of this group. The group 'experiment' has the
       settings without a group.
    2. The key or the help of settings contains ``word``, in upper or lower case: these settings. An
       empty word finds all.
    3. ``word`` is the former key of a renamed setting: the settings found by its present key.

    Returns:
        The groups, each with the settings that were found.

    Raises:
        SettingError: nothing was found. The message suggests the most similar key or group, or
            lists all groups if none is similar.
    """
    groups = read_groups()
    for group in groups:
        if word and word == (group.name or _BARE):
            return [group]
    # A word that nothing has may be the name of a setting in an earlier version
    found = _select_settings(groups, word) or _select_settings(groups, RENAMED.get(word, word))
    if not found:
        names = _group_names(groups) + [
            setting.key for group in groups for setting in group.settings
        ]
        near = difflib.get_close_matches(word, names, n=1)
        hint = (
            f"did you mean '{near[0]}'?"
            if near
            else f"groups are {join_names(_group_names(groups))}"
        )
        raise SettingError(f"no setting has '{word}' in its name or help; {hint}")
    return found


def _select_settings(groups: list[ListedGroup], word: str) -> list[ListedGroup]:
    """Select the settings that have ``word`` in their key or help, group by group.

    Upper and lower case are not distinguished. An empty ``word`` selects all settings. Groups
    without a selected setting are left out. The given groups are not changed.
    """
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


def _group_names(groups: list[ListedGroup]) -> list[str]:
    return [group.name or _BARE for group in groups]


def read_groups() -> list[ListedGroup]:
    """Read all groups of settings from pyproject.toml.

    The settings with their defaults are in the section [tool.flwr.app.config]. Each table of this
    section is a group. The comment above the table's heading is the sentence that describes the
    group. Each line of the table is a setting with its default and its help. Groups and settings
    keep the order of the file. Internal settings, which users should not set, are left out.
    """
    internal = {key for key, rule in rules_of(CommonSettings).items() if rule.is_internal}
    groups: list[ListedGroup] = []
    # The comment above a heading is the group's sentence; other sections of the file are skipped
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
    """Build the lines of pyproject.toml that have the defaults of all settings.

    Flower reads these lines. Each setting is a line with its key and default, and a comment with
    its help and allowed values. Each group is a TOML table, below a comment that describes the
    group. The settings are those that the classes of fedsilo and of its methods declare.
    """
    known, rules, sentences = _collect_settings()
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


def _collect_settings() -> tuple[dict[str, Value], dict[str, SettingRule], dict[str, str]]:
    """Collect all settings from the classes of fedsilo and of its built-in methods.

    Returns:
        Three dictionaries: the default of each key, the rule of each key (its help and allowed
        values), and the sentence that describes each group.
    """
    known: dict[str, Value] = {}
    rules: dict[str, SettingRule] = {}
    sentences: dict[str, str] = {}
    classes: list[type] = [CommonSettings, *map(settings_class, OURS)]
    for cls in classes:
        known |= defaults(cls)
        rules |= rules_of(cls)
        for group, owner in groups_of(cls).items():
            # A method is described by its table entry, other groups by a docstring's first line
            first = (owner.__doc__ or "").strip().partition("\n")[0]
            sentences.setdefault(group, about(group) if group in OURS else first)
    return known, rules, sentences
