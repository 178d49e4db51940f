"""Turns the options of ``fedsilo fit`` into settings, and runs a regression of simulated sites."""

from pathlib import Path

from fedsilo.core.arguments import RunSources
from fedsilo.core.settings_schema import Value
from fedsilo.engines.planning import plan_run, start
from fedsilo.server_app.records.run_directory import free_name


def run_regression(given: RunSources, name: str | None) -> Path:
    """Run the regression over simulated hospitals, and return the run directory."""
    overrides: dict[str, Value] = {}
    if name:
        overrides["run.name"] = name
    settings, resources = plan_run("glm", given, overrides=overrides, engine="inline")
    with free_name(settings) as named:
        return start(named, resources, "inline", None).path


def regression_changes(family: str, outcome: str, columns: str, trust: str) -> list[str]:
    """Return the settings of a regression, each ``key=value``, which --set may override."""
    changes = [
        f"glm.family={family}",
        f"glm.outcome={outcome}",
        f"glm.columns={columns}",
        "rounds=50",
        "server.evaluate-every=0",
    ]
    if trust == "sums":
        changes += [
            "privacy.trust=sums",
            "secure.aggregation=secagg",
            "secure.clip-norm=1",
            # Units come from sums too; this one needs no number from the hospitals
            "data.standardise=site",
        ]
    return changes
