"""The section of a benchmark: budgets of equal size, and what is wrong in it."""

from pathlib import Path

import pytest

from benchmarks.ranking.config import RANKING_FILE, Contender, read_benchmark
from fedsilo.core.errors import SettingError
from fedsilo.core.methods import METHODS

TEXT = """
experiments: {{x: {{config: {{method: fedavg}}}}}}
benchmark:
  seeds: 2
  rates: [0.1, 0.2]
  experiments: {{x: accuracy}}
  methods: {{{methods}}}
"""


def test_every_method_has_as_many_trials() -> None:
    benchmark = read_benchmark(RANKING_FILE, "benchmark")
    assert len(benchmark.experiments) == 5
    assert benchmark.runs == len(benchmark.rates) * benchmark.trial_seeds + (
        benchmark.seeds - benchmark.trial_seeds
    )
    for method in METHODS:
        rates, further = benchmark.trials(method)
        assert len(rates) + len(further) == len(benchmark.rates), method
        assert rates, method


@pytest.mark.parametrize(
    ("methods", "told"),
    [
        ("fedprix: {}", "benchmark: 'methods', 'fedprix': unknown method 'fedprix'"),
        ("fedprox: {own: {fedprox.mu: [1]}}", "unknown setting 'fedprox.mu'"),
        ("fedprox: {own: {rounds: [1, 2], seed: [1]}}", "must have one setting"),
        ("fedprox: {own: {fedprox.proximal-mu: [1.0, 2.0, 3.0]}}", "has more values of its own"),
        ("fedprox: {only: [y]}", "unknown experiment 'y'"),
        ("fedprox: {per-experiment: {y: {rounds: 3}}}", "unknown experiment 'y'"),
        ("fedprox: {grid: {}}", "has the unknown key 'grid'"),
    ],
)
def test_a_wrong_section_is_one_line(methods: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "simulation.yaml"
    path.write_text(TEXT.format(methods=methods))
    with pytest.raises(SettingError, match=told):
        read_benchmark(path, "benchmark")


def test_settings_of_one_experiment_are_over_those_of_all() -> None:
    contender = Contender.model_validate(
        {"config": {"rounds": 3, "seed": 1}, "per-experiment": {"x": {"rounds": 4}}}
    )
    assert contender.settings_on("x") == {"rounds": 4, "seed": 1}
    assert contender.settings_on("z") == {"rounds": 3, "seed": 1}


def test_more_trial_seeds_than_seeds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "simulation.yaml"
    path.write_text(TEXT.format(methods="").replace("seeds: 2", "seeds: 2\n  trial-seeds: 3"))
    with pytest.raises(SettingError, match="'trial-seeds' is 3"):
        read_benchmark(path, "benchmark")


def test_an_unknown_section_is_told_with_those_that_there_are(tmp_path: Path) -> None:
    path = tmp_path / "simulation.yaml"
    path.write_text(TEXT.format(methods=""))
    with pytest.raises(SettingError, match=r"unknown benchmark 'full'.*benchmark"):
        read_benchmark(path, "full")
