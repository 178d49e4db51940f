"""Whether a case is like the training samples: what is marked, refused, held back, and said."""

import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsilo import predict
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.tables.heart import HEART
from fedsilo.datasets.tables.schema import Column
from fedsilo.inference.predict.case_novelty import CaseNovelty, Reference
from fedsilo.inference.predict.inputs import CaseSource, open_inputs
from fedsilo.inference.predict.novelty_reference import reference_of
from fedsilo.inference.predict.prediction import predict_inputs
from fedsilo.runs.finished_run import FinishedRun
from tests.fedsilo.inference.predict.test_data_sets import run_of
from tests.support.data_folders import write_images

SCHEMA = HEART.schema(None)  # type: ignore[arg-type]
USUAL = {"age": "55", "sex": "1", "cp": "4", "trestbps": "130", "chol": "240", "fbs": "0"}
USUAL |= {"restecg": "0", "thalach": "140", "exang": "0", "oldpeak": "1.0"}


@pytest.fixture(scope="module")
def hearts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hearts")
    run_of("heart-synthetic", folder, "", **{"split.val-folds": 5})
    return folder / "heart-synthetic"


def odd_values(column: Column) -> st.SearchStrategy[str]:
    """Return values that the schema makes odd: impossible, far from its mean, between 0 and 1."""
    if column.kind == "categorical":
        return st.sampled_from(["", "17", "none", "-1"])
    assert column.mean is not None
    assert column.std is not None
    low, high = column.range
    wrong = [st.sampled_from(["", "?", "high", "nan", "1e99", "12_0"])]
    wrong.append(st.floats(high, 1e6, exclude_min=True).map(repr))
    wrong.append(st.floats(-1e6, low, exclude_max=True).map(repr))
    for start, end in ((column.mean + 6 * column.std, high), (low, column.mean - 6 * column.std)):
        if start < end:
            wrong.append(st.floats(start, end).map(repr))
    if (low, high) == (0.0, 1.0):
        wrong.append(st.floats(0.2, 0.8).map(repr))
    return st.one_of(wrong)


@st.composite
def odd_patients(draw: st.DrawFn) -> dict[str, str]:
    column = draw(st.sampled_from([c for c in SCHEMA.columns if c.kind != "ignored"]))
    return USUAL | {column.name: draw(odd_values(column))}


def test_the_limit_of_few_held_out_samples_is_not_said_to_be_sure(hearts: Path) -> None:
    reference = reference_of(FinishedRun.open(hearts).model(), None)
    assert isinstance(reference, Reference)
    sure, few = (" ".join(replace(reference, held_out=held).lines()) for held in (45, 44))
    assert "on 45 val samples: nine times in ten at most 5% of such samples are beyond it" in sure
    assert "highest score of 44 val samples: on average 2.2% of such samples are beyond it" in few


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(odd_patients(), min_size=50, max_size=50))
def test_fifty_odd_patients_are_each_refused_or_marked_and_none_is_answered(
    hearts: Path, tmp_path: Path, odd: list[dict[str, str]]
) -> None:
    model = FinishedRun.open(hearts).model()
    reference = reference_of(model, None)
    with (tmp_path / "odd.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*USUAL])
        writer.writeheader()
        writer.writerows([USUAL, *odd])
    source = CaseSource("table", tmp_path / "odd.csv")
    frame = predict_inputs(model, open_inputs(model, source), reference=reference).frame()
    assert not frame["unusual"][0], "a usual patient"
    assert frame["predicted"][0] in model.classes
    rest = frame.iloc[1:]
    assert (rest["fault"].notna() | (rest["unusual"].fillna("") != "")).all()
    assert rest[["predicted", "p.healthy", "p.disease"]].isna().all(axis=None)


def test_a_patient_of_250_years_has_no_answer_whatever_is_asked_for(
    hearts: Path, tmp_path: Path
) -> None:
    row = ",".join((USUAL | {"age": "250", "trestbps": "9999"}).values())
    (tmp_path / "new.csv").write_text(f"{','.join(USUAL)}\n{row}\n{','.join(USUAL.values())}\n")
    found = predict(hearts, table=tmp_path / "new.csv", answer_all=True).frame()
    assert found["predicted"].isna().tolist() == [True, False]
    assert "column 'age': 250 is impossible" in found["fault"][0]
    assert "column 'trestbps': 9999 is impossible" in found["fault"][0]


def test_an_unusual_case_is_answered_and_still_marked_if_all_are_asked_for(
    hearts: Path, tmp_path: Path
) -> None:
    row = ",".join((USUAL | {"age": "119"}).values())
    (tmp_path / "new.csv").write_text(f"{','.join(USUAL)}\n{row}\n")
    held, answered = (
        predict(hearts, table=tmp_path / "new.csv", answer_all=answer) for answer in (False, True)
    )
    assert held.frame()["predicted"].isna().all()
    assert held.document["novelty"]["not answered"] == 1
    assert (
        "1 unlike the training samples, so not answered (to answer: --answer-all)"
        in held.lines()[1]
    )
    assert answered.frame()["predicted"].notna().all()
    assert "beyond the training values: age" in answered.frame()["unusual"][0]
    assert answered.frame()["novelty"][0] > 1


def test_a_value_between_a_code_and_all_measured_values_has_no_answer(
    hearts: Path, tmp_path: Path
) -> None:
    """Switzerland's cholesterol is 0 in every row, the lowest other one 100, the range from 50."""
    page, table = tmp_path / "cases.html", tmp_path / "new.csv"
    rows = [",".join((USUAL | {"chol": chol}).values()) for chol in ("240", "0", "6.1", "60")]
    table.write_text("\n".join([",".join(USUAL), *rows]) + "\n")
    frame = predict(hearts, table=table, html=page).frame()
    assert frame["predicted"].isna().tolist() == [False, True, True, True]
    assert frame["fault"].notna().tolist() == [False, True, True, False]
    assert frame["unusual"][3] == "beyond the training values: chol"
    assert frame["novelty"][3] > 1
    states = re.findall('class="case ([a-z]+)"', page.read_text())
    assert states[:3] == ["refused", "refused", "unusual"]


def test_a_code_is_answered_and_marked(hearts: Path) -> None:
    run = FinishedRun.open(hearts)
    reference = reference_of(run.model(), None)
    model = run.model("switzerland")
    found = predict_inputs(
        model, open_inputs(model, CaseSource("split", "test")), reference=reference
    )
    frame = found.frame()
    usual = frame[frame["unusual"] == ""]
    assert len(usual) > 5
    assert usual["predicted"].notna().all()
    assert usual["doubtful"].str.contains("may mean 'not measured'.*: chol").all()
    assert found.document["novelty"]["doubtful"] == len(usual)


def test_a_site_of_codes_only_and_without_a_limit_marks_a_measured_value(
    hearts: Path, tmp_path: Path
) -> None:
    table = tmp_path / "new.csv"
    table.write_text("\n".join([",".join(USUAL), ",".join(USUAL.values())]) + "\n")
    found = predict(hearts, table=table, site="switzerland")
    assert isinstance(found.novelty, CaseNovelty)
    assert found.novelty.reference.limit is None
    assert "beyond the training values: chol" in found.frame()["doubtful"][0]


def test_which_cases_are_unusual_is_computed_once_for_all_of_them(
    hearts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each case again, a table of 80,000 rows would take minutes."""
    found = predict(hearts, split="test")
    assert isinstance(found.novelty, CaseNovelty)
    calls, unusual = list[CaseNovelty](), CaseNovelty.unusual

    def counted(self: CaseNovelty) -> Any:
        calls.append(self)
        return unusual(self)

    monkeypatch.setattr(CaseNovelty, "unusual", counted)
    assert len(found.novelty.reasons(found.features)) > 1
    assert len(calls) == 1


def test_of_the_samples_that_set_the_limit_at_most_5_percent_are_beyond_it_and_all_are_answered(
    hearts: Path,
) -> None:
    reference = reference_of(FinishedRun.open(hearts).model(), None)
    assert isinstance(reference, Reference)
    assert reference.split == "val"
    marked, total = 0, 0
    for site in reference.sites:
        model = FinishedRun.open(hearts).model(site)
        found = predict_inputs(
            model, open_inputs(model, CaseSource("split", "val")), reference=reference
        )
        frame = found.frame()
        marked, total = marked + (frame["unusual"] != "").sum(), total + len(frame)
        assert frame["predicted"].notna().all()
    assert total == reference.held_out
    assert marked <= 0.05 * total


def test_images_unlike_the_training_images_are_held_back(tmp_path: Path) -> None:
    import numpy as np
    from PIL import Image

    data = write_images(tmp_path / "data", "images.yaml", count=60)
    run = run_of(
        "images", tmp_path / "runs", str(data), **{"split.test-folds": 3, "train.local-steps": 20}
    )
    new = tmp_path / "new"
    new.mkdir()
    for number, pixels in enumerate((np.zeros((40, 36)), np.indices((40, 36)).sum(0) % 2 * 255)):
        Image.fromarray(pixels.astype(np.uint8)).save(new / f"{number}.png")
    found = predict(run.path, images=new)
    assert isinstance(found.novelty.reference, Reference)  # type: ignore[union-attr]
    assert found.novelty.reference.split == "test"  # type: ignore[union-attr]
    assert found.frame()["unusual"].tolist() == ["unlike any training sample"] * 2


@pytest.mark.parametrize(
    ("values", "site", "told"),
    [
        ({"trust": "nobody", "standardise": "declared"}, "va", "for trust nobody, keeps nothing"),
        ({}, "va", "for trust server, keeps of theirs only the mean and standard deviation"),
        ({}, None, ""),
    ],
)
def test_what_is_not_known_of_other_sites_is_said(
    values: dict[str, Value], site: str | None, told: str, tmp_path: Path
) -> None:
    private = {"privacy.sample-clip-norm": 1.0, "privacy.noise-multiplier": 2.0} if values else {}
    run = run_of("heart-synthetic", tmp_path, "", **(values | private))
    found = predict(run.path, site=site, split="test")
    assert told in "\n".join(found.lines())
    assert ("not known here" in "\n".join(found.lines())) == bool(told)


def test_a_mixture_of_networks_says_that_novelty_of_images_is_not_known(finished: Path) -> None:
    found = predict(finished / "picsr", site="s2a", split="test")
    assert "mixes" in found.document["novelty"]["not known"]
    assert "is unknown: this model mixes" in "\n".join(found.lines())
