"""What a row took, by hand, and which rows are on unequal terms."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedsilo.comparison.budgets import Budget, Budgets, budget_of, tuned_over
from fedsilo.core.errors import SettingError
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory, config_document
from tests.support.run_files import SUMMARY, summary
from tests.support.setting_keys import as_keys

GIVEN = {"rounds": 4, "network.name": "conv", "train.local-steps": 9}
EQUAL = Budget("digits", GIVEN, 3, (4, 4), 100.0, 1600.0)


def _unlike(**changes: Any) -> list[str]:
    other = Budget(**(vars(EQUAL) | changes))
    return Budgets({"a": EQUAL, "b": other}).unlike().get("b", [])


def _given(**settings: Any) -> Budget:
    values = as_keys(settings)
    return budget_of(resolve({"method": "fedavg"} | values))


def test_budget_takes_means_over_seeds_of_sums_over_sites(tmp_path: Path) -> None:
    runs = []
    for seed, steps in enumerate(([3, 5], [4, 6])):
        run = FinishedRun(tmp_path / f"{seed}")
        run.path.mkdir()
        rows = [f"1,train,{site},9,9,0.5,{n},{10 * n}" for site, n in zip("ab", steps, strict=True)]
        header = "round,phase,site,bytes_down,bytes_up,seconds,steps,samples"
        (run.path / "traffic.csv").write_text("\n".join([header, *rows]) + "\n")
        sent = {"down": 10 + seed, "up": 20}
        seconds = SUMMARY["seconds"] | {"total": 2.0 * seed}
        RunDirectory(run.path).write_json(
            "summary.json", summary(rounds=2 + seed, bytes=sent, seconds=seconds)
        )
        runs.append(run)
    taken = Budget("digits", GIVEN).with_costs(runs)
    assert (taken.steps, taken.samples) == (9.0, 90.0)  # 8 and 10
    assert (taken.down, taken.up, taken.seconds) == (10.5, 20.0, 1.0)
    assert taken.rounds_text() == "2 to 3 of 4"
    assert taken.cells() == ["2 to 3 of 4", "9", "90", "10 B", "20 B", "1.0 s", "-"]


def test_rows_of_an_earlier_version_took_steps_that_nobody_told(tmp_path: Path) -> None:
    (tmp_path / "traffic.csv").write_text(
        "round,phase,site,bytes_down,bytes_up,seconds\n1,train,a,9,9,0.5\n"
    )
    (tmp_path / "summary.json").write_text(json.dumps(summary(rounds=4)))
    old = Budget("digits", GIVEN, 3).with_costs([FinishedRun(tmp_path)] * 2)
    assert old.cells()[1:3] == ["unknown", "unknown"]
    assert Budgets({"a": EQUAL, "b": old}).unlike() == {}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"rounds": (2, 4)}, ["2 to 4 of 4 rounds, not 4 of 4"]),
        ({"given": GIVEN | {"rounds": 5}}, ["rounds 5, not 4"]),
        ({"given": GIVEN | {"train.local-steps": 5}}, []),
        ({"given": GIVEN | {"train.local-steps": 5}, "steps": 0}, ["train.local-steps 5, not 9"]),
        (
            {"given": GIVEN | {"network.name": "vit", "vit.backbone": ""}},
            ["network.name vit, not conv"],
        ),
        ({"trials": 0}, ["tuned over 0 points, not 3"]),
        ({"steps": 109.0}, []),
        ({"steps": 50.0, "samples": 3200.0}, ["0.5 times the steps", "2 times the samples"]),
        ({"dataset": "mnist", "trials": 9}, []),
    ],
)
def test_rows_are_unlike_in_what_was_given_and_taken(
    changes: dict[str, Any], told: list[str]
) -> None:
    assert _unlike(**changes) == told


def test_what_a_row_is_given_leaves_out_what_means_nothing() -> None:
    assert [*_given(local_epochs=1).differences(_given(local_epochs=2))] == [
        "train.local-epochs 1, not 2"
    ]
    steps = _given(local_steps=5, local_epochs=1)
    assert [*steps.differences(_given(local_steps=5, local_epochs=2))] == []
    paced = _given(epoch_steps=40, pace=10)
    assert [*paced.differences(_given(epoch_steps=40, pace=20))] == ["train.pace 10, not 20"]
    assert [*_given(width=8).differences(_given())] == ["network.width 8, not 16"]
    weights = _given(initial_weights="timm:vgg16_bn")
    assert [*_given().differences(weights)] == ["train.initial-weights unset, not timm:vgg16_bn"]
    tuned = _given(learning_rate=0.1, dropout=0.5)
    assert [*tuned.differences(_given())] == [], "what is tuned is no budget"


def test_refusal_names_both_rows_and_all_in_what_they_differ() -> None:
    other = Budget("digits", GIVEN | {"rounds": 2}, 0, (2, 2), 50.0, 1600.0)
    with pytest.raises(
        SettingError,
        match=r"'b' has another budget than 'a': rounds 2, not 4; tuned over 0 points, not 3; "
        "0.5 times the steps; do this",
    ):
        Budgets({"a": EQUAL, "b": other}).refuse_unequal("do this")
    Budgets({"a": EQUAL, "c": EQUAL}).refuse_unequal("do this")


def test_points_of_a_search_count_where_its_choice_is_what_runs(tmp_path: Path) -> None:
    settings = resolve({"run.out": str(tmp_path), "train.learning-rate": 0.01})
    assert tuned_over(settings, "x") == 0
    folder = tmp_path / "tune-x"
    folder.mkdir()
    for chosen, points in ((0.01, 16), (0.1, 0)):
        document = {"chosen": {"train.learning-rate": chosen}, "budget": {"trials": 16}}
        (folder / "chosen.json").write_text(json.dumps(document))
        assert tuned_over(settings, "x") == points
    (folder / "chosen.json").write_text("{")
    assert tuned_over(settings, "x") == 0


def test_config_document_of_a_row_is_what_a_budget_reads(tmp_path: Path) -> None:
    settings = resolve({"method": "fedavg", "rounds": 3})
    (tmp_path / "config.toml").write_text(config_document(settings, {}))
    assert budget_of(FinishedRun(tmp_path).settings) == budget_of(settings)
