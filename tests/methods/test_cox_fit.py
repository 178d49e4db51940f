"""Cox regressions over hospitals: results, and what each hospital refuses."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fedsilo
from fedsilo.client_app.methods.glm_patients import read_patients
from fedsilo.client_app.site.limits import Limits
from fedsilo.core.errors import FedsiloError, RefusedError, SettingError, SiteError
from fedsilo.datasets.registry import load_silo
from fedsilo.engines.regressions import RegressionModel, regression_changes
from fedsilo.models.maths.cox import FollowUp, cox_sums
from fedsilo.models.methods.glm import GLMSettings
from fedsilo.server_app.config.settings import resolve

SITES = ("north", "south", "west")
SCHEMA = """
columns:
  - {name: age, mean: 60.0, std: 10.0}
  - {name: dose, mean: 0.5, std: 0.5}
  - {name: months, mean: 20.0, std: 20.0}
label: {column: died, classes: {alive: [0], dead: [1]}}
policy: impute
sites: {north: north.csv, south: south.csv, west: west.csv}
"""
Columns = dict[str, Any]


def patients_of(site: str, count: int = 70) -> Columns:
    """Return patients whose hazard differs by hospital; months are whole, so events are tied."""
    rng = np.random.default_rng(SITES.index(site))
    age, dose = rng.normal(60, 10, count).round(1), rng.integers(0, 2, count)
    hazard = (0.03 + 0.03 * SITES.index(site)) * np.exp(0.04 * (age - 60) - 0.5 * dose)
    event, end = rng.exponential(1 / hazard), rng.uniform(5, 60, count)
    died = (event <= end).astype(int)
    return {"age": age, "dose": dose, "months": np.ceil(np.minimum(event, end)), "died": died}


def write(folder: Path, changes: Mapping[str, Columns] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schema.yaml").write_text(SCHEMA)
    for site in SITES:
        columns = patients_of(site) | (changes or {}).get(site, {})
        rows = [
            ",".join(columns),
            *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True)),
        ]
        (folder / f"{site}.csv").write_text("\n".join(rows) + "\n")
    return folder


def fitted(folder: Path, trust: str = "server", **options: Any) -> Any:
    given = {"time": "months", "columns": "age,dose", "dataset": "table", **options}
    out = folder / "runs"
    return fedsilo.fit("cox", trust=trust, settings={"data.dir": str(folder)}, out=out, **given)


def stratified(ties: str) -> tuple[Any, Any, float]:
    """Fit the stratified model by Newton in float64; return estimates, errors and likelihood."""
    beta, hospitals = np.zeros(2), []
    for site in SITES:
        columns = patients_of(site)
        x = np.column_stack([columns["age"] - 60, columns["dose"]])
        hospitals.append((x, FollowUp(columns["months"], columns["died"] * 1.0, ties)))
    for _ in range(15):
        sums = [cox_sums(*hospital, beta) for hospital in hospitals]
        hessian = sum(site.hessian for site in sums)
        beta = beta + np.linalg.solve(hessian, sum(site.gradient for site in sums))
    errors = np.sqrt(np.diag(np.linalg.inv(hessian)))
    return beta, errors, sum(site.objective for site in sums)


@pytest.mark.parametrize(("trust", "ties"), [("server", "efron"), ("sums", "breslow")])
def test_a_fit_over_hospitals_is_the_stratified_model(tmp_path, trust, ties):
    result = fitted(write(tmp_path), trust, ties=ties)
    beta, errors, likelihood = stratified(ties)
    rows = result.coefficients
    np.testing.assert_allclose([row["estimate"] for row in rows], beta, rtol=1e-6)
    np.testing.assert_allclose([row["standard-error"] for row in rows], errors, rtol=1e-6)
    document = result.document
    assert document["log-likelihood"] == pytest.approx(likelihood, abs=1e-6)
    events = sum(int(patients_of(site)["died"].sum()) for site in SITES)
    assert (document["patients"], document["events"]) == (210, events)
    assert result.ratio == "hazard ratio"
    assert ("heterogeneity" in document) == (trust == "server")


def read(folder: Path, floor: int = 10, **settings: Any) -> Any:
    """Read north's patients as a regression does."""
    common = resolve({"dataset": "table", "data.dir": str(folder), "method": "fedavg"}).common
    session = SimpleNamespace(
        silo=load_silo("north", common), settings=SimpleNamespace(sums_min_count=floor)
    )
    given = {"family": "cox", "time": "months", "columns": "age,dose", **settings}
    return read_patients(session, GLMSettings(**given))


def _with(name: str, places: slice, value: Any) -> dict[str, Columns]:
    values = patients_of("north")[name].astype(object)
    values[places] = value
    return {"north": {name: values}}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (_with("months", slice(0, 1), -3), SiteError),
        (_with("died", slice(0, 70), 0), RefusedError),
        (_with("died", slice(5, 70), 0), RefusedError),
        (_with("months", slice(0, 3), ""), RefusedError),
        (_with("age", slice(0, 1), ""), RefusedError),
    ],
    ids=["negative time", "no event", "few events", "few times missing", "one age missing"],
)
def test_a_hospital_refuses_times_and_events_that_cannot_be_used(tmp_path, changes, error):
    with pytest.raises(error):
        read(write(tmp_path, changes))


def test_patients_without_a_time_are_left_out_if_they_are_enough(tmp_path):
    folder = write(tmp_path, _with("months", slice(0, 12), ""))
    assert len(read(folder).outcome) == 58


def test_an_event_may_be_a_column_of_zeros_and_ones_only(tmp_path):
    folder = write(tmp_path)
    assert set(read(folder, outcome="dose", columns="age").outcome) == {0, 1}
    with pytest.raises(SiteError):
        read(folder, outcome="age", columns="dose")


@pytest.mark.parametrize(
    "options",
    [{"time": ""}, {"outcome": "dose"}, {"time": "month"}, {"columns": "age,months"}],
    ids=["no time", "an outcome", "an unknown column", "time explains itself"],
)
def test_options_that_contradict_each_other_are_refused(tmp_path, options):
    with pytest.raises(FedsiloError):
        fitted(write(tmp_path), **options)
    assert not list(tmp_path.rglob("fit.json"))


def test_only_a_cox_regression_has_a_time():
    with pytest.raises(SettingError):
        fedsilo.fit("logistic", dataset="heart-synthetic", time="age")


@pytest.mark.parametrize("trust", ["server", "sums"])
def test_a_regression_meets_the_default_rules_of_a_hospital(trust):
    model = RegressionModel("cox", time="months")
    texts = dict(change.split("=", 1) for change in regression_changes(model, trust))
    numbers = {"rounds": int(texts.pop("rounds")), "server.evaluate-every": 0}
    if trust == "sums":
        numbers["secure.clip-norm"] = float(texts.pop("secure.clip-norm"))
    common = resolve({"method": "glm", "dataset": "table", **texts, **numbers}).common
    Limits().refuse_settings(common)
