"""Regressions over hospitals, with standard errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Unpack

from fedsilo.api import options
from fedsilo.core.arguments import RunSources, Tell, silent

if TYPE_CHECKING:
    from fedsilo.reports.regression import Regression

Family = Literal["logistic", "linear", "poisson"]
Trusted = Literal["server", "sums"]


@options.command
def fit(
    family: Annotated[Family, "logistic (odds ratios), linear, or poisson (rate ratios)"],
    *,
    dataset: Annotated[str | None, "the table (default: the settings' own)"] = None,
    outcome: Annotated[str, "the column that is explained (default: the table's label)"] = "",
    columns: Annotated[str, "the columns that explain it, with commas between (default: all)"] = "",
    trust: Annotated[
        Trusted, "server: it sees each hospital's sums; sums: only those over all hospitals"
    ] = "server",
    deployment: options.OptionalDeployment = None,
    name: options.RunName = None,
    tell: Tell = silent,
    **sources: Unpack[options.Sources],
) -> Regression:
    """Fit a regression to the patients of all hospitals.

    Hospitals send sums of gradients and Hessians, so coefficients and standard errors are those of
    the pooled data.

    Returns:
        The regression: ``document`` has all numbers, ``coefficients`` a row per coefficient.

    Raises:
        FedsiloError: a setting or the data cannot be used; the patients determine no regression
            (FitError); or the run failed.
    """
    from fedsilo.reports.regression import Regression

    given = options.run_sources(sources)
    changes = _changes(family, dataset, outcome, columns, trust)
    given = replace(given, changes=(*changes, *given.changes))
    if deployment is not None:
        from fedsilo.deployment.deployed_run import run

        return Regression.read(run("glm", Path(deployment), given, tell, name=name))
    return Regression.read(_simulate(given, name))


def _simulate(given: RunSources, name: str | None) -> Path:
    """Run the regression over simulated hospitals, and return the run directory."""
    from fedsilo.engines.planning import plan_run, start
    from fedsilo.server_app.records.run_directory import free_name

    overrides = {"run.name": name} if name else {}
    settings, resources = plan_run("glm", given, overrides=overrides, engine="inline")
    with free_name(settings) as named:
        return start(named, resources, "inline", None).path


def _changes(family: str, dataset: str | None, outcome: str, columns: str, trust: str) -> list[str]:
    """Return the settings of a regression, each ``key=value``, which --set may override."""
    changes = [
        f"glm.family={family}",
        f"glm.outcome={outcome}",
        f"glm.columns={columns}",
        "rounds=50",
        "server.evaluate-every=0",
    ]
    if dataset is not None:
        changes.append(f"dataset={dataset}")
    if trust == "sums":
        changes += [
            "privacy.trust=sums",
            "secure.aggregation=secagg",
            "secure.clip-norm=1",
            # Units come from sums too; this one needs no number from the hospitals
            "data.standardise=site",
        ]
    return changes
