"""Turns the options of ``fedsilo fit`` into settings, and runs a regression of simulated sites."""

from dataclasses import dataclass
from pathlib import Path

from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import SettingError
from fedsilo.core.settings_schema import Value
from fedsilo.core.tasks import SURVIVAL
from fedsilo.engines.planning import plan_run, start
from fedsilo.server_app.records.run_directory import free_name


def run_regression(given: RunSources, name: str | None) -> Path:
    """Run a regression (the experiment ``glm``) over simulated hospitals, in this process.

    Args:
        given: the sources of settings that the command names. Its changes describe the regression,
            and come from ``regression_changes``.
        name: the run's name. If it is None or empty, the run has the name in the settings or a
            generated one. If there is a directory of that name, a number is appended, such as
            ``hearts-2``.

    Returns:
        The path of the run directory.

    Raises:
        FedsiloError: a setting is wrong, or the run failed.
    """
    overrides: dict[str, Value] = {}
    if name:
        overrides["run.name"] = name
    settings, resources = plan_run("glm", given, overrides=overrides, engine="inline")
    with free_name(settings) as named:
        return start(named, resources, "inline", None).path


@dataclass(frozen=True)
class RegressionModel:
    """The regression that ``fedsilo fit`` fits.

    Attributes:
        family: 'logistic', 'linear', 'poisson' or 'cox'.
        outcome: the column that is explained; empty for the table's label.
        columns: the columns that explain it, with commas between; empty for all others.
        time: the column with the time to the event, or empty for the label's; only for 'cox'.
        event: the column that says whether the event occurred; empty for the table's label; only
            for 'cox'.
        ties: how events at the same time count: 'efron' or 'breslow'; only for 'cox'.
    """

    family: str
    outcome: str = ""
    columns: str = ""
    time: str = ""
    event: str = ""
    ties: str = "efron"

    def check(self) -> None:
        """Check that the kind of regression matches the columns given: outcome, time and event.

        A Cox regression takes a time and an event, a time alone, or none of the columns. Every
        other kind takes only an outcome. Whether the columns exist is not checked.

        Raises:
            SettingError: the kind and the columns do not match.
        """
        if self.family == "cox" and (self.outcome or (self.event and not self.time)):
            raise SettingError(
                "a Cox regression explains the time to an event: name the two columns by --time "
                "and --event, or neither if the table's label is a time, and leave out --outcome"
            )
        if self.family != "cox" and (self.time or self.event):
            raise SettingError(
                f"a {self.family} regression has no --time and no --event: name its column by "
                "--outcome, or fit 'cox'"
            )


def regression_changes(model: RegressionModel, trust: str) -> list[str]:
    """Build the settings of a regression, each as ``key=value``.

    The settings name the columns and the kind of regression, and ask for 50 rounds and no
    evaluation. If a Cox regression names no time column, the setting 'task' is survival, and the
    table's label is the time.

    With trust 'sums', the server sees only sums over hospitals. The settings then ask for 19 rounds
    instead, secure aggregation with a clipping norm of 5, and standardisation by each site's own
    values.

    Args:
        model: the regression. For Cox, the column of the event becomes 'glm.outcome'.
        trust: 'server' or 'sums'.

    Raises:
        SettingError: the columns of the regression do not belong to its kind.
    """
    model.check()
    changes = [
        f"glm.family={model.family}",
        f"glm.outcome={model.outcome or model.event}",
        f"glm.columns={model.columns}",
        f"glm.time={model.time}",
        f"glm.ties={model.ties}",
        "server.evaluate-every=0",
        "rounds=50",
    ]
    if model.family == "cox" and not model.time:
        changes.append(f"task={SURVIVAL}")
    if trust == "sums":
        # Each round has five messages, of which hospitals answer fewer than 100 a run
        changes += [
            "rounds=19",
            "privacy.trust=sums",
            "secure.aggregation=secagg",
            # Hospitals expect this norm unless their site file says otherwise
            "secure.clip-norm=5",
            # Units come from sums too; this one needs no number from the hospitals
            "data.standardise=site",
        ]
    return changes
