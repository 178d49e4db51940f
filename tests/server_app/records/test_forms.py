"""A run directory's files are held against their forms when they are read."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedsilo.models.contract.errors import RunDirectoryError
from fedsilo.server_app.records.forms import STATE, SUMMARY, check
from fedsilo.server_app.records.run_directory import RunDirectory

SILO = {
    "distribution": "D1",
    "sizes": {"train": 3, "val": 0, "test": 1},
    "label_counts": {"train": [1, 2], "val": [0, 0], "test": [1, 0]},
    "fingerprints": {"train": "a" * 64},
    "dropped": 0,
    "schema": "",
    "classes": ["ill", "well"],
    "backbone": "",
}


def written(folder: Path, name: str, content: Any) -> RunDirectory:
    (folder / name).write_text(json.dumps(content))
    return RunDirectory(folder)


def test_a_file_of_its_form_is_read_as_it_is(tmp_path: Path) -> None:
    content = {"north": SILO, "south": SILO | {"software": {"fedsilo": "1"}, "agreed": 20}}
    assert written(tmp_path, "silos.json", content).read_json("silos.json") == content


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"sizes": {"train": -1}},
            "'north', 'sizes', 'train' is -1: it must be greater than or equal to 0",
        ),
        (
            {"label_counts": {"train": [[1]]}},
            "'label_counts', 'train', item 1 is [1]: it must be a",
        ),
        ({"label_counts": {"train": [1], "test": [1, 2]}}, "of one number of classes"),
        ({"classes": ["a", "b", "c"]}, "of one number of classes"),
        ({"classes": ["$x$", "b"]}, "'classes', item 1 is '$x$': it must have no '$'"),
        ({"distribution": "\x1b[2J"}, "must be a line of text"),
        ({"dropped": True}, "'dropped' is True: it must be a"),
    ],
)
def test_a_silo_of_another_form_is_refused_by_its_place(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(RunDirectoryError) as caught:
        written(tmp_path, "silos.json", {"north": SILO | change}).read_json("silos.json")
    assert str(caught.value).startswith(f"{tmp_path / 'silos.json'} is of another form: ")
    assert told in str(caught.value)


@pytest.mark.parametrize("name", ["../north", "all", "", "a b"])
def test_what_is_no_site_name_is_none_of_a_run(name: str, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a plain name"):
        written(tmp_path, "silos.json", {name: SILO}).read_json("silos.json")


def test_a_key_that_is_missing_is_told_when_it_is_asked_for(tmp_path: Path) -> None:
    summary = written(tmp_path, "summary.json", {"method": "fedavg"}).read_json("summary.json")
    assert summary["method"] == "fedavg"
    assert summary.get("title") is None
    with pytest.raises(RunDirectoryError, match=r"summary\.json lacks 'title': start a new run"):
        summary["title"]


@pytest.mark.parametrize(
    "content",
    [
        {"sites": {"north": {"accuracy": "high"}}},
        {"rounds": 2.5},
        {"marks": {"first": "x"}},
        {"failures": [{"reason": ["x"]}]},
        {"mean": []},
        {"published": "x"},
        {"seed": 10**20},
        [],
    ],
)
def test_a_summary_of_another_form_is_told(content: Any) -> None:
    with pytest.raises(RunDirectoryError, match="of another form"):
        check(SUMMARY, content, "it")


def test_figures_that_are_undefined_are_numbers_all_the_same() -> None:
    check(SUMMARY, {"sites": {"north": {"auc": float("nan")}}, "published": None}, "it")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("round,site,split,metric,value\n1,north,test,auc,high\n", "'value' is 'high', no number"),
        (
            "round,site,split,metric,value\n-1,north,test,auc,1\n",
            "'round' is '-1', no whole number",
        ),
        ("round,site,split,metric,value\n1,north\n", "line 2 has more or fewer cells"),
        ("round,site,split,metric,value\n1,n,t,a,1,5\n", "line 2 has more or fewer cells"),
    ],
)
def test_a_row_of_another_form_is_told_with_its_line(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(RunDirectoryError, match=told):
        RunDirectory(tmp_path).read_csv("metrics.csv")


def test_a_column_that_is_missing_is_told_when_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("round,site\n1,north\n")
    (row,) = RunDirectory(tmp_path).read_csv("metrics.csv")
    assert row == {"round": "1", "site": "north"}
    with pytest.raises(RunDirectoryError, match=r"metrics\.csv lacks 'value'"):
        row["value"]


@pytest.mark.parametrize("change", [{"keepers": "north"}, {"settings": {"seed": [1]}}])
def test_a_checkpoint_of_another_form_is_refused(change: dict[str, Any]) -> None:
    kept = {"round": 1, "extras": {}, "keepers": {"north": 1}, "settings": {"seed": 1}, "hooks": {}}
    check(STATE, kept, "it")
    with pytest.raises(RunDirectoryError, match="it is of another form: "):
        check(STATE, kept | change, "it")
