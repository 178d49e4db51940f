import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsilo
import fedsilo.engines.inline_engine
from fedsilo.core.errors import FedsiloError, FitError
from fedsilo.datasets.registry import load_silo
from fedsilo.models.maths.glm import fit_alone
from fedsilo.server_app.config.settings import resolve
from tests.support.dying_grid import DyingGrid

SITES = ("north", "south", "west")
SCHEMA = """
columns:
  - {name: a, mean: 50.0, std: 10.0}
  - {name: b, mean: 0.0, std: 1.0}
  - {name: n, mean: 2.0, std: 2.0}
  - {name: kind, kind: categorical, levels: [x, y, z]}
label: {column: ill, classes: {well: [0], sick: [1]}}
missing: [NA]
policy: impute
sites: {north: north.csv, south: south.csv, west: west.csv}
"""
Rows = dict[str, np.ndarray[Any, Any]]


def rows_of(site: str, count: int = 80) -> Rows:
    rng = np.random.default_rng(SITES.index(site))
    a, b = rng.normal(50, 10, count).round(2), rng.normal(size=count).round(3)
    kind = rng.choice(list("xyz"), count)
    ill = rng.random(count) < 1 / (1 + np.exp(-(0.05 * (a - 50) + b)))
    return {"a": a, "b": b, "n": rng.poisson(np.exp(0.4 * b)), "kind": kind, "ill": ill.astype(int)}


def write(folder: Path, changes: Mapping[str, Rows] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schema.yaml").write_text(SCHEMA)
    for site in SITES:
        rows = rows_of(site) | (changes or {}).get(site, {})
        lines = [
            ",".join(rows),
            *(",".join(map(str, row)) for row in zip(*rows.values(), strict=True)),
        ]
        (folder / f"{site}.csv").write_text("\n".join(lines) + "\n")
    return folder


def fitted(folder: Path, family: str = "logistic", **options: Any) -> Any:
    settings = {"data.dir": str(folder), **options.pop("settings", {})}
    return fedsilo.fit(family, dataset="table", settings=settings, out=folder / "runs", **options)


def pooled(folder: Path, family: str, names: list[str], outcome: str) -> tuple[Any, Any]:
    """Return coefficients and standard errors of all rows together, by float64 in own units."""
    common = resolve({"dataset": "table", "data.dir": str(folder), "method": "fedavg"}).common
    columns, outcomes = [], []
    for site in SITES:
        silo = load_silo(site, common)
        rows = np.concatenate([s.inputs.double().numpy() for s in silo.splits().values()])
        labels = np.concatenate([s.labels.double().numpy() for s in silo.splits().values()])
        columns.append(rows[:, [silo.features.index(name) for name in names]])
        outcomes.append(rows[:, silo.features.index(outcome)] if outcome else labels)
    x, y = np.concatenate(columns), np.concatenate(outcomes)
    # In standard units, where no coefficient is large, and then back
    means, deviations = x.mean(axis=0), x.std(axis=0)
    design = np.column_stack([np.ones(len(x)), (x - means) / deviations])
    beta, covariance = fit_alone(family, design, y)
    back = np.diag(np.concatenate([[1.0], 1 / deviations]))
    back[0, 1:] = -means / deviations
    return back @ beta, np.sqrt(np.diag(back @ covariance @ back.T))


@pytest.mark.parametrize(
    ("family", "outcome", "trust"),
    [
        ("logistic", "", "sums"),
        ("linear", "a", "sums"),
        ("poisson", "n", "server"),
    ],
)
def test_a_fit_over_hospitals_is_that_of_pooled_data(tmp_path, family, outcome, trust):
    folder = write(tmp_path)
    columns = "b,kind" if outcome else "a,b,kind"
    result = fitted(folder, family, outcome=outcome, columns=columns, trust=trust)
    rows = result.coefficients
    beta, errors = pooled(folder, family, [row["name"] for row in rows[1:]], outcome)
    np.testing.assert_allclose([row["estimate"] for row in rows], beta, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose([row["standard-error"] for row in rows], errors, rtol=1e-6)
    assert result.document["patients"] == 240
    assert ("heterogeneity" in result.document) == (trust == "server")


def test_results_have_every_hospital_and_can_be_written(tmp_path):
    result = fitted(write(tmp_path), columns="a,b")
    own = {row["name"]: row for row in result.document["heterogeneity"]}
    assert sorted(own["b"]["sites"]) == sorted(SITES)
    # A fixed effect lies among those of the hospitals
    estimates = [site["estimate"] for site in own["b"]["sites"].values()]
    assert min(estimates) < own["b"]["fixed"] < max(estimates)
    result.write(tmp_path / "fit.csv", tmp_path / "fit.tex")
    assert len((tmp_path / "fit.csv").read_text().splitlines()) == 1 + 3 + 2 * 3
    assert r"\toprule" in (tmp_path / "fit.tex").read_text()


def _same(value: Any) -> Any:
    return {site: {"b": np.full(80, value)} for site in SITES}


@pytest.mark.parametrize(
    ("changes", "trust"),
    [
        (_same(3.25), "server"),
        (_same(3.25), "sums"),
        ({site: {"b": (rows_of(site)["a"] - 50) / 8} for site in SITES}, "server"),
        (
            {site: {"b": rows_of(site)["ill"] * 2.0 - rows_of(site)["a"] / 100} for site in SITES},
            "server",
        ),
    ],
    ids=["constant", "constant, sums", "collinear", "separated"],
)
def test_columns_without_a_coefficient_leave_no_half_fit(tmp_path, changes, trust):
    floor = {"privacy.sums-min-count": 1}
    with pytest.raises(FitError, match="b"):
        fitted(write(tmp_path, changes), columns="a,b", trust=trust, settings=floor)
    assert not list(tmp_path.rglob("fit.json"))


def test_an_outcome_of_one_class_at_all_hospitals_is_refused(tmp_path):
    changes = {site: {"ill": np.zeros(80, int)} for site in SITES}
    with pytest.raises(FedsiloError):
        fitted(write(tmp_path, changes), columns="a,b")
    assert not list(tmp_path.rglob("fit.json"))


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"west": {"n": np.arange(80) - 3}}, {"family": "poisson", "outcome": "n"}),
        ({"west": {"kind": np.array(["x"] * 77 + ["y"] * 3)}}, {"columns": "kind"}),
        ({}, {"outcome": "a"}),
        ({}, {"columns": "a,aa"}),
        ({}, {"family": "linear"}),
    ],
    ids=["negative count", "small category", "no class", "unknown column", "label"],
)
def test_outcomes_and_columns_that_do_not_suit_are_refused(tmp_path, changes, options):
    with pytest.raises(FedsiloError):
        fitted(write(tmp_path, changes), **options)
    assert not list(tmp_path.rglob("fit.json"))


def test_missing_values_are_the_mean_or_leave_the_patient_out(tmp_path):
    values = rows_of("north")["b"].astype(object)
    values[:12] = "NA"
    folder = write(tmp_path, {"north": {"b": values}})
    kept = fitted(folder, columns="a,b")
    dropped = fitted(folder, columns="a,b", settings={"glm.missing": "drop"})
    assert (kept.document["patients"], dropped.document["patients"]) == (240, 228)


def test_columns_of_very_different_sizes_are_fitted_at_sums(tmp_path):
    changes = {}
    for site in SITES:
        rows = rows_of(site)
        changes[site] = {"a": rows["a"] * 1e4, "b": rows["b"] / 100}
    folder = write(tmp_path, changes)
    rows = fitted(folder, columns="a,b", trust="sums").coefficients
    beta, errors = pooled(folder, "logistic", ["a", "b"], "")
    np.testing.assert_allclose([row["estimate"] for row in rows], beta, rtol=1e-6)
    np.testing.assert_allclose([row["standard-error"] for row in rows], errors, rtol=1e-6)


def test_few_incomplete_patients_cannot_be_found_by_another_fit(tmp_path):
    values = rows_of("north")["b"].astype(object)
    values[:2] = "NA"
    folder = write(tmp_path, {"north": {"b": values}})
    with pytest.raises(FedsiloError):
        fitted(folder, columns="a,b", settings={"glm.missing": "drop"})


def test_a_fit_at_sums_whose_server_dies_goes_on_with_the_proofs_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hospitals check the next question against a proof that the server has not forgotten."""
    whole = fitted(write(tmp_path / "whole"), columns="a,b", trust="sums").document
    with monkeypatch.context() as patch:
        patch.setattr(fedsilo.engines.inline_engine, "InlineGrid", DyingGrid)
        DyingGrid.lives = 3 + 3 * 15 + 14  # in round 4, with its sum unmasked at two of three sites
        with pytest.raises(KeyboardInterrupt):
            fitted(write(tmp_path / "cut"), columns="a,b", trust="sums", name="run")
    run = fedsilo.resume(tmp_path / "cut" / "runs" / "run")
    assert json.loads((run.path / "fit.json").read_text()) == whole


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_a_fit_with_too_few_rounds_says_so_in_whatever_step_it_ends(
    rounds: int, tmp_path: Path
) -> None:
    with pytest.raises(FitError, match=f"not converged in {rounds} rounds?: raise 'rounds'"):
        fitted(write(tmp_path), columns="a,b", settings={"rounds": rounds})


def test_a_fit_with_enough_rounds_ends_before_them(tmp_path: Path) -> None:
    fitted(write(tmp_path), columns="a,b", settings={"rounds": 12})
