"""Figures per bin, apart from the others."""

from __future__ import annotations

from fedsilo.server_app.records.evidence import evidence_document, without_bins

VALUES = {
    "s1a": {
        "accuracy": 0.5,
        "vacuity": 0.25,
        "reliability.0.count": 2.0,
        "reliability.0.right": 1.0,
        "certainty.3.mean": 0.125,
    },
    "s2a": {"accuracy": 0.75, "reliable": 1.0},
}


def test_figures_without_bins_are_all_the_others() -> None:
    assert without_bins(VALUES) == {
        "s1a": {"accuracy": 0.5, "vacuity": 0.25},
        "s2a": {"accuracy": 0.75, "reliable": 1.0},
    }
    assert "reliability.0.count" in VALUES["s1a"], "what came in is left as it was"


def test_the_document_sorts_bins_by_kind_site_and_place() -> None:
    assert evidence_document(VALUES) == {
        "reliability": {"s1a": {"0": {"count": 2.0, "right": 1.0}}},
        "certainty": {"s1a": {"3": {"mean": 0.125}}},
    }


def test_without_any_bins_there_is_no_document() -> None:
    assert evidence_document({"s1a": {"accuracy": 0.5}, "s2a": {}}) == {}
    assert evidence_document({}) == {}
