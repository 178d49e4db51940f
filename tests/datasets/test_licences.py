"""Every public data set says on what terms it may be used; terms are agreed to before a byte."""

import json
from pathlib import Path

import pytest

from fedsilo.cli.main import main
from fedsilo.core.errors import DataError
from fedsilo.datasets.downloads import download
from fedsilo.datasets.downloads.public_files import PublicFiles
from fedsilo.datasets.registry import DATA_SETS, data_set, overview
from tests.support.errors import refuses

PUBLIC = [name for name in DATA_SETS if data_set(name).origin == "public"]
ASKED = [name for name in PUBLIC if (held := data_set(name).licence) and held.terms]


@pytest.mark.parametrize("name", DATA_SETS)
def test_public_data_sets_have_a_licence_and_a_source_and_others_have_none(name: str) -> None:
    held = data_set(name).licence
    if name not in PUBLIC:
        assert held is None
        return
    assert held is not None
    assert held.licence
    assert held.url.startswith(("http://", "https://"))
    assert held.bytes() >= 0
    told = list(held.lines())
    assert [line.partition(":")[0] for line in told] == ["licence", "source", "size", "terms"]


def test_what_is_the_users_own_or_made_up_is_not_taken_for_public() -> None:
    assert set(DATA_SETS) - set(PUBLIC) == {
        *("table", "images", "folder", "arrays", "mammography", "endovascular", "masks"),
        *("heart-synthetic", "heart-synthetic-pulse", "survival-synthetic", "vessels-synthetic"),
        *("dermoscopy-phantom", "mammography-phantom", "angiogram-phantom", "chest-phantom"),
        *("tumours-synthetic", "tumours-synthetic-size"),
    }


def test_research_only_and_unlicensed_data_sets_have_terms() -> None:
    images = ["cifar10", "cifar100", "dermamnist", "gtsrb", "isic2019", "mini-mias"]
    assert sorted(ASKED) == [*images, "tcga-brca"]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "not stated"), (999, "999 bytes"), (39_570, "39.6 kB"), (9_100_000_000, "9.1 GB")],
)
def test_a_size_is_said_as_people_say_it(size: int, text: str) -> None:
    assert PublicFiles("a", "https://example.org", "MIT", size=size).size_text() == text


def test_terms_are_refused_until_they_are_accepted() -> None:
    held = PublicFiles("a", "https://example.org", "x", terms="for research only")
    with refuses(DataError, "example.org"):
        held.refuse_unaccepted(accepted=False)
    held.refuse_unaccepted(accepted=True)
    PublicFiles("a", "https://example.org", "MIT").refuse_unaccepted(accepted=False)


def test_fetch_says_the_terms_and_brings_nothing_without_agreement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "fetch", lambda *_: ["brought"])
    assert main(["fetch", "gtsrb", "--data-dir", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "terms: for research" in said.out
    assert "brought" not in said.out
    assert "nothing was downloaded; repeat with --accept-licence if you agree" in said.err
    assert main(["fetch", "gtsrb", "--data-dir", str(tmp_path), "--accept-licence"]) == 0
    assert capsys.readouterr().out.endswith("brought\n")
    assert main(["fetch", "mnist", "--data-dir", str(tmp_path)]) == 0, "no terms, no question"


def test_what_cannot_be_fetched_says_where_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", "mini-mias", "--data-dir", str(tmp_path), "--accept-licence"]) == 1
    assert "get them from http://peipa.essex.ac.uk" in capsys.readouterr().err


def test_datasets_lists_all_with_what_is_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heart = tmp_path / "heart_disease"
    heart.mkdir()
    for name in ("processed.va.data", "processed.hungarian.data"):
        (heart / name).write_text("")
    (tmp_path / "schema.yaml").write_text(
        "columns: [{name: age}]\nlabel: {column: num, classes: {healthy: [0], sick: [1]}}\n"
        "sites: {north: n.csv, south: s.csv}\n"
    )
    assert main(["datasets", "--data-dir", str(tmp_path), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(DATA_SETS)
    here = {name: row["here"] for name, row in rows.items() if row["here"]}
    for name in ("heart", "heart-imputed", "heart-indicator"):
        assert here.pop(name) == "2 of 4 files in heart_disease"
    assert here.pop("table") == "north, south"
    assert here.pop("digits") == "comes with scikit-learn"
    assert set(here.values()) == {"made when first used"}
    assert main(["datasets", "--data-dir", str(tmp_path)]) == 0
    assert "CC BY-SA 3.0" in capsys.readouterr().out


def test_real_data_are_found(real_data: Path) -> None:
    here = {row["name"]: row["here"] for row in overview(str(real_data))}
    assert here["mnist"] == "4 of 4 files in mnist"
    assert here["gtsrb"].endswith("files in GTSRB")
    assert here["mini-mias"] == "labels.csv in mini_mias"
    assert "rosendahl" in here["isic2019"]
