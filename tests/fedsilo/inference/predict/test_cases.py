"""The page of cases: what it names, its order, its marks, what it says is missing."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsilo import calibrate, predict
from fedsilo.cli.main import main
from fedsilo.core.errors import SettingError
from fedsilo.core.metric_names import CONFIDENCE
from fedsilo.core.settings_schema import Value
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.datasets.tables.schema import Column, TableSchema
from fedsilo.explanations.columns import column_contributions, explain_columns
from fedsilo.inference.predict import case_details
from fedsilo.inference.predict.case_answers import ClassAnswers
from fedsilo.inference.predict.case_details import ValueTexts
from fedsilo.inference.predict.prediction import check_outputs
from fedsilo.models.measures.outcome_counts import bins, merge_bins
from fedsilo.reports.clinic import final_metrics
from fedsilo.runs.finished_run import FinishedRun
from tests.fedsilo.inference.predict.test_data_sets import run_of
from tests.support.browser import chromium, opened
from tests.support.data_folders import write_images, write_tables

ROWS = "kind,age,patient\na,50,usual\nb,,lacking\nc,400,far\nz,50,unknown\n"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    data = str(write_tables(folder / "data", rows=120))
    run_of("table", folder, data, **{"split.val-folds": 4, "train.local-steps": 30})
    (folder / "new.csv").write_text(ROWS)
    return folder


@pytest.fixture(scope="module")
def page(tables: Path) -> str:
    calibrate(tables / "table", "north")
    html = tables / "cases.html"
    words = ["--site", "north", "--table", str(tables / "new.csv"), "--id", "patient"]
    words += ["--coverage", "0.9", "--out", str(tables / "out.csv"), "--html", str(html)]
    with pytest.raises(SystemExit):
        main(["predict", str(tables / "table"), *words])
    return html.read_text()


def case_of(page: str, name: str) -> str:
    start = page.index(f"<h3>{name} (")
    return page[start : page.index("</article>", start)]


def test_the_page_names_data_method_version_and_source_but_no_folder(
    page: str, tables: Path
) -> None:
    text = re.sub(r"<[^>]*>", " ", page)
    for said in ("FedAvg on table", "fedsilo 0.", "new.csv", "SHA-256", "coverage 0.9"):
        assert said in text
    assert str(tables) not in page
    assert "not a medical device" in text


def test_cases_are_sorted_by_what_needs_a_look_first(page: str) -> None:
    names = re.findall(r"<h3>(\w+) \(", page)
    assert names[:2] == ["unknown", "far"]
    assert set(names) == {"unknown", "far", "usual", "lacking"}


def test_imputed_and_unusual_values_are_marked_and_a_refused_case_has_its_reason(
    page: str,
) -> None:
    assert "not one of the declared levels" in case_of(page, "unknown")
    far = case_of(page, "far")
    assert "beyond the training values: age" in far
    assert re.search(r"age</th><td>400</td>.*unusual", far)
    assert '<svg class="bar"' not in far, "no probability"
    lacking = case_of(page, "lacking")
    assert re.search(r"age</th><td>missing; [\d.]+, the mean, is used</td>.*imputed", lacking)
    assert "Prediction set: " in case_of(page, "usual")


def test_what_the_columns_add_is_the_probability_less_that_of_the_mean_row(tables: Path) -> None:
    model = FinishedRun.open(tables / "table").model("north")
    rows, answers = model.silo.test.inputs[:5], torch.tensor([0, 1, 0, 1, 1])
    features = model.silo.features
    parts, own = column_contributions(model.network, rows, features, answers)
    assert parts.shape == (5, 2), "age and kind: levels are one column"
    with torch.no_grad():
        mean = torch.softmax(model.network(torch.zeros(1, len(features))), dim=1)[0, answers]
    assert parts.sum(dim=1).tolist() == pytest.approx((own - mean).tolist(), abs=1e-5)
    again, _ = column_contributions(model.network, rows, features, answers)
    assert torch.equal(parts, again)
    said = explain_columns(model.network, rows[0], features, model.classes, "row 0").lines()
    assert said[0].startswith("row 0; predicted ")


def test_training_values_of_few_patients_are_not_shown(tables: Path) -> None:
    """Of 63 training patients at north none is in a tail of 10 beyond the quarter."""
    found = predict(tables / "table", site="north", table=tables / "new.csv")
    from fedsilo.inference.predict.cases import cases_page

    run = FinishedRun.open(tables / "table")
    few = cases_page(run.shown(), run.model("north"), found)
    ranges = re.findall(r"([\d.]+) to ([\d.]+) \((\d+)% of patients\)", few)
    assert ranges
    assert {share for *_, share in ranges} == {"50"}


def test_a_run_for_nobody_gives_a_page_that_says_what_is_missing(tmp_path: Path) -> None:
    private: dict[str, Value] = {"trust": "nobody", "standardise": "declared"}
    private |= {"privacy.sample-clip-norm": 1.0, "privacy.noise-multiplier": 2.0}
    run = run_of("heart-synthetic", tmp_path, "", **private)
    html = tmp_path / "cases.html"
    predict(run.path, site="switzerland", split="test", html=html)
    page = html.read_text()
    assert "made for trust nobody, keeps nothing of theirs" in page
    assert "What is usual in training is not shown" in page
    assert "of patients)" not in page


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([28, 31, 9], {"0 (41%)", "1 (46%)"}),  # both would give the 9 away
        ([13, 48, 4, 3], {"0 (19%)", "1 (71%)"}),
        ([28, 40], {"0 (41%), 1 (59%)"}),
        ([65, 3], {""}),
        ([30, 38, 0], {"0 (44%)", "1 (56%)"}),
    ],
)
def test_common_values_leave_no_count_below_the_floor(counts: list[int], said: set[str]) -> None:
    column = Column(name="a", kind="categorical", levels=list("0123"[: len(counts)]))
    levels = np.repeat(np.eye(len(counts)), counts, axis=0)[:, 1:]
    texts = ValueTexts(None, levels, None, 10)  # type: ignore[arg-type]
    assert texts._usual(column, levels) in said


def test_values_have_the_titles_units_and_names_of_levels_of_the_schema() -> None:
    columns = [
        {"name": "chol", "title": "cholesterol", "unit": "mg/dl"},
        {"name": "cp", "kind": "categorical", "levels": ["1", "2"], "level-names": {"2": "none"}},
    ]
    schema = TableSchema.model_construct(
        columns=[Column.model_validate(column) for column in columns]
    )
    statistics = FeatureStatistics(np.array([200.0, 0.5]), np.ones(2))
    training = np.array([[200.0, 0.0], [200.0, 1.0]] * 20)
    texts = ValueTexts(schema, training, statistics, 10)
    chol, pain = texts.of(np.array([212.0, 1.0]), (), {"chol": 0.2, "cp": 0.1})
    assert (chol.name, chol.text) == ("cholesterol (chol, mg/dl)", "212")
    assert (pain.name, pain.text) == ("cp", "none (2)")
    assert pain.usual == "1 (50%), none (2) (50%)"
    assert next(texts.of(np.array([212.0, 0.0]), (), {"cp": 0.2})).text == "1"


def test_intervals_are_of_the_clinic_reports_bins(tables: Path) -> None:
    shown = FinishedRun.open(tables / "table").shown()
    found = final_metrics(shown)
    answers = ClassAnswers(shown, None, None)  # type: ignore[arg-type]
    counts = [one.count for one in answers.reliability]
    assert counts == [
        one.count for one in merge_bins(bins(found.values(), CONFIDENCE), shown.floor)
    ]
    assert counts != [one.count for one in bins(found.values(), CONFIDENCE)]


@pytest.mark.parametrize(("out", "html"), [("a.csv", "a.csv"), ("a", "a.json")])
def test_two_files_of_one_name_are_refused(out: str, html: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="would be written twice: give --html another name"):
        check_outputs(tmp_path / out, tmp_path / html)


def test_images_are_shown_with_a_map_and_a_mixture_with_its_router(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case_details, "PICTURES", 3)
    data = write_images(tmp_path / "data", "images.yaml")
    run = run_of("images", tmp_path / "runs", str(data), **{"split.test-folds": 3})
    page = tmp_path / "images.html"
    predict(run.path, images=data / "north", html=page, answer_all=True)
    assert page.read_text().count('src="data:image/png;base64,') == 3
    assert "Grad-CAM" in page.read_text()
    mixed = tmp_path / "mixed.html"
    predict(finished / "picsr", site="s2a", split="test", html=mixed)
    assert "The router&#39;s share of each site&#39;s expert" in mixed.read_text()


@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_fits_a_window_and_loads_nothing(width: int, page: str, tables: Path) -> None:
    with chromium() as browser:
        shown, told = opened(browser, tables / "cases.html", width)
        assert told == []
        assert shown.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "a.html").touch()
    with pytest.raises(SettingError, match=r"a\.html already exists"):
        check_outputs(None, tmp_path / "a.html")
