"""The matrix of an experiment: one entry of simulation.yaml that stands for several experiments.

    uefl-table7-gamma-{gamma}:
      base: uefl-table3-gtsrb-uefl
      matrix: {gamma: [0.1, 0.2, 0.3]}
      config: {uefl.gamma: "{gamma}"}

Each placeholder ``{gamma}`` in the name takes each of its values, so this entry stands for three
experiments. In the entry's texts a placeholder stands for the same value.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from fedsilo.core.errors import SettingError, unknown_name
from fedsilo.core.files.declarations import as_text, misfit
from fedsilo.core.one_line import join_names, one_line
from fedsilo.core.settings_schema import Value

_MOST_CELLS = 1000  # a larger product would take minutes, and nobody could read its names
_PLACEHOLDER = re.compile(r"\{([a-z][a-z0-9-]*)\}")


@dataclass(frozen=True)
class Cell:
    """The place of one experiment in its file.

    Attributes:
        entry: the name of the entry, with its placeholders.
        values: placeholder -> the value that it takes; empty for an entry without a matrix.
    """

    entry: str
    values: Mapping[str, Value]

    @property
    def name(self) -> str:
        """The name of the experiment."""
        return fill(self.entry, self.values)


def read_values(content: Any, check: Callable[[Any], Any]) -> dict[Value, Any]:
    """Read the values of one placeholder of a matrix, with the settings that belong to each value.

    A placeholder, such as ``{gamma}``, stands for one of several values in an entry of the
    simulation file. ``content`` is a list of values without settings, or a mapping from each value
    to its settings.

    Args:
        content: the values, as YAML gives them.
        check: checks a mapping from each value, converted to a string, to its settings, and returns
            the checked mapping.

    Returns:
        Value -> its checked settings, in the order of the file.

    Raises:
        PydanticCustomError: in one of these cases:

            - ``content`` is empty, or is neither a list nor a mapping.
            - Two values are equal as strings, such as 1 and '1'.
            - A value is not a number, a string or a date.
    """
    if isinstance(content, dict):
        values = list(content)
        stated = list(content.values())
    elif isinstance(content, list):
        values = content
        stated = [None] * len(content)
    else:
        values = stated = []
    if not values:
        raise misfit("must be a list of values, or a mapping from each value to what it sets")
    sets: dict[str, Any] = {}
    for value, parts in zip(values, stated, strict=True):
        text = as_text(value)
        if text in sets:
            raise misfit(f"must have each value once, but has '{one_line(text, 60)}' twice")
        sets[text] = parts
        if parts is None:
            sets[text] = {}
    return dict(zip(values, check(sets).values(), strict=True))


def list_cells(entry: str, matrix: Mapping[str, Mapping[Value, Any]]) -> list[Cell]:
    """List the combinations of a matrix's values as cells, each of which makes one experiment.

    The value of the last placeholder changes fastest, and that of the first one slowest.

    Args:
        entry: the entry's name, with a placeholder in braces for each key of the matrix.
        matrix: placeholder -> its values, each with the settings that belong to it.

    Raises:
        SettingError: the name and the matrix do not have the same placeholders, or there are more
            than 1000 cells. The message does not name the entry.
    """
    in_name, count = set(_PLACEHOLDER.findall(entry)), prod(map(len, matrix.values()))
    fault = ""
    if in_name != matrix.keys():
        fault = (
            f"has the placeholders {join_names(sorted(in_name)) or 'none'} in its name, but its "
            f"'matrix' has {join_names(matrix) or 'none'}: they must be the same"
        )
    elif count > _MOST_CELLS:
        fault = f"stands for {count} experiments, but at most {_MOST_CELLS} may be"
    if fault:
        raise SettingError(fault)
    cells = []
    for chosen in product(*matrix.values()):
        cells.append(Cell(entry, dict(zip(matrix, chosen, strict=True))))
    return cells


def has_placeholder(name: object) -> bool:
    """Tell whether a name has a placeholder such as ``{gamma}``."""
    return bool(_PLACEHOLDER.search(str(name)))


def fill(text: str, values: Mapping[str, Value]) -> str:
    """Replace each placeholder in a string, such as ``{method}``, with its value.

    A number is written as Python writes it.

    Raises:
        SettingError: a placeholder is not in ``values``.
    """

    def value_of(found: re.Match[str]) -> str:
        if found[1] not in values:
            raise unknown_name("placeholder", found[1], values)
        return as_text(values[found[1]])

    return _PLACEHOLDER.sub(value_of, text)


def fill_all(content: Any, values: Mapping[str, Value]) -> Any:
    """Replace the placeholders in all strings of a nested list or mapping, but not in keys.

    A placeholder is a name in braces, such as ``{gamma}``. If a string consists of one placeholder,
    the result is the value itself, so a number stays a number. Inside a longer string, the value is
    written as text. Numbers and other items without text are returned unchanged.

    Raises:
        SettingError: a placeholder is not in ``values``.
    """
    if isinstance(content, dict):
        return {key: fill_all(value, values) for key, value in content.items()}
    if isinstance(content, list):
        return [fill_all(value, values) for value in content]
    if not isinstance(content, str):
        return content
    whole = _PLACEHOLDER.fullmatch(content)
    if whole and whole[1] in values:
        return values[whole[1]]
    return fill(content, values)


def write_braces(entry: str, cells: Sequence[Cell]) -> str | None:
    """Write the names of all cells as one word with braces, such as ``a-{x,y}``.

    A shell replaces this word by the list of all names. Each placeholder becomes its values, each
    listed once. A placeholder with only one value gets no braces.

    Args:
        entry: the entry's name with its placeholders, such as ``a-{b}``.
        cells: the cells of the entry, each with one combination of values.

    Returns:
        The word. It is None if ``cells`` lacks a combination of the values, because a shell always
        expands braces to all combinations.
    """
    chosen: dict[str, dict[str, None]] = {}  # placeholder -> its values' texts, each once
    for cell in cells:
        for key, value in cell.values.items():
            chosen.setdefault(key, {})[as_text(value)] = None
    # A shell expands braces to every combination, so one that is missing could not be left out
    if prod(map(len, chosen.values())) != len(cells):
        return None
    written: dict[str, Value] = {}
    for key, texts in chosen.items():
        written[key] = ",".join(texts)
        if len(texts) > 1:
            written[key] = f"{{{written[key]}}}"
    return fill(entry, written)
