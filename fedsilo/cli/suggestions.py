"""Suggestions for words that the command line does not know: settings, and methods as commands."""

from collections.abc import Collection, Sequence
from difflib import get_close_matches

import click

from fedsilo.core.methods import METHODS
from fedsilo.core.one_line import one_line
from fedsilo.core.settings.removed import RENAMED

_VERY_NEAR = 0.85  # similarity of two words, from 0 to 1, above which one is a slip of the other
_LONGEST = 60  # characters of a user's word in a suggestion


def suggest(error: click.ClickException, words: Sequence[str]) -> str:
    """Suggest words to replace an unknown option or command.

    If an unknown option has the name of a setting, the suggestion is ``--set``, as in ``--set
    rounds=3``. If an unknown command is nearly the name of a method, the suggestion is ``fedsilo
    simulate`` with this method.

    Args:
        error: click's error about the command line.
        words: the words of the command line.

    Returns:
        The suggested words. The text is empty if there are none, as for all other kinds of errors.
    """
    if isinstance(error, click.NoSuchOption):
        return _suggest_setting(error, words)
    first = words[0]
    # The error is about the first word only if that word is no command
    if f"No such command '{first}'" not in error.format_message():
        return ""
    near = get_close_matches(first, METHODS, n=1, cutoff=_VERY_NEAR)
    if not near:
        return ""
    return f"fedsilo simulate {near[0]}"


def _suggest_setting(error: click.NoSuchOption, words: Sequence[str]) -> str:
    """Suggest ``--set KEY=VALUE`` for an option that is named like a setting.

    If several settings fit, their suggestions are joined by "or". The result is empty if no setting
    fits, if the command has no ``--set``, or if the option is more likely a misspelling of another
    option of the command.
    """
    if error.ctx is None or not _has_option(error.ctx, "--set"):
        return ""
    # A slip in an option of this command, such as --seed for --seeds, is likelier than a setting
    if get_close_matches(error.option_name, error.possibilities or (), cutoff=_VERY_NEAR):
        return ""
    # Read only now, because the list of settings is not needed otherwise
    from fedsilo.server_app.config.settings import declared_defaults

    name = error.option_name.lstrip("-")
    keys = _find_keys(name, declared_defaults())
    if not keys:
        return ""
    value = _value_of(error.option_name, words)
    return " or ".join(f"--set {key}={value}" for key in keys)


def _find_keys(name: str, known: Collection[str]) -> list[str]:
    """List the keys of the settings that a name may stand for.

    The first of these rules that applies decides:

    1. ``name`` is the former key of a renamed setting: its present key.
    2. ``name`` is a full key: this key.
    3. Full keys end with a dot and ``name``: these keys, sorted. If some belong to settings for all
       methods, the keys of settings for a single method are left out.

    Args:
        name: the name, without hyphens before it.
        known: the full keys of all settings.

    Returns:
        The keys. The list is empty if no rule applies.
    """
    key = RENAMED.get(name, name)
    if key in known:
        return [key]
    ending = [found for found in sorted(known) if found.endswith(f".{name}")]
    common = [found for found in ending if found.partition(".")[0] not in METHODS]
    return common or ending


def _value_of(option: str, words: Sequence[str]) -> str:
    """Return the value that was typed for an option.

    The value is the part after "=", or the next word if that does not begin with "-". It is cut to
    60 characters. If the option occurs several times, the first value counts. If there is no value,
    the result is "VALUE".
    """
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name != option:
            continue
        if equals:
            return one_line(value, _LONGEST)
        following = words[place + 1 : place + 2]
        if following and not following[0].startswith("-"):
            return one_line(following[0], _LONGEST)
    return "VALUE"


def _has_option(context: click.Context, option: str) -> bool:
    return any(option in parameter.opts for parameter in context.command.params)
