"""The budget of each experiment in a comparison, and the differences between budgets.

A comparison is fair if all experiments get and use the same resources, so that only the method
makes a difference. An experiment gets rounds, a start (network and initial weights), and a number
of points that 'fedsilo tune' tried for its settings. It uses finished rounds, optimiser steps and
samples, summed over all sites and rounds, as the mean over seeds.

Every step counts, so a method that trains a second model (Ditto) or its neighbours' models (FedEFM)
uses more. Steps and samples may differ by a tenth, because a last batch may be smaller at one site
than in all sites' pooled data. Before a run, and if sites do not report their steps (private runs),
the settings of a round's training are compared instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pandas as pd

from fedsilo.comparison.tables import mean, seconds_text
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import SettingError
from fedsilo.core.files.text_files import file_fault
from fedsilo.core.settings.common_settings import NETWORK_KEYS, CommonSettings
from fedsilo.core.settings.removed import with_current_keys
from fedsilo.core.settings_schema import Value
from fedsilo.engines.experiments import declared_experiment
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records.progress import bytes_text
from fedsilo.server_app.records.run_directory import runs_folder

COLUMNS = (
    *("experiment", "rounds", "steps", "samples", "down", "up", "seconds", "tuned over"),
    "differs",
)
MARK = " *"  # follows the name of a row whose budget differs from the first row's
_TOLERANCE = 0.1  # relative difference of steps or samples that still counts as equal
_TRAINING = (
    "server.sites-per-round",
    "train.batch-size",
    "train.local-steps",
    "train.local-epochs",
    "train.epoch-steps",
    "train.pace",
)
# Settings of the network that do not belong to its start
_REGULARISERS = {"network.dropout", "network.gradient-checkpointing"}
_START = (
    *(key for key in NETWORK_KEYS if key not in _REGULARISERS),
    *("train.initial-weights", "vit.backbone-weights"),
)
# Exceptions from a damaged chosen.json, such as deeply nested lists or 1e999 trials
_DAMAGES = (
    *(RecursionError, OverflowError),
    *(OSError, ValueError, KeyError, TypeError, AttributeError),
)


@dataclass(frozen=True)
class Budget:
    """The resources of an experiment: what its settings give, and what its runs used on average."""

    dataset: str  # rows on other data are not compared
    # The settings of training and start, except any without effect
    given: Mapping[str, Value]
    trials: int = 0  # points tried to choose its settings; 0 if it was not tuned
    rounds: Sequence[int] = ()  # finished rounds of each seed
    # Sums over all sites, averaged over seeds; 0 if unknown
    steps: float = 0.0
    samples: float = 0.0
    # Bytes to all sites, and from them
    down: float = 0.0
    up: float = 0.0
    seconds: float = 0.0  # duration of a run, from the first message to the last

    def with_costs(self, runs: Sequence[FinishedRun]) -> Budget:
        """Return a copy of the budget with the costs of the experiment's finished runs.

        For each run, the optimiser steps, samples and bytes of all sites are summed, and the
        duration in seconds is taken. The copy has the mean of each of these costs over the runs.
        Its ``rounds`` is the list of the runs' numbers of finished rounds.

        Args:
            runs: the finished runs, one per seed, and at least one.
        """
        rounds: list[int] = []
        # A row of costs per run, in the order of the fields below
        costs: list[tuple[float, ...]] = []
        for run in runs:
            summary = run.summary
            rounds.append(int(summary["rounds"]))
            sent = summary["bytes"]
            work = (_sum(run, "steps"), _sum(run, "samples"))
            costs.append((*work, sent["down"], sent["up"], summary["seconds"]["total"]))
        # Transposed: a tuple over runs for each kind of cost
        steps, samples, down, up, seconds = map(mean, zip(*costs, strict=True))
        return replace(
            self,
            rounds=rounds,
            steps=steps,
            samples=samples,
            down=down,
            up=up,
            seconds=seconds,
        )

    def differences(self, other: Budget) -> Iterator[str]:
        """Yield a phrase for each difference from another budget, such as "rounds 5, not 10".

        The parts of a budget are compared in this order:

        - Settings that both budgets have. Settings of training, such as the batch size, are skipped
          if both budgets have measured optimiser steps.
        - The numbers of points that tuning tried.
        - The numbers of rounds that the runs finished, if any run of the two budgets ended early.
          The order of the runs does not matter.
        - Measured optimiser steps and samples, if both budgets have measured steps. They differ if
          they are more than 10 % above or below the other budget's.
        """
        # Measured steps are more exact than the settings of training, which are then ignored
        known = bool(self.steps and other.steps)
        for key, mine in self.given.items():
            theirs = other.given.get(key, mine)  # a setting without effect in `other`
            if mine != theirs and not (known and key in _TRAINING):
                yield f"{key} {_format_value(mine)}, not {_format_value(theirs)}"
        if self.trials != other.trials:
            yield f"tuned over {self.trials} points, not {other.trials}"
        # The wanted rounds are among the settings above, so complete runs need no second phrase
        ended_early = self._ended_early() or other._ended_early()
        if ended_early and sorted(self.rounds) != sorted(other.rounds):
            yield f"{self.rounds_text()} rounds, not {other.rounds_text()}"
        if not known:
            return
        for key in ("steps", "samples"):
            times = getattr(self, key) / getattr(other, key)
            if abs(times - 1) > _TOLERANCE:
                yield f"{times:.2g} times the {key}"

    def _ended_early(self) -> bool:
        """Tell whether some run did not finish the number of rounds that its settings ask for.

        The result is also True if no finished run is known.
        """
        return set(self.rounds) != {self.given["rounds"]}

    def rounds_text(self) -> str:
        """Format finished and planned rounds, such as "5 of 5".

        If seeds finished different numbers of rounds, it is "3 to 5 of 5". Without finished runs,
        it is "0 of 5".
        """
        done = "0"
        if self.rounds:
            fewest = min(self.rounds)
            most = max(self.rounds)
            done = str(most)
            if fewest < most:
                done = f"{fewest} to {most}"
        return f"{done} of {self.given['rounds']}"

    def cells(self) -> list[str]:
        """Format the budget as cells of a table row.

        The cells are rounds, steps, samples, bytes to the sites, bytes from the sites, duration,
        and the number of points that tuning tried ("-" for none).
        """
        tuned = "-"
        if self.trials:
            tuned = f"{self.trials} points"
        return [
            self.rounds_text(),
            _format_count(self.steps),
            _format_count(self.samples),
            bytes_text(self.down),
            bytes_text(self.up),
            seconds_text(self.seconds),
            tuned,
        ]


@dataclass(frozen=True)
class Budgets:
    """The budgets of a comparison: experiment -> budget, in the order of the rows."""

    of: Mapping[str, Budget] = field(default_factory=dict)

    def unlike(self) -> dict[str, list[str]]:
        """Find the experiments whose budgets are unequal, with a phrase for each difference.

        Each experiment is compared with its baseline, which is the first experiment on the same
        data set. A phrase has the form "rounds 5, not 10".

        Returns:
            The name of the experiment -> its phrases. Experiments without a difference are left
            out.
        """
        first: dict[str, Budget] = {}
        found = {}
        for name, budget in self.of.items():
            baseline = first.setdefault(budget.dataset, budget)
            parts = list(budget.differences(baseline))
            if parts:
                found[name] = parts
        return found

    def with_costs(self, runs: Mapping[str, Sequence[FinishedRun]]) -> Budgets:
        """Return a copy in which each budget has the mean costs of its experiment's finished runs.

        The costs are the optimiser steps, samples, bytes and seconds. Each budget also gets a list
        of its runs' numbers of finished rounds.

        Args:
            runs: the name of each experiment -> its finished runs, one per seed. Every experiment
                with a budget needs at least one.
        """
        budgets = {}
        for name, budget in self.of.items():
            budgets[name] = budget.with_costs(runs[name])
        return Budgets(budgets)

    def with_rounds(self, rounds: Mapping[str, Sequence[int]]) -> Budgets:
        """Return a copy in which each budget lists the number of finished rounds of each run.

        Everything else in the budgets stays as it is.

        Args:
            rounds: the name of each experiment -> the number of finished rounds of each run. Every
                experiment with a budget must be named.
        """
        budgets = {}
        for name, budget in self.of.items():
            budgets[name] = replace(budget, rounds=rounds[name])
        return Budgets(budgets)

    def refuse_unequal(self, advice: str) -> None:
        """Check that all experiments on the same data set have equal budgets.

        Raises:
            SettingError: some budgets are unequal. The message names the first experiment whose
                budget differs from that of the first experiment on its data set. It has all
                differences, and ends with ``advice``.
        """
        # The first remark is enough for an error
        for remark in self.remarks():
            raise SettingError(f"{remark}; {advice}")

    def remarks(self) -> Iterator[str]:
        """Yield a sentence for each experiment whose budget differs from that of its baseline.

        The baseline is the first experiment on the same data set. The sentence names both and lists
        all differences.
        """
        unlike = self.unlike()
        first: dict[str, str] = {}  # data set -> its first experiment
        for name, budget in self.of.items():
            baseline = first.setdefault(budget.dataset, name)
            if name in unlike:
                parts = "; ".join(unlike[name])
                yield f"experiment '{name}' has another budget than '{baseline}': {parts}"

    def lines(self) -> list[list[str]]:
        """Format the budgets as rows of cells for a table.

        The first row has the column titles, and then each experiment has a row. The last column,
        "differs", is present only if some budgets are unequal.
        """
        unlike = self.unlike()
        titles = list(COLUMNS)
        if not unlike:
            titles.remove("differs")
        lines = [titles]
        for name, budget in self.of.items():
            cells = [name, *budget.cells()]
            if unlike:
                cells.append("; ".join(unlike.get(name, ())))
            lines.append(cells)
        return lines

    def title(self) -> str:
        """Return the title of the table of budgets, which explains the numbers in the table.

        The numbers are sums over sites and means over seeds. If some budgets are unequal, the title
        also explains the sign ``MARK``, which follows the names of the experiments concerned.
        """
        title = "cost of each row: sum over sites, mean over seeds"
        if self.unlike():
            title += f"; {MARK.strip()} differs from the first row on its data"
        return title

    def frame(self) -> pd.DataFrame:
        """Return the budgets as a data frame: a row per experiment, with unrounded numbers.

        The columns are ``experiment``, ``dataset``, ``trials``, ``rounds``, ``steps``, ``samples``,
        ``down``, ``up``, ``seconds``, ``wanted`` and ``differs``. ``rounds`` is the mean of the
        finished rounds over seeds, and ``wanted`` the rounds in the settings. ``differs`` has the
        differences from the first experiment on the same data set, or is empty. Every experiment
        must have a finished run.
        """
        unlike = self.unlike()
        records = []
        for name, budget in self.of.items():
            cells: dict[str, Any] = {"experiment": name} | asdict(budget)
            given = cells.pop("given")
            cells["rounds"] = mean(budget.rounds)
            cells["wanted"] = given["rounds"]
            cells["differs"] = "; ".join(unlike.get(name, ()))
            records.append(cells)
        return pd.DataFrame(records)

    def mark_unequal(self, results: pd.DataFrame) -> pd.DataFrame:
        """Return a copy of a results table in which experiments with unequal budgets are marked.

        An experiment is marked if its budget differs from that of the first experiment on the same
        data set. The sign ``MARK`` is then appended to its name in the columns ``experiment`` and
        ``compared_with``, as far as the table has them.
        """
        names = {}
        for name in self.unlike():
            names[name] = f"{name}{MARK}"
        marked = results.copy()
        for column in results.columns.intersection(["experiment", "compared_with"]):
            marked[column] = results[column].replace(names)
        return marked


def budget_of(settings: RunSettings, trials: int = 0) -> Budget:
    """Build an experiment's budget from its settings, before any run.

    A budget is the resources that an experiment gets: the rounds, the settings of training, the
    network and its initial weights. A setting that has no effect is left out:

    - 'train.local-epochs', if 'train.local-steps' or 'train.epoch-steps' is set
    - 'train.local-steps', if 'train.epoch-steps' is set
    - 'train.pace', if 'train.epoch-steps' is not set

    Args:
        settings: the settings of the experiment.
        trials: the number of points that were tried to choose the settings. 0 if they were not
            tuned.
    """
    common = settings.common
    # Epoch steps replace the local steps, which replace the local epochs
    without = set()
    if common.local_steps or common.epoch_steps:
        without.add("train.local-epochs")
    if common.epoch_steps:
        without.add("train.local-steps")
    else:
        without.add("train.pace")
    values = settings.as_mapping()
    given = {}
    for key in ("rounds", *_TRAINING, *_START):
        if key not in without:
            given[key] = values[key]
    return Budget(common.dataset, given, trials)


def planned_budgets(plans: Mapping[str, RunSettings], sources: RunSources) -> Budgets:
    """Build the budgets of experiments from their settings, before any run.

    Each budget also has the number of points (choices of values) that tuning tried for the
    settings. This number comes from the simulation file. If the file lacks it or says 0, it comes
    from the results of 'fedsilo tune' in the folder of runs.

    Args:
        plans: the name of each experiment -> its settings.
        sources: where the command's settings come from. They include the simulation file.

    Raises:
        SettingError: the simulation file cannot be used.
    """
    budgets = {}
    for name, settings in plans.items():
        declared = declared_experiment(name, sources).trials
        budgets[name] = budget_of(settings, declared or tuned_over(settings, name))
    return Budgets(budgets)


def tuned_over(settings: RunSettings, experiment: str) -> int:
    """Return the number of points that 'fedsilo tune' tried in order to choose these settings.

    A point is a choice of values. The number is read from ``tune-<experiment>/chosen.json`` in the
    folder of runs, which ``settings`` name. It counts only if ``settings`` still have every value
    that the search chose. If they do not, or if the file is missing or damaged, the result is 0.
    """
    path = runs_folder(settings.common.out) / f"tune-{experiment}" / "chosen.json"
    if file_fault(path):  # reading a pipe would never end
        return 0
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        chosen = with_current_keys(document["chosen"], quietly=True)
        trials = int(document["budget"]["trials"])
        # The user may have changed the settings since, and then they were not tuned
        if chosen.items() <= settings.as_mapping().items():
            return trials
    except _DAMAGES:
        return 0
    return 0


def refuse_mixed_optimisers(experiments: Mapping[str, CommonSettings]) -> None:
    """Check that all methods keep the optimiser's state over rounds, or that all restart it.

    The state is kept if 'train.epoch-steps' is above 0 or 'train.optimiser-state' is "run". Each
    experiment is compared with the first one. Experiments with the first one's method may differ
    from it, because the user may want to compare the two ways.

    Args:
        experiments: experiment -> its settings.

    Raises:
        SettingError: an experiment with another method keeps the state and the first one restarts
            it, or the reverse.
    """
    first, *others = experiments
    for other in others:
        one, two = experiments[first], experiments[other]
        if one.method != two.method and _continues(one) != _continues(two):
            # The message names the experiment that continues before the one that restarts
            on, restarts = first, other
            if _continues(two):
                on, restarts = other, first
            raise SettingError(
                f"the optimiser of experiment '{on}' continues over rounds, but that of "
                f"'{restarts}' restarts in each round, so the comparison would be unfair: set "
                f"'train.optimiser-state' to 'run' for all ('train.epoch-steps' of '{on}' is "
                f"{experiments[on].epoch_steps}), or to 'round' if 'train.epoch-steps' is 0"
            )


def _continues(common: CommonSettings) -> bool:
    """Tell whether the optimiser's state is kept from round to round.

    It is kept if 'train.epoch-steps' is above 0 or 'train.optimiser-state' is "run".
    """
    return common.epoch_steps > 0 or common.optimiser_state == "run"


def _sum(run: FinishedRun, column: str) -> int:
    """Return the sum of a column of traffic.csv over all sites and rounds."""
    return sum(int(row[column]) for row in run.traffic_rows)


def _format_value(value: Value) -> str:
    """Format the value of a setting as text; an empty text becomes "unset"."""
    if value == "":
        return "unset"
    return str(value)


def _format_count(number: float) -> str:
    """Format a mean number of steps or samples, rounded and with commas, such as "12,500".

    The number 0 stands for an unknown number, and gives "unknown".
    """
    if number == 0:
        return "unknown"
    return f"{number:,.0f}"
