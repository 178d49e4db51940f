"""What the tests of fixes share: a case, and how an error is made and fixed."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedsilo.core.errors import FedsiloError
from fedsilo.core.settings_schema import Value
from tests.support.setting_keys import as_keys
from tests.support.tiny import TINY, TINY_METHOD

GONE = None  # the setting is taken away

Values = Mapping[str, Value]
Changes = Mapping[str, Value | None]

HEART: Values = {"dataset": "heart-synthetic", "network.name": "logistic", "train.mc-passes": 0}
PHANTOM: Values = {
    "dataset": "angiogram-phantom",
    "data.image-size": 32,
    "split.sample-share": 0.02,
}


@dataclass(frozen=True)
class Case:
    """An error, and the fixes in its words.

    Attributes:
        told: a part of the error, as it stands in the source, or of what it fills in.
        values: settings that lead to it.
        fixes: a part of the error that names a fix -> what to change by it.
    """

    told: str
    values: Values
    fixes: Mapping[str, Changes]

    def __str__(self) -> str:
        return re.sub(r"[^a-z0-9-]+", "-", self.told.lower())[:50]


def tiny(method: str, **more: Value) -> Values:
    named = as_keys(more)
    return as_keys(TINY | {"method": method} | TINY_METHOD.get(method, {}) | named)


def changed(values: Values, changes: Changes) -> dict[str, Value]:
    """Return settings with some changed, and those that are ``GONE`` away."""
    merged = as_keys(values) | as_keys(changes)
    return {key: value for key, value in merged.items() if value is not None}


def refused(attempt: Callable[[], object]) -> str:
    """Return the error of an attempt, empty where there is none."""
    try:
        attempt()
    except FedsiloError as error:
        return str(error)
    return ""


def check(case: Case, attempt: Callable[[Any], object]) -> None:
    """Make the error, then apply each fix that it names; the same error must not come again."""
    error = refused(lambda: attempt(changed(case.values, {})))
    assert case.told in error
    for words, changes in case.fixes.items():
        assert words in error
        again = refused(lambda own=changes: attempt(changed(case.values, own)))
        assert case.told not in again, f"'{words}' leads to the same error"
        if not _leads_on(case, words):
            assert not again, f"'{words}' leads to: {again}"


def _leads_on(case: Case, words: str) -> bool:
    """Tell whether a fix asks for more: a ViT needs weights, which the next error says."""
    return "'vit'" in words
