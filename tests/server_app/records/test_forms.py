"""A run directory's files are held against their forms when they are read."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fedsilo.core.errors import RunDirectoryError
from fedsilo.server_app.records.forms import StateFacts, Summary, check
from fedsilo.server_app.records.run_directory import RunDirectory, refuse_links
from tests.support.errors import refuses
from tests.support.run_files import SILO, SUMMARY


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
    assert str(caught.value).startswith(
        f"{tmp_path / 'silos.json'} does not have the expected form: "
    )
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("../north", "cannot be a site's name"),
        ("all", "'all' stands for the mean over sites"),
        ("", "cannot be a site's name"),
        ("a  b", "cannot be a site's name"),
    ],
)
def test_what_is_no_site_name_is_none_of_a_run(name: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=told):
        written(tmp_path, "silos.json", {name: SILO}).read_json("silos.json")


@pytest.mark.parametrize("key", SUMMARY)
def test_a_key_that_is_missing_is_told_when_the_file_is_read(key: str, tmp_path: Path) -> None:
    content = {name: value for name, value in SUMMARY.items() if name != key}
    with refuses(RunDirectoryError, "summary.json", key):
        written(tmp_path, "summary.json", content).read_json("summary.json")


def test_a_key_of_a_later_version_is_let_through(tmp_path: Path) -> None:
    content = SUMMARY | {"later": 1}
    assert written(tmp_path, "summary.json", content).read_json("summary.json") == content


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
        {"sites": {"north": {"accuracy": float("nan")}}},
        {"privacy": SUMMARY["privacy"] | {"trust": {"level": "all", "promise": ""}}},
        {"privacy": SUMMARY["privacy"] | {"guarantee": "some"}},
        {"privacy": SUMMARY["privacy"] | {"guarantee": {"epsilon": 1.0}}},
        {"seconds": SUMMARY["seconds"] | {"total": float("inf")}},
    ],
)
def test_a_summary_of_another_form_is_told(content: Any) -> None:
    with pytest.raises(RunDirectoryError, match="not have the expected form"):
        check(Summary, SUMMARY | content, "it")


def test_figures_that_are_undefined_are_numbers_all_the_same() -> None:
    undefined = {"sites": {"north": {"loss": float("nan")}}, "published": None}
    check(Summary, SUMMARY | undefined, "it")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("round,site,split,metric,value\n1,north,test,auc,high\n", ["value", "high"]),
        (
            "round,site,split,metric,value\n-1,north,test,auc,1\n",
            ["round", "-1"],
        ),
        ("round,site,split,metric,value\n1,north\n", [2]),
        ("round,site,split,metric,value\n1,n,t,a,1,5\n", [2]),
    ],
)
def test_a_row_of_another_form_is_told_with_its_line(
    text: str, told: list[object], tmp_path: Path
) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    with refuses(RunDirectoryError, *told):
        RunDirectory(tmp_path).read_csv("metrics.csv")


@pytest.mark.parametrize("name", ["metrics.csv", "traffic.csv"])
def test_a_column_that_is_missing_is_told(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("round,site\n1,north\n")
    with pytest.raises(RunDirectoryError, match="line 1 lacks the column"):
        RunDirectory(tmp_path).read_csv(name)


def test_a_file_that_leads_out_of_the_directory_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(json.dumps(SUMMARY))
    run = tmp_path / "run"
    run.mkdir()
    (run / "summary.json").symlink_to(tmp_path / "secret")
    with pytest.raises(RunDirectoryError, match="is a link out of the run directory"):
        RunDirectory(run).read_json("summary.json")


@pytest.mark.parametrize("folder", ["", "sites/north", "checkpoints/3/sites"])
def test_a_link_out_of_the_directory_is_refused_however_deep_it_is(
    folder: str, tmp_path: Path
) -> None:
    deep = tmp_path / "run" / folder
    deep.mkdir(parents=True)
    (deep / "inside.json").write_text("{}")
    (deep / "again.json").symlink_to(deep / "inside.json")
    refuse_links(tmp_path / "run")
    (deep / "model.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(RunDirectoryError, match="is a link out of the run directory"):
        refuse_links(tmp_path / "run")


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "summary.json")
    with pytest.raises(RunDirectoryError, match="is not a file"):
        RunDirectory(tmp_path).read_json("summary.json")


@pytest.mark.parametrize("change", [{"keepers": "north"}, {"settings": {"seed": [1]}}])
def test_a_checkpoint_of_another_form_is_refused(change: dict[str, Any]) -> None:
    kept = {"round": 1, "extras": {}, "keepers": {"north": 1}, "settings": {"seed": 1}, "hooks": {}}
    check(StateFacts, kept, "it")
    with pytest.raises(RunDirectoryError, match="it does not have the expected form: "):
        check(StateFacts, kept | change, "it")
