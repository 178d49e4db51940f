"""The sentences of a benchmark's page: its state, its resolution, and which methods differ.

The null pair is FedAvg and FedNova. With equal steps of plain SGD at all sites they are the same
method by mathematics, so their difference is an error of the benchmark.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from benchmarks.ranking.pilots import Size
from benchmarks.ranking.ranks import Ranking, ranking
from benchmarks.ranking.rows import Row
from fedsilo.comparison.tables import mean
from fedsilo.core.methods import title_of

NULL_PAIR = ("fedavg", "fednova")
Chosen = dict[tuple[str, str], list[Row]]  # (experiment, method) -> its runs, one per seed
_ENOUGH = 0.02  # how far FedAvg may be below its plateau


@dataclass(frozen=True)
class Progress:
    """How much of one experiment has run.

    Attributes:
        experiment: its name.
        finished: the number of methods with all seeds.
        others: the number of methods that cannot run or failed.
        methods: the number of methods.
        seeds: the number of seeds of a finished method.
        runs: the number of runs in the file, trials included.
        expected: the number of runs when all methods have finished.
    """

    experiment: str
    finished: int
    others: int
    methods: int
    seeds: int
    runs: int
    expected: int

    @property
    def complete(self) -> bool:
        """Whether every method has finished, failed, or said why it cannot run."""
        return self.finished + self.others == self.methods

    def line(self) -> str:
        """Describe the progress in one phrase, such as "`x`: finished, 33 methods x 20 seeds"."""
        counted = f"{self.runs:,} runs"
        if self.complete:
            done = f"finished, {self.finished} methods x {self.seeds} seeds"
        elif self.runs:
            done = (
                f"{self.finished} of {self.methods - self.others} methods have {self.seeds} seeds"
            )
            counted = f"{self.runs:,} of {self.expected:,} runs"
        else:
            return f"`{self.experiment}`: not begun, 0 of {self.expected:,} runs"
        without = ""
        if self.others:
            without = f"; {self.others} cannot run"
        return f"`{self.experiment}`: {done}{without} ({counted})"


def seed_metrics(chosen: Chosen, experiment: str, unranked: Sequence[str]) -> pd.DataFrame:
    """Return the test metric in percent, one decimal, by method (index) and seed (columns)."""
    values = {}
    for (name, method), runs in chosen.items():
        if name == experiment and method not in unranked:
            values[method] = [round(100 * float(row.test or 0), 1) for row in runs]
    return pd.DataFrame.from_dict(values, orient="index")


def rank_over_seeds(chosen: Chosen, experiment: str, unranked: Sequence[str]) -> Ranking:
    """Rank an experiment's methods within each seed, 1 being the best, and average the ranks."""
    return ranking(seed_metrics(chosen, experiment, unranked))


def null_pair_line(chosen: Chosen, experiment: str) -> str | None:
    """Describe how far the null pair differs, in points; None if one of them is not finished.

    Also says how far FedAvg's even seeds are from its odd ones, which is the noise of two
    independent means over half of the seeds each.
    """
    runs = [chosen.get((experiment, method)) for method in NULL_PAIR]
    if None in runs:
        return None
    first, second = ([100 * float(row.test or 0) for row in own or []] for own in runs)
    apart = abs(mean(first) - mean(second))
    most = max(abs(one - other) for one, other in zip(first, second, strict=True))
    halves = abs(mean(first[::2]) - mean(first[1::2]))
    return (
        f"`{experiment}`: FedNova's mean is {apart:.2f} points from FedAvg's, and at most "
        f"{most:.2f} points in one seed. FedAvg's even seeds are {halves:.2f} points from its odd "
        "ones"
    )


def size_line(experiment: str, size: Size) -> str:
    """Describe whether FedAvg is near its plateau and above chance, on validation data."""
    below = size.plateau - size.reached
    verdict = "enough rounds" if below <= _ENOUGH else "too few rounds"
    seeds = "1 seed" if size.seeds == 1 else f"{size.seeds} seeds"
    return (
        f"`{experiment}`: {size.reached:.3f} after the benchmark's rounds, at most "
        f"{size.plateau:.3f} in three times as many ({verdict}); chance {size.chance:.3f}; "
        f"{seeds}"
    )


NO_PAIRS = "So methods may differ by chance, and no two are compared."


def against_fedavg(one: Ranking, experiment: str) -> Iterator[str]:
    """Yield which methods rank better or worse than FedAvg on one experiment, seed by seed."""
    start = f"On `{experiment}`, over {one.settings} seeds, {len(one.ranks)} methods are ranked"
    if one.difference is None or one.p is None or "fedavg" not in one.ranks:
        yield f"{start}: too few for a test."
        return
    p = "p is below a thousandth"
    if one.p >= 1e-3:
        p = f"p = {one.p:.3f}"
    start = f"{start}: Friedman's chi-squared is {one.statistic:.1f}, {p}."
    if not one.is_significant:
        yield f"{start} {NO_PAIRS}"
        return
    usual = one.ranks["fedavg"]
    better = [name for name, rank in one.ranks.items() if rank < usual - one.difference]
    worse = [name for name, rank in one.ranks.items() if rank > usual + one.difference]
    yield (
        f"{start} Average ranks differ at 5 % if by more than {one.difference:.1f} (Nemenyi). "
        f"FedAvg has {usual:.1f}. "
        f"Better than FedAvg: {_names(better)}. Worse: {_names(worse)}."
    )


def _names(methods: Sequence[str]) -> str:
    return ", ".join(map(title_of, methods)) or "none"
