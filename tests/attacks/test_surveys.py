"""Surveys: no question, however often and however changed, is told more than the first answer."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message, RecordDict

from fedsilo.client_app.app import app
from fedsilo.core.messages import SURVEY, SURVEYED
from fedsilo.core.survey import Survey
from tests.support.hospital import Hospital

Make = Callable[..., Hospital]
SITE_FILE = 'methods: ["*"]\ndatasets: ["*"]\nrecords: ["survey/*"]\n'
SCHEMA = """
columns:
  - {name: age, edges: [30, 50, 70]}
  - {name: dose, mean: 10, std: 2}
  - {name: ward, kind: categorical, levels: [a, b, c]}
label: {column: ill, classes: {well: ["0"], sick: ["1"]}}
policy: impute
sites: {cleveland: own.csv}
"""


def _site_file(folder: Path, text: str = SITE_FILE) -> dict[str, Any]:
    path = folder / "site.yaml"
    path.write_text(text)
    return {"site-file": str(path)}


def _rows(count: int) -> list[str]:
    """Return the patients of a made-up hospital; the last is the one whom the server is after."""
    made = [
        f"{20 + (7 * i) % 65},{8 + (i * 37 % 50) / 10},{'abc'[i % 3]},{int(i % 4 == 0)}"
        for i in range(count)
    ]
    return [*made[:-1], "93,31.5,c,1"]


def _table(folder: Path, rows: list[str]) -> None:
    home = folder / "data"
    home.mkdir(parents=True, exist_ok=True)
    (home / "schema.yaml").write_text(SCHEMA)
    (home / "own.csv").write_text("\n".join(["age,dose,ward,ill", *rows]) + "\n")


@pytest.fixture
def table(hospital: Make, tmp_path: Path) -> Callable[..., Hospital]:
    """Return a builder of a hospital with a table of its own, asked with settings of the server."""
    _table(tmp_path, _rows(160))

    def make(**run: Any) -> Hospital:
        node = {"data-dir": str(tmp_path / "data")} | _site_file(tmp_path)
        return hospital(node=node, dataset="table", **run)

    return make


def _asked(site: Hospital) -> dict[str, str] | None:
    reply = site.send(SURVEY)
    return None if reply is None else {k: str(v) for k, v in reply[SURVEYED].items()}


def _read(parts: dict[str, str] | None) -> Survey:
    assert parts is not None
    return Survey.from_config(parts)


# All by which a server could shift what is counted: other splits, samples, floors, edges
CHANGES: list[dict[str, Any]] = [
    {"sums_min_count": 1},
    {"use_test": False},
    {"standardise": "declared"},
    {"seed": 5, "method": "local"},
    {"unchecked": {"split.test-fold": 1}},
    {"unchecked": {"split.val-fold": 1}},
    {"unchecked": {"silos": 2}},
    {"unchecked": {"edges": 3, "bins": 50, "survey-edges": "0,93,94"}},
    {"unchecked": {"data.image-size": 64, "data.target": "diagnosis"}},
]
REFUSED: list[dict[str, Any]] = [
    {"test_folds": 2},
    {"val_folds": 2},
    {"val_folds": 2, "fold_seed": 3},
    {"unchecked": {"split.sample-share": 0.5}},
    {"unchecked": {"partition": "unseen", "unseen": 0.5}},
]


def test_whatever_is_changed_the_answer_is_the_first_one(table: Callable[..., Hospital]) -> None:
    first = _asked(table())
    assert _read(first).samples is not None
    for change in CHANGES + REFUSED:
        answer = _asked(table(**change))
        assert answer in (first, None), change
    for change in CHANGES:
        assert _asked(table(**change)) == first, change


@pytest.mark.parametrize("change", REFUSED, ids=str)
def test_a_first_question_does_not_choose_among_samples(
    table: Callable[..., Hospital], change: dict[str, Any]
) -> None:
    site = table(**change)
    assert _asked(site) is None
    assert "choose which of this site's samples are used" in site.refusals[0]


def test_a_first_question_does_not_lower_or_raise_the_floor(
    table: Callable[..., Hospital], tmp_path: Path
) -> None:
    for count in (1, 100_000):
        assert _read(_asked(table(sums_min_count=count))).about.floor == 10
        (tmp_path / "own" / ".own" / "cleveland" / "survey.json").unlink()


def test_one_patient_more_or_less_is_not_told(
    table: Callable[..., Hospital], tmp_path: Path
) -> None:
    """The server asks, has one patient leave (or waits for one to come), and asks again."""
    with_patient = _read(_asked(table()))
    _table(tmp_path, _rows(160)[:-1])
    without = _read(_asked(table()))
    assert without.about.changed
    same = {"about": without.about.model_copy(update={"changed": False})}
    assert without.model_copy(update=same) == with_patient
    _table(tmp_path, _rows(160))
    assert _read(_asked(table())) == with_patient


def test_the_patient_far_out_is_in_no_number_that_leaves(table: Callable[..., Hospital]) -> None:
    """A dose of 31.5 among 8 to 13: beyond the declared edges nobody counts for more."""
    answer = _read(_asked(table()))
    for split in ("train", "test"):
        told = (answer.histograms or {})[split]
        assert all(count is None or count >= 10 for cells in told.values() for count in cells)
        spread = (answer.means or {})[split].get("dose")
        assert spread is None or spread.mean < 13
        assert not (answer.percentiles or {})[split], "of 106 rows 5 are beyond: too few"
    ages = (answer.histograms or {})["train"]["age"]
    assert ages.count(None) != 1
    assert ages[-1] is None, "nobody here lacks an age, and that is not told"


def test_no_mean_tells_how_many_are_beyond_an_edge(
    table: Callable[..., Hospital], tmp_path: Path
) -> None:
    """All doses differ, and within the edges there are two numbers: the mean would count one."""
    _table(tmp_path, _rows(160))
    schema = tmp_path / "data" / "schema.yaml"
    schema.write_text(SCHEMA.replace("mean: 10, std: 2", "edges: [20, 30]"))
    answer = _read(_asked(table()))
    for split in ("train", "test"):
        assert (answer.histograms or {})[split]["dose"].count(None) > 1
        assert "dose" not in (answer.means or {})[split]
        assert "age" in (answer.means or {})[split]


def test_one_hospital_gives_one_answer_to_questions_side_by_side(
    table: Callable[..., Hospital],
) -> None:
    sites = [table(sums_min_count=count) for count in (1, 5, 10, 20)]
    with ThreadPoolExecutor(len(sites)) as pool:
        answers = list(pool.map(_asked, sites))
    assert answers[0] is not None
    assert answers.count(answers[0]) == len(sites)


def test_without_the_hospitals_word_there_is_no_survey(hospital: Make, tmp_path: Path) -> None:
    for text, told in (
        ("", "has no site file"),
        (SITE_FILE.replace("survey/*", "*"), "do not list 'survey/about'"),
        (SITE_FILE.replace("survey/*", "config/*"), "do not list 'survey/about'"),
        (SITE_FILE.replace("survey/*", "survey/labels"), "do not list 'survey/about'"),
        (SITE_FILE + "refused-records: [survey/about]\n", "do not list 'survey/about'"),
        (SITE_FILE + "max-epsilon: 8.0\n", "has a cap on epsilon"),
        (SITE_FILE.replace('datasets: ["*"]', "datasets: [heart]"), "allow data set"),
    ):
        site = hospital(node=_site_file(tmp_path, text) if text else {})
        assert _asked(site) is None, text
        assert told in site.refusals[0], text
        assert "\n" not in site.refusals[0]
    assert not (tmp_path / "own" / ".own" / "cleveland" / "survey.json").exists()


def test_only_the_parts_that_the_hospital_lists_leave(hospital: Make, tmp_path: Path) -> None:
    listed = SITE_FILE.replace('"survey/*"', '"survey/about", "survey/labels", "survey/samples"')
    few = _asked(hospital(node=_site_file(tmp_path, listed)))
    assert few is not None
    assert sorted(few) == ["about", "labels", "samples"]
    refused = SITE_FILE + 'refused-records: ["survey/means", "survey/percentiles"]\n'
    more = _asked(hospital(node=_site_file(tmp_path, refused)))
    assert more is not None
    assert {"means", "percentiles"} & more.keys() == set()
    assert few.items() <= more.items(), "the same answer, more of it"


def test_what_leaves_is_in_the_log_and_what_does_not_too(hospital: Make, tmp_path: Path) -> None:
    site = hospital(node=_site_file(tmp_path))
    parts = _asked(site)
    assert parts is not None
    _site_file(tmp_path, SITE_FILE.replace("survey/*", "metrics/*"))
    assert _asked(site) is None
    log = (tmp_path / "own" / ".own" / "cleveland" / "audit.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in log]
    assert [line["kind"] for line in lines] == ["query.survey"] * 2
    assert [line["outcome"] for line in lines] == ["answered", "refused"]
    assert lines[0]["records"] == {f"survey/{name}": 1 for name in sorted(parts)}
    assert lines[1]["records"] == {}


def test_surveys_are_rationed_as_hellos_are(hospital: Make, tmp_path: Path) -> None:
    site = hospital(node={"max-runs-per-day": 1} | _site_file(tmp_path))
    answers = [_asked(site) for _ in range(20)]
    assert sum(answer is not None for answer in answers) == 13
    assert "'max-runs-per-day'" in site.refusals[-1]
    with_nothing = Message(RecordDict(), 1001, SURVEY, group_id="1")
    assert "'max-runs-per-day'" in str(app(with_nothing, site.context()).error.reason)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"table": 3}', '{"table": {"parts": {}}}'])
def test_a_damaged_answer_is_no_reason_for_another(
    table: Callable[..., Hospital], tmp_path: Path, text: str
) -> None:
    kept = tmp_path / "own" / ".own" / "cleveland" / "survey.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(text)
    site = table()
    assert _asked(site) is None
    assert "survey.json is damaged" in site.refusals[0]
    assert kept.read_text() == text


def test_it_is_its_owners_alone(hospital: Make, tmp_path: Path) -> None:
    assert _asked(hospital(node=_site_file(tmp_path)))
    kept = tmp_path / "own" / ".own" / "cleveland" / "survey.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert "/own" not in kept.read_text().replace("/owner", ""), "no path of the hospital's"
