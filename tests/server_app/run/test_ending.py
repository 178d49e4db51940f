"""The end of a run: what it is for is written first, and what fails afterwards fails alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import ENDING, SUMMARY, RunDirectory
from fedsilo.server_app.run.ending import evidence_document, without_bins
from fedsilo.strategies.methods.fedavg import FedAvg

Tiny = Callable[..., dict[str, Value]]


def test_the_server_writes_its_own_numbers_and_no_picture(tiny: Tiny, tmp_path: Path) -> None:
    directory = run_inline(resolve(tiny("fedavg", out=str(tmp_path), rounds=1)), 3)
    assert not {"published", "published-unlike"} & directory.read_json(SUMMARY).keys()
    assert not list(directory.path.glob("*.png"))


def test_documents_are_made_when_all_that_a_run_is_for_is_there(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()

    def documents(*_: object) -> dict[str, Any]:
        seen.update(path.name for path in (tmp_path / "run").iterdir())
        return {}

    monkeypatch.setattr(FedAvg, "documents", documents)
    values = tiny("fedavg", out=str(tmp_path), rounds=1, run_name="run")
    directory = run_inline(resolve(values), 3)
    needed = {"config.toml", "metrics.csv", "traffic.csv", "model.safetensors", "privacy.json"}
    assert needed | {SUMMARY, ENDING} <= seen
    assert not (directory.path / ENDING).exists()
    assert directory.has_ended()


def test_method_whose_document_is_no_json_loses_that_alone(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FedAvg, "documents", lambda *_: {"own.json": {1, 2}})
    directory = run_inline(resolve(tiny("fedavg", out=str(tmp_path), rounds=1)), 3)
    assert directory.read_json(SUMMARY)["rounds"] == 1, "its rounds cannot be run again for free"
    assert not (directory.path / "own.json").exists()
    assert "cannot write own.json (TypeError" in " ".join(capsys.readouterr().out.split())


def test_method_without_documents_today_costs_no_run(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> dict[str, Any]:
        raise KeyError("incoming")

    monkeypatch.setattr(FedAvg, "documents", fail)
    directory = run_inline(resolve(tiny("fedavg", out=str(tmp_path), rounds=1)), 3)
    assert directory.has_ended()
    printed = " ".join(capsys.readouterr().out.split())
    assert "cannot write the method's documents (KeyError" in printed


def test_killed_between_summary_and_documents_the_run_writes_them_when_it_is_resumed(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    values = tiny("fedavg", out=str(tmp_path), rounds=1, run_name="run")
    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, "documents", die)
        with pytest.raises(KeyboardInterrupt):
            run_inline(resolve(values), 3)
    directory = RunDirectory(tmp_path / "run")
    before = directory.read_json(SUMMARY)
    assert not directory.has_ended()
    monkeypatch.setattr(FedAvg, "documents", lambda *_: {"own.json": [1]})
    run_inline(resolve(values | {"resume": True}), 3)
    assert directory.has_ended()
    assert directory.read_json("own.json") == [1]
    assert directory.read_json(SUMMARY)["sites"] == before["sites"]


def test_run_without_noise_or_tracking_has_neither_journal_nor_events(
    tiny: Tiny, tmp_path: Path
) -> None:
    directory = run_inline(resolve(tiny("fedavg", out=str(tmp_path), rounds=1)), 3)
    names = {path.name for path in directory.path.iterdir()}
    assert "tensorboard" not in names
    assert {"progress.json", "progress.prom"} <= names, "these are part of every run directory"


VALUES = {
    "s1a": {
        "accuracy": 0.5,
        "vacuity": 0.25,
        "reliability.0.count": 2.0,
        "reliability.0.right": 1.0,
        "reliability.0.mean": 0.25,
        "certainty.3.mean": 0.125,  # without its count it says nothing
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
        "reliability": {"s1a": {"0": {"count": 2.0, "right": 1.0, "mean": 0.25}}},
    }


def test_without_any_bins_there_is_no_document() -> None:
    assert evidence_document({"s1a": {"accuracy": 0.5}, "s2a": {}}) == {}
    assert evidence_document({}) == {}
