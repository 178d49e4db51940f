"""The setting in which a paper measured, as data, and in what a run differs from it.

A paper's number beside a run of another setting is compared by mistake. So numbers stand with
``Conditions``; a run on the paper's data that does not meet them is told why it has none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedsilo.models.contract.settings import CommonSettings, NoSettings
from fedsilo.models.contract.settings_schema import Value, as_mapping, defaults
from fedsilo.strategies.loop.reporting import Published

_TOLD = 4  # differences that are spelled out

# Parts of a data set, other ways to evaluate, differential privacy
_NO_PAPERS = {
    *("sample-share", "public-share", "test-folds", "val-folds", "use-test"),
    *("clip-norm", "noise-multiplier"),
}
WHOLE: Mapping[str, Collection[Value]] = {
    key: [value] for key, value in defaults(CommonSettings).items() if key in _NO_PAPERS
}


@dataclass(frozen=True)
class Conditions:
    """What a run must have for a paper's numbers to stand beside it.

    Attributes:
        exact: key of the run config -> the values that it may have; a key that a method has not
            is no condition for it.
        least: key -> the least that it may be.
        given: keys that must not be empty: files that a user names.
        sites: the sites that take part, all of them; empty: any.
    """

    exact: Mapping[str, Collection[Value]]
    least: Mapping[str, float] = field(default_factory=dict)
    given: Collection[str] = ()
    sites: Collection[str] = ()

    def departures(self, values: Mapping[str, Value], sites: Iterable[str] = ()) -> list[str]:
        """Return in what a run of these settings and sites differs, a phrase each."""
        other = [
            f"'{key}' is {values[key]!r} and not {_either(allowed)}"
            for key, allowed in self.exact.items()
            if key in values and values[key] not in allowed
        ]
        less = [
            f"'{key}' is {values[key]} and not {least:g} or more"
            for key, least in self.least.items()
            if key in values and float(values[key]) < least
        ]
        absent = [f"'{key}' names no file" for key in self.given if not values[key]]
        return [*self._other_sites(set(sites)), *other, *less, *absent]

    def _other_sites(self, sites: Collection[str]) -> list[str]:
        missing, surplus = sorted({*self.sites} - {*sites}), sorted({*sites} - {*self.sites})
        if not self.sites or not missing + surplus:
            return []
        without = f"without {', '.join(missing)}" if missing else ""
        also = f"with {len(surplus)} that the paper has not" if surplus else ""
        return [f"the sites are {' and '.join(part for part in (without, also) if part)}"]

    def beside(
        self, figures: Published, common: CommonSettings, own: Any, sites: Iterable[str]
    ) -> Published:
        """Return the figures, or none and why, for a run of these settings and sites.

        Nothing is said of a run on other data, of which no number would be expected.
        """
        if not figures or common.dataset not in self.exact["dataset"]:
            return Published()
        differing = self.departures(settings_of(common, own), sites)
        return Published(unlike=in_words(differing)) if differing else figures


def settings_of(common: CommonSettings, own: Any = None) -> dict[str, Value]:
    """Return common settings and a method's own, if it has any, by key."""
    return as_mapping(common) | as_mapping(own or NoSettings())


def first_of(*several: Published) -> Published:
    """Return the first that has figures, else the first that says why it has none."""
    told = (one for one in several if one.unlike)
    return next((one for one in several if one), None) or next(told, Published())


def in_words(differing: Collection[str]) -> str:
    """Return differences in one line, the first of many."""
    told, more = list(differing)[:_TOLD], len(differing) - _TOLD
    return "; ".join([*told, *([f"{more} more"] if more > 0 else [])])


def _either(allowed: Collection[Value]) -> str:
    return " or ".join(repr(value) for value in allowed)
