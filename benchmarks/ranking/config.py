"""What ``benchmarks.ranking`` runs: a section of ranking.yaml, by default ``benchmark``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from fedsilo.core.errors import SettingError, unknown_name
from fedsilo.core.files.declarations import FileModel, check_content, misfit, whole, within
from fedsilo.core.methods import METHODS
from fedsilo.core.settings_schema import Value
from fedsilo.engines.experiments import (
    FlatSettings,
    Grid,
    find_experiment,
    open_simulation,
)

# The sections, and their experiments as in a simulation file
RANKING_FILE = Path(__file__).with_name("ranking.yaml")


def _one_setting(grid: Mapping[str, Sequence[Value]]) -> Mapping[str, Sequence[Value]]:
    if len(grid) > 1:
        raise misfit("must have one setting: the budget is as large for every method")
    return grid


def _known_method(name: str) -> str:
    if name not in METHODS:
        raise within(str(unknown_name("method", name, METHODS)))
    return name


class Contender(FileModel):
    """What a method has of its own in a benchmark.

    Attributes:
        about: how its runs differ from the others' beyond the method, for people.
        config: settings over the experiment's.
        per_experiment: experiment -> settings over ``config`` on that experiment only, such as
            fewer steps for a method that trains two networks.
        own: the one setting of its own that is tuned, with its values, the usual one first.
        only: the experiments that it is run on, if not on all.
        otherwise: why it is not run on the others.
        unranked: why it has no rank among the others.
    """

    about: str = ""
    config: FlatSettings = Field(default_factory=dict)
    per_experiment: dict[str, FlatSettings] = Field(default_factory=dict)
    own: Annotated[Grid, AfterValidator(_one_setting)] = Field(default_factory=dict)
    only: list[str] = Field(default_factory=list)
    otherwise: str = ""
    unranked: str = ""

    def settings_on(self, experiment: str) -> FlatSettings:
        """Return the method's settings over those of an experiment."""
        return {**self.config, **self.per_experiment.get(experiment, {})}


class Benchmark(FileModel):
    """A benchmark: experiments, each with the metric that decides, and the budget of all methods.

    Attributes:
        seeds: the number of runs of each method at the point that its trials chose.
        trial_seeds: the number of seeds of each trial; a trial counts by their mean.
        rates: learning rates; as many as a method has trials.
        experiments: their names, in the order in which they are run, and the metrics.
        methods: the methods that have something of their own.
    """

    seeds: Annotated[int, whole(2, 100)]
    trial_seeds: Annotated[int, whole(1, 100)] = 1
    rates: Annotated[list[float], Field(min_length=2)]
    experiments: Annotated[dict[str, str], Field(min_length=1)]
    methods: dict[Annotated[str, AfterValidator(_known_method)], Contender]

    def contender(self, method: str) -> Contender:
        """Return what a method has of its own, perhaps nothing."""
        return self.methods.get(method, Contender())

    @property
    def runs(self) -> int:
        """The number of runs of a method on an experiment, if none is refused."""
        return (len(self.rates) - 1) * self.trial_seeds + self.seeds

    def trials(self, method: str) -> tuple[list[float], list[dict[str, Any]]]:
        """Return the rates that a method tries, then the further values of its own setting."""
        own = self.contender(method).own
        further = [{key: value} for key, values in own.items() for value in values[1:]]
        return self.rates[: len(self.rates) - len(further)], further


def read_benchmark(path: Path, section: str) -> Benchmark:
    """Read a section of a file such as ranking.yaml; SettingError if it is malformed."""
    found = open_simulation(path).content
    if section not in found:
        raise unknown_name("benchmark", section, [k for k in found if str(k).startswith("bench")])
    benchmark: Benchmark = check_content(
        Benchmark, found[section], lambda sentence: SettingError(f"{path}: {section}: {sentence}")
    )
    if benchmark.trial_seeds > benchmark.seeds:
        raise SettingError(
            f"{path}: {section}: 'trial-seeds' is {benchmark.trial_seeds}, but must not exceed "
            f"'seeds', which is {benchmark.seeds}: lower it"
        )
    named = list(benchmark.experiments)
    for contender in benchmark.methods.values():
        named += [*contender.only, *contender.per_experiment]
    for name in named:
        find_experiment(path, name)
    for method in benchmark.methods:
        if not benchmark.trials(method)[0]:
            raise SettingError(
                f"{path}: {section}: '{method}' has more values of its own than there are 'rates': "
                "leave values out, or add rates"
            )
    return benchmark
