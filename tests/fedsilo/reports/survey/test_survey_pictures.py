"""The survey's pictures: the schema's order, features as such, and gaps unlike zeros."""

import re
from typing import Any

from fedsilo.core.survey import MeasuredFeature, Survey
from fedsilo.reports.survey.document import Between, ColumnTitle, SurveyDocument, cell_names
from fedsilo.reports.survey.survey_pictures import feature_pictures

AGE = {"name": "age", "edges": [50.0]}
SEX = {"name": "sex", "edges": [0.5]}
PAIN = {"name": "pain", "levels": ["none", "typical"]}


def _answer(counts: dict[str, list[int | None]]) -> Survey:
    about = {
        "site": "s",
        "dataset": "d",
        "on": "2026-11-25",
        "floor": 10,
        "simulated": True,
        "classes": ["a", "b"],
        "features": [AGE, SEX, PAIN],
    }
    parts = {"about": about, "samples": {"train": 100}, "histograms": {"train": counts}}
    return Survey.model_validate(parts)


def _document(answers: dict[str, Survey], columns: dict[str, Any] | None = None) -> SurveyDocument:
    return SurveyDocument.model_construct(sites=answers, columns=columns or {})


def test_cell_names_of_a_binary_a_category_and_a_number() -> None:
    names = [cell_names(MeasuredFeature.model_validate(one)) for one in (SEX, PAIN, AGE)]
    assert names == [["0 (no)", "1 (yes)"], ["none", "typical"], ["below 50", "from 50"]]


def test_feature_pictures_are_in_the_schemas_order_whatever_differs_most() -> None:
    answers = {s: _answer({f["name"]: [40, 60] for f in (AGE, SEX, PAIN)}) for s in "ab"}
    far = [Between(sites=("a", "b"), distance=0.9, feature="pain")]
    captions = [picture.caption for picture in feature_pictures(_document(answers), far)]
    assert [caption.split(":")[0] for caption in captions] == ["age", "sex", "pain"]
    assert "yes or no" in captions[1]
    assert "yes or no" not in captions[0] + captions[2]


def test_suppressed_bar_is_hatched_with_a_question_mark_and_a_zero_is_not() -> None:
    (zero,) = feature_pictures(_document({"a": _answer({"age": [0, 100]})}), [])
    assert feature_pictures(_document({"a": _answer({"age": [None, None]})}), []) == []
    two = {"a": _answer({"age": [0, 100]}), "b": _answer({"age": [None, 80]})}
    (mixed,) = feature_pictures(_document(two), [])
    marks = [len(re.findall(r">\?</text>|<!-- \? -->", one.svg)) for one in (zero, mixed)]
    assert marks[0] == 0
    assert marks[1] > 0
    assert "suppressed" in mixed.svg
    assert "suppressed" not in zero.svg


def test_pictures_have_the_titles_and_names_of_levels_of_the_servers_schema() -> None:
    words = {
        "pain": ColumnTitle(title="chest pain (pain)", levels={"none": "no pain (none)"}),
        "age": ColumnTitle(title="age (years)"),
    }
    document = _document({"a": _answer({"age": [40, 60], "pain": [40, 60]})}, words)
    age, pain = feature_pictures(document, [])
    assert age.caption.startswith("age (years): share")
    assert pain.caption.startswith("chest pain (pain): share")
    assert document.cell_titles(MeasuredFeature.model_validate(PAIN)) == [
        "no pain (none)",
        "typical",
    ]
    assert document.title("sex") == "sex", "a column without words keeps its name"
