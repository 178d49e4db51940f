"""``fedsilo survey`` over simulated sites: its JSON, its page, and one line for what cannot be."""

import json
import re
from pathlib import Path

import pytest

from fedsilo.cli.main import main
from fedsilo.core.errors import RunDirectoryError
from fedsilo.reports.survey.document import read_survey_document
from tests.support.browser import PHONE, picture, rendered


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a survey of the made-up hearts."""
    out = tmp_path_factory.mktemp("surveys")
    told = ("--set", "dataset=heart-synthetic", "--out", str(out), "--name", "hearts")
    assert main(["survey", "fedavg-heart", *told]) == 0
    return out / "hearts"


def test_it_says_what_each_site_holds_and_how_far_they_are_apart(folder: Path) -> None:
    document = json.loads((folder / "survey.json").read_text())
    assert list(document["sites"]) == ["cleveland", "hungary", "switzerland", "va"]
    cleveland = document["sites"]["cleveland"]
    assert cleveland["samples"] == {"train": 199, "test": 104}
    assert sum(cleveland["labels"]["train"]) == 199
    assert cleveland["about"]["simulated"] is True
    assert cleveland["means"]["train"]["age"]["mean"] == pytest.approx(54, abs=3)
    switzerland = document["sites"]["switzerland"]
    assert switzerland["labels"]["train"] == [None, None], "its one healthy patient"
    features = document["distances"]["train"]["features"]
    assert features == sorted(features, key=lambda one: -one["distance"])
    assert document["refused"] == []
    assert not (folder / "summary.json").exists(), "nothing was trained"


def test_the_page_has_what_the_json_has_and_loads_nothing(folder: Path) -> None:
    page = (folder / "survey.html").read_text()
    answers = read_survey_document(folder / "survey.json").sites
    assert "Survey of heart-synthetic" in page
    for site, answer in answers.items():
        assert site in page
        for count in (answer.labels or {})["train"]:
            assert f">{'suppressed' if count is None else count}<" in page
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", page)
    assert "<script" not in page


def test_the_page_has_titles_units_and_names_of_levels_which_no_site_sends(folder: Path) -> None:
    page = (folder / "survey.html").read_text()
    for said in ("serum cholesterol (chol, mg/dl), training samples", "typical angina (1)"):
        assert said in page
    document = json.loads((folder / "survey.json").read_text())
    assert document["columns"]["chol"]["title"] == "serum cholesterol (chol, mg/dl)"
    assert "serum" not in json.dumps(document["sites"])
    older = read_survey_document(folder / "survey.json").model_copy(update={"columns": {}})
    assert older.title("chol") == "chol"


def test_a_browser_shows_the_page(folder: Path, tmp_path: Path) -> None:
    address = (folder / "survey.html").as_uri()
    assert "How far the sites are apart" in rendered(address, tmp_path / "browser")
    shown = picture(address, tmp_path / "page.png", PHONE, tmp_path / "browser")
    assert len(shown) > 20_000, "a page without its tables is smaller"


def test_names_of_others_become_no_html_and_no_formula(folder: Path, tmp_path: Path) -> None:
    from fedsilo.reports.survey.survey_page import survey_page

    nasty = "<script>$\\frac$&"
    text = (folder / "survey.json").read_text()
    text = text.replace('"oldpeak"', json.dumps(nasty))
    text = text.replace('"ST depression by exercise (oldpeak, mm)"', json.dumps(nasty))
    (tmp_path / "survey.json").write_text(text)
    page = survey_page(read_survey_document(tmp_path / "survey.json"))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize("change", [('"version": 1', '"version": 2'), ("{", "[")])
def test_read_survey_document_of_another_form_is_refused(
    change: tuple[str, str], folder: Path, tmp_path: Path
) -> None:
    text = (folder / "survey.json").read_text()
    (tmp_path / "survey.json").write_text(text.replace(*change, 1))
    with pytest.raises(RunDirectoryError, match=r"damaged, or of another version.*survey again"):
        read_survey_document(tmp_path / "survey.json")
    with pytest.raises(RunDirectoryError, match="cannot be read: No such file"):
        read_survey_document(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["no-such-experiment"], "unknown experiment 'no-such-experiment'"),
        (["fedavg-heart", "--deployment", "."], "there is no deployment in"),
        (["fedavg-heart", "--name", "a/b"], "must be a plain name"),
        (["fedavg-heart", "--set", "colour=red"], "unknown setting 'colour'"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["survey", *arguments, "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().err
    assert told in printed
    assert printed.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_second_survey_of_a_name_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "survey.json").read_bytes()
    told = ("--set", "dataset=heart-synthetic", "--out", str(folder.parent), "--name", "hearts")
    assert main(["survey", "fedavg-heart", *told]) == 1
    assert "exists: choose another" in capsys.readouterr().err
    assert (folder / "survey.json").read_bytes() == before


def test_a_run_does_not_survey_and_a_survey_is_no_run(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = ("--set", "run.purpose=survey", "--out", str(tmp_path), "--engine", "inline")
    assert main(["simulate", "fedavg-digits", *told]) == 1
    assert "use 'fedsilo survey'" in capsys.readouterr().err
    # Watching takes a folder without a run for a folder of runs to come
    assert main(["watch", str(folder), "--once"]) == 0
    assert capsys.readouterr().out == f"{folder}: no run yet\n"
    assert main(["resume", str(folder)]) == 1
