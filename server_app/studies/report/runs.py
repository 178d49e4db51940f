"""The finished runs of a report: by what name each goes, and which are of one experiment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsilo.datasets.registry import data_set
from fedsilo.models.contract.one_line import counted
from fedsilo.models.contract.settings import SERVER
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.studies.compare.experiment_runs import (
    ExperimentRun,
    finished_runs,
    read_run,
)
from fedsilo.server_app.studies.report.numbers import hide_small_count
from fedsilo.server_app.studies.report.shown import Counts, ShownRun

_SEEDS = ("seed", "split.fold-seed")


@dataclass(frozen=True)
class ReportedRun(ShownRun):
    """A finished run under the names that a page gives it.

    No absolute path is among them: the page does not depend on the run's place.
    """

    name: str  # name of the run, unique on its page
    experiment: str  # name that runs share if they differ only in their seed

    @cached_property
    def decisive(self) -> Mapping[str, Value]:
        """The settings that its result depends on."""
        return self.settings.decisive()

    @property
    def seed(self) -> int:
        """Its seed."""
        return int(self.summary["seed"])

    @property
    def simulated(self) -> bool:
        """Whether its sites were simulated: a hospital says by which software it takes part."""
        return not any("software" in facts for facts in self.silos.values())

    @property
    def trust(self) -> str:
        """The level of trust that it was made for."""
        return str(self.summary["privacy"]["trust"]["level"])

    def figures(self, site: str) -> Mapping[str, float]:
        """Return a site's final test figures that may be shown."""
        found: Mapping[str, float] = self.summary["sites"].get(site, {})
        return found

    def noun(self, number: int) -> str:
        """Return the word for a sample: a row of a table is a patient."""
        one = "patient" if data_set(str(self.summary["dataset"])).is_table else "image"
        return one if number == 1 else f"{one}s"

    def all_classes(self) -> list[str]:
        """Return the names of the classes at the first site."""
        return self.class_names(next(iter(self.silos)))

    def class_names(self, site: str) -> list[str]:
        """Return the names of a site's classes, numbers where the data set has none."""
        facts = self.silos[site]
        counts: Counts = next(iter(facts["label_counts"].values()), [])
        return list(facts["classes"]) or [f"class {label}" for label in range(len(counts))]


def reported_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Return the runs in ``folders`` and directly below them.

    Raises:
        RunDirectoryError: there is none in one of them, or one that has not ended.
    """
    found = [read_run(run, "test") for run in finished_runs(folders)]
    by_experiment: dict[str, list[ExperimentRun]] = {}
    for run in found:
        by_experiment.setdefault(run.experiment, []).append(run)
    together = {name for name, alike in by_experiment.items() if _differ_by_seed(alike)}
    return [
        ReportedRun(run.path, name, run.experiment if run.experiment in together else name)
        for run, name in zip(found, _names([run.path.resolve() for run in found]), strict=True)
    ]


def experiments_of(runs: Sequence[ReportedRun]) -> dict[str, dict[int, ReportedRun]]:
    """Return experiment -> seed -> run."""
    found: dict[str, dict[int, ReportedRun]] = {}
    for run in runs:
        found.setdefault(run.experiment, {})[run.seed] = run
    return found


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the folders' names, with as many parents as make them unique."""
    for depth in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _differ_by_seed(runs: Sequence[ExperimentRun]) -> bool:
    """Tell whether runs of one name are one experiment: other settings alike, each seed once."""
    without = [{k: v for k, v in run.settings.items() if k not in _SEEDS} for run in runs]
    seeds = {int(run.summary["seed"]) for run in runs}
    return len(seeds) == len(runs) and all(settings == without[0] for settings in without)


_SPLIT_NAMES = {"train": "training", "val": "validation", "test": "test"}
_MANY_CLASSES = 8  # a table of more columns cannot be read


def taking_part(run: ReportedRun) -> dict[str, Any]:
    """Build the template variables of ``sites.html`` for a run."""
    silos, failed, floor = run.silos, run.summary["failures"], run.floor
    names = run.all_classes()
    splits = [s for s in _SPLIT_NAMES if any(facts["sizes"].get(s) for facts in silos.values())]
    told = run.trust == SERVER  # how many were left out
    return {
        "name": run.name,
        "site_count": counted(len(silos), "site"),
        "simulated": run.simulated,
        "noun": run.noun(2),
        "floor": floor,
        "splits": [*(_SPLIT_NAMES[split] for split in splits), *(["left out"] if told else [])],
        "sizes": [
            [
                site,
                *(hide_small_count(facts["sizes"].get(split), floor) for split in splits),
                *([hide_small_count(facts["dropped"], floor)] if told else []),
            ]
            for site, facts in silos.items()
            if splits
        ],
        "class_names": names,
        "by_class": [
            [site, *(hide_small_count(count, floor) for count in counts)]
            for site, facts in silos.items()
            if "test" in splits
            and len(names) <= _MANY_CLASSES
            and (counts := facts["label_counts"].get("test"))
        ],
        "stopped": run.summary["stopped"],
        "failed": [[str(f["round"]), f["phase"], f["site"], f["reason"]] for f in failed],
    }
