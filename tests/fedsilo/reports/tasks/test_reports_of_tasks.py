"""Reports on each task, of runs whose numbers are all made by hand."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fedsilo.pages.page import NONE
from fedsilo.reports.tasks import multilabel, regression, segmentation, survival
from fedsilo.reports.tasks.shared import limit_of
from tests.support.run_files import summary

FINDINGS = {"finding.0.count": 10.0, "finding.0.auc": 0.9}
BINS = {"outcome.5.count": 12.0, "outcome.5.predicted": 20.5, "outcome.5.observed": 21.0}
CURVE = {f"survival.0.{part}": value for part, value in {"time": 5.0, "share": 0.8}.items()}
CURVE |= {"survival.0.low": 0.7, "survival.0.high": 0.9, "survival.0.followed": 20.0}


def _run(metrics: dict[str, dict[str, float]] | None = None, **changes: Any) -> Any:
    """Return a run of two hospitals with these test metrics; ``mean`` are those of all."""
    mean = changes.pop("mean", {})
    return SimpleNamespace(
        name="hearts",
        summary=summary(dataset=changes.pop("dataset", "table"), mean=mean, sites={"north": {}}),
        silos={"north": {"sizes": {"test": 40}}, "south": {"sizes": {"test": None}}},
        trust=changes.pop("trust", "server"),
        floor=10,
        class_names=lambda: changes.get("names", ["nodule", "mass"]),
        noun=lambda count: "patients",
        last_metrics=lambda split: metrics or {"north": {}, "south": {}},
    )


MODULES = [multilabel, regression, segmentation, survival]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("site", [None, "north"])
def test_a_run_without_numbers_to_show_says_so(module: ModuleType, site: str | None) -> None:
    run = _run()
    assert module.result(run, site).startswith("No ")
    for section in module.sections(run):
        assert not section.tables
        assert not section.picture
        assert section.sentences
    assert module.meaning(run)


@pytest.mark.parametrize("module", MODULES)
def test_the_limit_is_the_data_the_trust_or_the_hospitals(module: ModuleType) -> None:
    limits = [
        module.limit(_run(dataset="heart-synthetic"), None),
        module.limit(_run(dataset="table", trust="sums"), None),
        module.limit(_run(dataset="table"), None),
    ]
    assert len(set(limits)) == 3
    assert "'trust: sums'" in limits[1]
    assert limits[2] == limit_of(_run(), "")


@pytest.mark.parametrize(
    ("module", "mean", "numbers"),
    [
        (multilabel, {"auc": 0.8765}, ("0.876", "2 findings")),
        (regression, {"mae": 2.5, "r2": 0.25}, ("2.5", "0.25")),
        (regression, {"mae": 2.5}, ("2.5",)),
        (segmentation, {"dice": 0.75}, ("0.750", "mass")),
        (survival, {"c-index": 0.7}, ("0.70", "70 %")),
    ],
)
def test_the_result_is_one_sentence_with_its_numbers(
    module: ModuleType, mean: dict[str, float], numbers: tuple[str, ...]
) -> None:
    said = module.result(_run(mean=mean), None)
    assert all(number in said for number in (*numbers, "2 hospitals"))


def test_a_finding_is_shown_where_enough_have_it_and_lack_it() -> None:
    metrics = {"north": FINDINGS, "south": FINDINGS | {"finding.1.count": 11.0}}
    (section,) = multilabel.sections(_run(metrics))
    north, south = section.tables
    assert north.rows[0][:2] == ["nodule", "10"]
    assert "(" in north.rows[0][2], "an interval, because the others are known"
    assert south.rows[0][2] == "0.900"
    assert section.picture
    assert "nodule, north: 0.90" in section.picture.alt
    left_out = " ".join(section.sentences)
    assert "mass at north, mass at south" in left_out


def test_errors_and_calibration_have_a_row_of_each_site_and_group() -> None:
    metrics = {"north": {"mae": 2.5, "rmse": 3.0, **BINS}, "south": {"mae": 1.5}}
    errors, calibration = regression.sections(_run(metrics, names=["days"]))
    assert errors.tables[0].rows == [["north", "2.50", "3.00"], ["south", "1.50", NONE]]
    assert calibration.tables[0].rows == [["20.5", "21.0", "12"]]
    assert calibration.picture


def test_masks_have_a_table_by_site_and_one_by_class() -> None:
    metrics = {"north": {"dice": 0.75, "hausdorff-95": 3.25, "class.1.iou": 0.5}, "south": {}}
    (section,) = segmentation.sections(_run(metrics))
    by_site, by_class = section.tables
    assert by_site.rows == [["north", "0.750", NONE, NONE, "3.2"]]
    assert by_class.rows == [["mass", "north", NONE, "0.500", NONE, NONE]]
    (section,) = segmentation.sections(_run({"north": {"dice": 0.75}}))
    assert len(section.tables) == 1


def test_curves_are_shown_only_if_the_server_may_have_them() -> None:
    metrics = {"north": {"c-index": 0.7, **CURVE}, "south": {"brier": 0.2}}
    order, curves = survival.sections(_run(metrics))
    assert order.tables[0].rows == [["north", "0.700", NONE], ["south", NONE, "0.200"]]
    assert curves.tables[0].rows[0][::2] == ["5", "20"]
    assert curves.picture
    assert "north: 0.80 at 5" in curves.picture.alt
    _, hidden = survival.sections(_run(metrics, trust="sums"))
    assert not hidden.tables
