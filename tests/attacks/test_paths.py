"""No run names a path at a hospital: where it writes, what it opens, what its errors tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedsilo.models.contract.messages import HELLO, TRAIN
from tests.support.hospital import Hospital, files_below

Make = Callable[..., Hospital]


def test_nothing_is_written_where_a_run_says(
    hospital: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDSILO_CACHE")
    theirs = tmp_path / "theirs"
    site = hospital(cache_dir=str(theirs), data_dir=str(tmp_path))
    assert site.send(HELLO) is not None
    assert not files_below(theirs)
    assert files_below(site.home / ".own" / "cache")


@pytest.mark.parametrize("folder", ["gone", "there"])
def test_an_error_is_no_oracle_of_paths(hospital: Make, tmp_path: Path, folder: str) -> None:
    (tmp_path / "there" / "heart_disease").mkdir(parents=True)
    site = hospital(dataset="heart", data_dir=str(tmp_path / folder))
    assert site.send(HELLO) is None
    assert str(tmp_path) not in site.refusals[0]
    named = hospital(node={"data-dir": str(tmp_path / folder)}, dataset="heart")
    named.refusals.clear()
    assert named.send(HELLO) is None
    assert "(data-dir)/heart_disease" in named.refusals[0]
    assert str(tmp_path) not in named.refusals[0]


def test_both_answers_to_a_path_are_the_same(hospital: Make, tmp_path: Path) -> None:
    told = []
    for folder in ("gone", "there"):
        (tmp_path / "there").mkdir(exist_ok=True)
        site = hospital(dataset="table", data_dir=str(tmp_path / folder))
        site.refusals.clear()
        assert site.send(HELLO) is None
        told += site.refusals
    assert told[0] == told[1]


def test_no_digest_of_a_file_that_a_run_points_at(hospital: Make, tmp_path: Path) -> None:
    (tmp_path / "backbones").mkdir()
    (tmp_path / "backbones" / "vit.safetensors").write_bytes(b"a patient's file")
    site = hospital(
        dataset="digits",
        site="s1a",
        network="vit",
        standardise="pooled",
        cache_dir=str(tmp_path),
        backbone_weights="vit.safetensors",
    )
    assert site.send(HELLO) is None
    assert "there is no" in site.refusals[0]


def test_no_cell_of_a_file_is_quoted(hospital: Make, tmp_path: Path) -> None:
    secret = tmp_path / "patients.csv"
    secret.write_text("site,neighbour\nMrs Miller,HIV positive\n")
    site = hospital(
        "s1a",
        {"allow-folds": True},
        {"silo-set": str(secret)},
        dataset="digits",
        standardise="pooled",
        network="conv",
        partition="unseen",
        method="fedefm",
    )
    assert site.send(HELLO) is None
    assert site.send(TRAIN) is None
    for refusal in site.refusals:
        assert "Miller" not in refusal
        assert "HIV" not in refusal
        assert "'silo-set' is a file" in refusal
