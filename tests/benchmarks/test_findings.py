"""The page's sentences on a benchmark's state and resolution, and the pilots behind its size."""

from pathlib import Path

import pytest

from benchmarks.ranking import pilots
from benchmarks.ranking.findings import (
    Progress,
    against_fedavg,
    null_pair_line,
    rank_over_seeds,
    size_line,
)
from benchmarks.ranking.page import friedman_lines
from benchmarks.ranking.pilots import Pilot, Size, read_pilots, sizes
from benchmarks.ranking.ranks import Ranking
from benchmarks.ranking.rows import Row
from fedsilo.core.methods import title_of


def runs(method: str, *tests: float) -> tuple[tuple[str, str], list[Row]]:
    return ("x", method), [Row("x", method, seed, test=test) for seed, test in enumerate(tests)]


CHOSEN = dict(
    [
        runs("fedavg", 0.80, 0.70, 0.82, 0.76),
        runs("fednova", 0.80, 0.72, 0.82, 0.76),
        runs("moon", 0.90, 0.91, 0.92, 0.93),
        runs("mix", 0.99, 0.99, 0.99, 0.99),
    ]
)


def test_the_null_pair_is_half_a_point_apart() -> None:
    line = null_pair_line(CHOSEN, "x")
    assert line is not None
    # 2 points in one of four seeds; FedAvg's even seeds have 81, its odd ones 73
    for number in ("0.50", "2.00", "8.00"):
        assert number in line
    assert null_pair_line(CHOSEN, "y") is None


def test_methods_are_ranked_within_each_seed() -> None:
    found = rank_over_seeds(CHOSEN, "x", ["mix"])
    # FedAvg and FedNova share 2.5 in three seeds; in seed 1 FedAvg is last
    assert found.ranks == pytest.approx({"moon": 1.0, "fednova": 2.375, "fedavg": 2.625})
    assert found.settings == 4
    (line,) = against_fedavg(found, "x")
    # 1.625 ranks are less than Demsar's difference of 2.343 * sqrt(3 * 4 / 24) = 1.657
    assert "Better than FedAvg: none. Worse: none" in line


def test_pairs_are_compared_only_if_methods_differ_by_more_than_chance() -> None:
    ranks = {"moon": 1.0, "fedavg": 9.0}
    for p, compared in ((0.051, False), (0.049, True)):
        one = Ranking(ranks, 4, statistic=9.0, p=p, difference=2.0)
        lines = [*against_fedavg(one, "x"), *friedman_lines({"all": one})]
        assert [title_of("moon") in line for line in lines] == [compared, compared]


@pytest.mark.parametrize(
    ("finished", "others", "counted", "told"),
    [
        (3, 1, 60, "`x`: finished, 3 methods x 20 seeds; 1 cannot run (60 runs)"),
        (2, 1, 50, "`x`: 2 of 3 methods have 20 seeds; 1 cannot run (50 of 66 runs)"),
        (0, 0, 0, "`x`: not begun, 0 of 66 runs"),
    ],
)
def test_the_state_of_a_setting(finished: int, others: int, counted: int, told: str) -> None:
    assert Progress("x", finished, others, 4, 20, counted, 66).line() == told


def pilot(rate: float, seed: int, curve: str, rounds: int = 4) -> Pilot:
    return Pilot("x", rounds, 5, rate, seed, "auc", 0.5, curve, "one (AVX2)")


def test_the_plateau_is_the_best_mean_of_any_round_and_rate() -> None:
    found = [
        pilot(0.1, 0, "2:0.1 4:0.9 8:0.9", rounds=2),  # of an older size, which does not count
        pilot(0.1, 0, "2:0.6 4:0.7 12:0.80"),
        pilot(0.1, 1, "2:0.6 4:0.9 12:0.90"),
        pilot(0.3, 0, "2:0.6 4:0.9 12:0.70"),
        pilot(0.3, 1, "2:0.6 4:0.8 12:0.70"),
    ]
    (size,) = sizes(found).values()
    assert size == Size(
        reached=pytest.approx(0.85), plateau=pytest.approx(0.85), chance=0.5, seeds=2
    )
    assert "enough rounds" in size_line("x", size)
    assert "too few rounds" in size_line("x", Size(0.6, 0.63, 0.5, 2))


def test_a_pilot_that_the_file_has_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, begun = tmp_path / "pilots.csv", []

    def run(key: tuple[str, int, int, float, int], metric: str, values: object) -> Pilot:
        if len(begun) == 2:
            raise KeyboardInterrupt
        begun.append(key)
        name, rounds, steps, rate, seed = key
        return Pilot(name, rounds, steps, rate, seed, metric, 0.5, "3:0.75", "one (AVX2)")

    monkeypatch.setattr(pilots, "_run", run)
    wanted = {"experiments": ["benchmark-heart"], "seeds": 2, "rates": [0.1, 0.3]}
    with pytest.raises(KeyboardInterrupt):
        list(pilots.run_pilots(path, **wanted))  # type: ignore[arg-type]
    assert len(read_pilots(path)) == 2
    begun.clear()
    assert len(list(pilots.run_pilots(path, **wanted))) == 2  # type: ignore[arg-type]
    assert [(one.rate, one.seed) for one in read_pilots(path)] == [
        *((0.1, 0), (0.1, 1)),
        *((0.3, 0), (0.3, 1)),
    ]
    assert read_pilots(path)[0].values == {3: 0.75}
