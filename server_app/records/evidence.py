"""Measurements per bin and per class: a run has many of them, so they are in evidence.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsilo.models.maths.outcome_counts import CLASS, CONFIDENCE, UNCERTAINTY

Values = Mapping[str, Mapping[str, float]]

_EVIDENCE = ("reliability.", "certainty.")
_MANY = (*_EVIDENCE, *(f"{family}." for family in (CLASS, CONFIDENCE, UNCERTAINTY)))


def without_bins(values: Values) -> dict[str, dict[str, float]]:
    """Return the measurements of each site without those per bin and class."""
    return {
        site: {name: value for name, value in row.items() if not name.startswith(_MANY)}
        for site, row in values.items()
    }


def evidence_document(values: Values) -> dict[str, Any]:
    """Return evidence.json: kind -> site -> bin -> count, right, mean; empty if none was sent."""
    document: dict[str, Any] = {}
    for site, row in values.items():
        for name, value in row.items():
            if name.startswith(_EVIDENCE):
                kind, place, part = name.split(".")
                sites = document.setdefault(kind, {}).setdefault(site, {})
                sites.setdefault(place, {})[part] = value
    return document
