"""Runs of more sites than a table or a picture can show one by one."""

from collections.abc import Mapping, Sequence

from fedsilo.core import one_line

MANY = 20  # more sites than this are summarised
_WORST = 5  # sites that a summary still names


def worst(values: Mapping[str, float], *, high_is_worse: bool = False) -> list[str]:
    """Return the five names with the worst values, worst first; ties in alphabetical order.

    Low values are the worst, unless ``high_is_worse``; ties are then reversed too.
    """
    return sorted(values, key=lambda name: (values[name], name), reverse=high_is_worse)[:_WORST]


def join_names(names: Sequence[str]) -> str:
    """Join names for a sentence; of more than 20, name five and count the rest."""
    most = MANY
    if len(names) > MANY:
        most = _WORST
    return one_line.join_names(names, most)
