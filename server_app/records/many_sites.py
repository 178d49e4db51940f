"""Runs of more sites than a table or a picture can show one by one."""

from collections.abc import Mapping, Sequence

from fedsilo.models.contract import one_line

MANY = 20  # more sites than these are summed up
_WORST = 5  # of them named all the same


def worst(values: Mapping[str, float], *, high_is_worse: bool = False) -> list[str]:
    """Return the five names whose values are worst, worst first."""
    return sorted(values, key=lambda name: (values[name], name), reverse=high_is_worse)[:_WORST]


def listed(names: Sequence[str]) -> str:
    """Return names in a sentence, of many the first five and how many more there are."""
    return one_line.join_names(names, MANY if len(names) <= MANY else _WORST)
