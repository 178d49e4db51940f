"""Groups of patients and the decision curve: small groups are merged, numbers by hand."""

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fedsilo import report
from fedsilo.core.errors import SettingError
from fedsilo.datasets.registry import load_silo
from fedsilo.inference.monitor.examined import (
    Examined,
    Group,
    GroupColumn,
    _column,
    _pool_predictions,
    examine_decisions,
    group_patients,
    merge_small_groups,
    thresholds,
)
from fedsilo.runs.finished_run import FinishedRun
from tests.support.printed import printed_text

AGE = GroupColumn("age", [0], (), (40.0, 50.0, 60.0))


def _examined(ages: list[float], scores: list[float], ill: list[int], floor: int = 2) -> Examined:
    probability = torch.tensor(scores)
    return Examined(
        sites=["north"],
        classes=["healthy", "ill"],
        floor=floor,
        probabilities=torch.stack([1 - probability, probability], dim=1),
        labels=torch.tensor(ill),
        rows=torch.tensor(ages)[:, None],
    )


def test_groups_have_the_floor_of_each_class_and_small_ones_are_merged() -> None:
    ages = [30.0] * 4 + [45.0] * 2 + [55.0] * 4 + [70.0] * 1
    ill = [0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1]
    scores = [0.1, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1, 0.9, 0.1, 0.9, 0.9]
    young, old = group_patients(_examined(ages, scores, ill), AGE)
    assert (young.name, young.counts, young.right) == ("below 40", (2, 2), (1, 1))
    assert (old.name, old.counts, old.right) == ("from 40", (4, 3), (4, 3))


def test_an_empty_group_is_merged_as_a_small_one_is() -> None:
    ages, ill = [45.0] * 4 + [70.0] * 4, [0, 0, 1, 1] * 2
    young, old = group_patients(_examined(ages, [0.1, 0.9] * 4, ill), AGE)
    assert (young.name, old.name) == ("below 50", "from 50"), "nobody is below 40 or in the fifties"


def test_merged_groups_of_too_few_altogether_are_none() -> None:
    assert merge_small_groups([Group("a", (5, 1), (5, 0)), Group("b", (5, 0), (5, 0))], 2) == []
    assert [
        g.name
        for g in merge_small_groups([Group("1", (1, 3), (0, 0)), Group("2", (9, 9), (0, 0))], 2)
    ] == ["1 or 2"]


def test_ranges_that_merge_to_all_values_say_so() -> None:
    """They were called 'from below' beside the patients without a value."""
    small = [Group(name, (1, 1), (1, 1)) for name in ("below 40", "40 to 50", "from 50")]
    merged = merge_small_groups([*small, Group("not known", (3, 3), (3, 3))], 3)
    assert [group.name for group in merged] == ["any value", "not known"]


def test_group_of_several_classes_is_not_one_in_which_all_are_right() -> None:
    groups = [Group("a", (5, 5, 5), (5, 5, 5)), Group("b", (5, 5, 5), (2, 2, 2))]
    assert [group.name for group in merge_small_groups(groups, 10)] == ["a or b"]


def test_levels_of_a_category_are_their_own_groups() -> None:
    column = GroupColumn("cp", [0, 1], ("1", "2", "3"), ())
    rows = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    places, names = column.groups(rows)
    assert places.tolist() == [0, 1, 2]
    assert names == ["1", "2", "3"]


def test_thresholds_have_the_floor_of_patients_between_them() -> None:
    scores = torch.tensor([0.02, 0.04, 0.21, 0.22, 0.23, 0.51, 0.9, 0.91])
    assert list(thresholds(scores, 2)) == [0.05, 0.5], "nobody is between 0.25 and 0.5"
    assert list(thresholds(scores, 3)) == [0.5]


@pytest.mark.parametrize("floor", [2, 3, 5])
def test_thresholds_have_the_floor_of_patients_up_to_one_half_which_class_metrics_show(
    floor: int,
) -> None:
    scores = torch.linspace(0.01, 0.99, 50)
    edges = sorted({0.0, 0.5, *thresholds(scores, floor), 1.0})
    assert len(edges) > 5
    for low, high in pairwise(edges):
        assert int(((scores >= low) & (scores < high)).sum()) >= floor


def test_decisions_have_net_benefit_by_hand() -> None:
    ill = [0, 0, 1, 0, 1, 1, 1, 0]
    scores = [0.02, 0.04, 0.21, 0.22, 0.23, 0.51, 0.9, 0.91]
    (table,) = examine_decisions(_examined([50.0] * 8, scores, ill)).tables
    # From 0.05: 4 true, 2 false of 8, odds 1/19; from 0.5: 2 true, 1 false, odds 1
    assert list(table.rows[0]) == ["0.05", f"{4 / 8 - 2 / 8 / 19:.3f}", f"{4 / 8 - 4 / 8 / 19:.3f}"]
    assert list(table.rows[1]) == ["0.5", f"{2 / 8 - 1 / 8:.3f}", f"{4 / 8 - 4 / 8:.3f}"]


def test_clinic_report_has_groups_and_decisions_of_sites_without_small_classes(
    hearts: Path, tmp_path: Path
) -> None:
    run, out = hearts / "fedavg-seed0", tmp_path / "page.html"
    report([run], out, reader="clinic", by=["age", "sex", "cp"], decisions=True)
    html = out.read_text()
    for title in ("By age", "By sex", "By cp", "Benefit of acting on the model"):
        assert title in html
    assert "test patients of cleveland, hungary, va" in html
    assert "were not examined" not in html
    said = "It states how bad a miss is compared with a false alarm"
    assert said in printed_text(html), "not a letter a line"


def test_clinic_report_at_trust_nobody_says_that_no_group_is_shown(
    private: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(private, tmp_path / "run")
    config = run / "config.toml"
    config.write_text(config.read_text().replace('trust = "server"', 'trust = "nobody"'))
    out = tmp_path / "page.html"
    report([run], out, reader="clinic", by=["age"])
    assert "no metrics of patient groups leave a site" in out.read_text()
    assert "By age" not in out.read_text()


def test_unknown_column_is_refused_with_those_there_are(hearts: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"--by must be a column of the table \(age,"):
        report([hearts / "fedavg-seed0"], tmp_path / "p.html", reader="clinic", by=["weight"])
    with pytest.raises(SettingError, match="belong to a report '--for clinic'"):
        report([hearts / "fedavg-seed0"], tmp_path / "p.html", by=["age"])


def test_patients_without_the_value_are_a_group_of_their_own() -> None:
    nan = float("nan")
    ages, ill = [45.0] * 4 + [70.0] * 4 + [nan] * 4, [0, 0, 1, 1] * 3
    young, old, unknown = group_patients(_examined(ages, [0.1, 0.9] * 6, ill), AGE)
    assert (young.name, old.name, unknown.name) == ("below 50", "from 50", "not known")
    assert [group.counts for group in (young, old, unknown)] == [(2, 2)] * 3
    column = GroupColumn("cp", [0, 1], ("1", "2", "3"), ())
    places, names = column.groups(torch.tensor([[0.0, 1.0], [nan, nan], [0.0, 0.0]]))
    assert places.tolist() == [2, 3, 0]
    assert names == ["1", "2", "3", "not known"]


@pytest.mark.parametrize("name", ["age", "trestbps", "oldpeak"])
def test_patients_at_an_edge_are_in_the_group_that_begins_there(hearts: Path, name: str) -> None:
    run, site = FinishedRun.open(hearts / "fedavg-seed0").shown(), "cleveland"
    model = run.model(site)
    column = _column(model, name)
    places, _ = column.groups(_pool_predictions(run, [model]).rows)
    read = load_silo(site, run.settings.common).test.inputs[:, column.places[0]].tolist()
    assert set(column.edges) & set(read), "some patient is at an edge"
    assert places.tolist() == [sum(value >= edge for edge in column.edges) for value in read]
