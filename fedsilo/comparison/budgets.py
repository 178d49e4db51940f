"""The budget of each row in a comparison, and the differences between budgets.

Rows are on equal terms if they got the same and used the same, so that only the method makes a
difference. A row gets rounds, a start (network and initial weights), and a number of points that
'fedsilo tune' tried for its settings. It uses finished rounds, optimiser steps and samples, summed
over all sites and rounds, in the mean over seeds.
Every step counts, so a method that trains a second model (Ditto) or its neighbours' models
(FedEFM) uses more. Steps and samples may differ by a tenth, because a last batch may be smaller
at one site than at all sites' pool. Before a run, and where sites do not tell (private runs), the
settings of a round's training are compared in their place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedsilo.comparison.tables import mean, seconds_text
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import SettingError
from fedsilo.core.files.text_files import file_fault
from fedsilo.core.settings.common_settings import NETWORK_KEYS, CommonSettings
from fedsilo.core.settings.removed import with_current_keys
from fedsilo.core.settings_schema import Value
from fedsilo.engines.experiments import find_experiment, simulation_file
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records.progress import bytes_text

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
# What reading a damaged chosen.json raises: of lists within lists, of 1e999 trials, and the rest
_DAMAGES = (
    *(RecursionError, OverflowError),
    *(OSError, ValueError, KeyError, TypeError, AttributeError),
)


@dataclass(frozen=True)
class Budget:
    """The budget of an experiment's runs: what they got, and what they used on average."""

    dataset: str  # rows on other data are not compared
    # The settings of training and start, without those that have no effect
    given: Mapping[str, Value]
    trials: int = 0  # points from which its settings were chosen; 0 if it was not tuned
    rounds: Sequence[int] = ()  # finished rounds of each seed
    # Sums over all sites, mean over seeds; 0 if unknown
    steps: float = 0.0
    samples: float = 0.0
    # Bytes to all sites, and from them
    down: float = 0.0
    up: float = 0.0
    seconds: float = 0.0  # duration of a run, from the first message to the last

    def with_costs(self, runs: Sequence[FinishedRun]) -> Budget:
        """Return the budget with the rounds, steps, samples, bytes and seconds of ``runs``.

        ``runs`` has one run per seed.
        """
        summaries = [run.summary for run in runs]
        return replace(
            self,
            rounds=[int(summary["rounds"]) for summary in summaries],
            steps=mean(_sum(run, "steps") for run in runs),
            samples=mean(_sum(run, "samples") for run in runs),
            down=mean(summary["bytes"]["down"] for summary in summaries),
            up=mean(summary["bytes"]["up"] for summary in summaries),
            seconds=mean(summary["seconds"]["total"] for summary in summaries),
        )

    def differences(self, other: Budget) -> Iterator[str]:
        """Yield a phrase for each difference from ``other``, such as "rounds 5, not 10"."""
        # Measured steps say more than the settings of training, which are then ignored
        known = bool(self.steps and other.steps)
        for key, mine in self.given.items():
            theirs = other.given.get(key, mine)  # a setting without effect there is no difference
            if mine != theirs and not (known and key in _TRAINING):
                yield f"{key} {_format_value(mine)}, not {_format_value(theirs)}"
        if self.trials != other.trials:
            yield f"tuned over {self.trials} points, not {other.trials}"
        short = any({*one.rounds} != {one.given["rounds"]} for one in (self, other))
        if short and sorted(self.rounds) != sorted(other.rounds):
            yield f"{self.rounds_text()} rounds, not {other.rounds_text()}"
        for key in ("steps", "samples") if known else ():
            times = getattr(self, key) / getattr(other, key)
            if abs(times - 1) > _TOLERANCE:
                yield f"{times:.2g} times the {key}"

    def rounds_text(self) -> str:
        """Return the finished and the wanted rounds as text, such as "3 to 5 of 5"."""
        ends = sorted({*self.rounds})
        done = f"{ends[0]}" if len(ends) == 1 else f"{ends[0]} to {ends[-1]}" if ends else "0"
        return f"{done} of {self.given['rounds']}"

    def cells(self) -> list[str]:
        """Return the cells of a row, without the experiment and the differences."""
        work = [f"{number:,.0f}" if number else "unknown" for number in (self.steps, self.samples)]
        sent = [bytes_text(self.down), bytes_text(self.up)]
        tuned = f"{self.trials} points" if self.trials else "-"
        return [self.rounds_text(), *work, *sent, seconds_text(self.seconds), tuned]


@dataclass(frozen=True)
class Budgets:
    """The budgets of a comparison's rows, by experiment, in the order of the rows."""

    of: Mapping[str, Budget] = field(default_factory=dict)

    def unlike(self) -> dict[str, list[str]]:
        """Return, per experiment, its differences from the first experiment on the same data.

        Experiments without a difference are left out.
        """
        first: dict[str, Budget] = {}
        found = {}
        for name, budget in self.of.items():
            if parts := [*budget.differences(first.setdefault(budget.dataset, budget))]:
                found[name] = parts
        return found

    def with_costs(self, runs: Mapping[str, Sequence[FinishedRun]]) -> Budgets:
        """Return the budgets with the costs of each experiment's finished runs."""
        return Budgets({name: budget.with_costs(runs[name]) for name, budget in self.of.items()})

    def with_rounds(self, rounds: Mapping[str, Sequence[int]]) -> Budgets:
        """Return the budgets with the finished rounds of each experiment's runs."""
        return Budgets({name: replace(b, rounds=rounds[name]) for name, b in self.of.items()})

    def refuse_unequal(self, advice: str) -> None:
        """Check that all rows on the same data have equal budgets.

        Raises:
            SettingError: names the first other row and all its differences; ends with ``advice``.
        """
        for said in self.remarks():
            raise SettingError(f"{said}; {advice}")

    def remarks(self) -> Iterator[str]:
        """Yield a sentence for each row whose budget differs from the first row's."""
        for name, parts in self.unlike().items():
            first = next(n for n, b in self.of.items() if b.dataset == self.of[name].dataset)
            yield f"experiment '{name}' has another budget than '{first}': {'; '.join(parts)}"

    def lines(self) -> list[list[str]]:
        """Return the column titles, then a line of cells per experiment."""
        unlike = self.unlike()
        rows = [[n, *b.cells(), "; ".join(unlike.get(n, ()))] for n, b in self.of.items()]
        titles = [title for title in COLUMNS if title != "differs" or unlike]
        return [row[: len(titles)] for row in (titles, *rows)]

    def title(self) -> str:
        """Return the title of the table."""
        mark = f"; {MARK.strip()} differs from the first row on its data" if self.unlike() else ""
        return f"cost of each row: sum over sites, mean over seeds{mark}"

    def frame(self) -> pd.DataFrame:
        """Return the budgets as a frame: a row per experiment, numbers not rounded."""
        unlike = self.unlike()
        records = []
        for name, budget in self.of.items():
            cells: dict[str, Any] = {"experiment": name} | asdict(budget)
            wanted = cells.pop("given")["rounds"]
            cells |= {"rounds": mean(budget.rounds), "wanted": wanted}
            records.append(cells | {"differs": "; ".join(unlike.get(name, ()))})
        return pd.DataFrame(records)

    def mark_unequal(self, results: pd.DataFrame) -> pd.DataFrame:
        """Return tidy results in which ``MARK`` follows the experiments with another budget."""
        names = {name: f"{name}{MARK}" for name in self.unlike()}
        columns = results.columns.intersection(["experiment", "compared_with"])
        return results.assign(**{column: results[column].replace(names) for column in columns})


def budget_of(settings: RunSettings, trials: int = 0) -> Budget:
    """Build the budget of an experiment before it runs.

    ``trials`` is the number of points from which its settings were chosen.
    """
    common, values = settings.common, settings.as_mapping()
    without = {"train.local-epochs"} if common.local_steps else set()
    without |= {"train.local-epochs", "train.local-steps"} if common.epoch_steps else {"train.pace"}
    given = {key: values[key] for key in ("rounds", *_TRAINING, *_START) if key not in without}
    return Budget(common.dataset, given, trials)


def planned_budgets(plans: Mapping[str, RunSettings], sources: RunSources) -> Budgets:
    """Build the budget of each experiment before it runs.

    Its trials are those in the simulation file, else those of a search in the same ``out``.
    """
    file, budgets = simulation_file(sources.file), {}
    for name, settings in plans.items():
        declared = find_experiment(file, name).trials
        budgets[name] = budget_of(settings, declared or tuned_over(settings, name))
    return Budgets(budgets)


def tuned_over(settings: RunSettings, experiment: str) -> int:
    """Return the number of points of a search in the same ``out``; 0 if there is none.

    A search counts only if the experiment runs with the settings that it chose.
    """
    path = Path(settings.common.out) / f"tune-{experiment}" / "chosen.json"
    if file_fault(path):  # a pipe would be waited for
        return 0
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        chosen = with_current_keys(document["chosen"], quietly=True)
        runs = chosen.items() <= settings.as_mapping().items()
        return int(document["budget"]["trials"]) if runs else 0
    except _DAMAGES:
        return 0


def refuse_mixed_optimisers(experiments: Mapping[str, CommonSettings]) -> None:
    """Refuse methods of which one keeps its optimiser over rounds and another restarts it.

    A method may be compared with itself under both rules.

    Raises:
        SettingError: names two such experiments.
    """
    first, *others = experiments
    for other in others:
        one, two = experiments[first], experiments[other]
        if one.method != two.method and _continues(one) != _continues(two):
            on, restarts = (first, other) if _continues(one) else (other, first)
            raise SettingError(
                f"the optimiser of experiment '{on}' continues over rounds, but that of "
                f"'{restarts}' restarts in each round, so the comparison would be unfair: set "
                f"'train.optimiser-state' to 'run' for all ('train.epoch-steps' of '{on}' is "
                f"{experiments[on].epoch_steps}), or to 'round' if 'train.epoch-steps' is 0"
            )


def _continues(common: CommonSettings) -> bool:
    return common.epoch_steps > 0 or common.optimiser_state == "run"


def _sum(run: FinishedRun, column: str) -> int:
    return sum(int(row[column]) for row in run.traffic_rows)


def _format_value(value: Value) -> str:
    return "unset" if value == "" else str(value)
