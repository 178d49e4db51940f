"""Experiments of a simulation file, and what is told of one that cannot be read."""

import re
from pathlib import Path

import pytest

from fedsilo.api.experiment_list import check_experiments
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import SettingError
from fedsilo.engines import experiments as module
from fedsilo.engines.experiments import (
    declared_experiment,
    find_experiment,
    read_experiments,
)
from fedsilo.engines.planning import plan_run
from fedsilo.server_app.config.settings import resolve

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("file", ["simulation.yaml", "benchmarks/ranking/ranking.yaml"])
def test_every_experiment_of_our_files_is_valid(file: str) -> None:
    faults = check_experiments(ROOT / file)
    assert len(faults) >= 6
    assert {name: fault for name, fault in faults.items() if fault} == {}


def test_the_check_reports_each_experiment_that_cannot_run(tmp_path: Path) -> None:
    path = tmp_path / "simulation.yaml"
    path.write_text(
        "experiments:\n"
        "  good: {config: {method: fedavg, rounds: 4}}\n"
        "  range: {config: {rounds: 0}}\n"
        "  key: {config: {roundz: 4}}\n"
        "  resource: {resources: {num-supernodes: 0}}\n"
        "  malformed: {confg: {}}\n"
        "  based: {base: malformed}\n"
    )
    faults = check_experiments(path)
    assert faults.pop("good") == ""
    keys = {"range": "rounds", "key": "roundz", "resource": "num-supernodes"}
    keys |= {"malformed": "confg", "based": "confg"}
    assert faults.keys() == keys.keys()
    for name, key in keys.items():
        assert f"'{key}'" in faults[name]


def test_a_long_row_of_bases_is_refused_like_a_loop(tmp_path: Path) -> None:
    path = tmp_path / "simulation.yaml"
    rows = [f"  x{number}: {{base: x{number + 1}}}\n" for number in range(3000)]
    path.write_text("experiments:\n" + "".join(rows) + "  x3000: {config: {seed: 3}}\n")
    assert find_experiment(path, "x2960").values == {"seed": 3}
    with pytest.raises(SettingError, match="in a row of more than 50"):
        find_experiment(path, "x0")


def test_a_mistake_in_another_experiment_does_not_stop_a_run(tmp_path: Path) -> None:
    path = tmp_path / "simulation.yaml"
    path.write_text("experiments: {good: {config: {rounds: 4}}, bad: {confg: {}}, worse: 3}")
    assert find_experiment(path, "good").values == {"rounds": 4}
    with pytest.raises(SettingError, match="confg"):
        find_experiment(path, "bad")


def test_a_run_is_planned_from_one_reading_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "simulation.yaml"
    path.write_text(
        "experiments: {a: {config: {method: fedavg, rounds: 4}}, b: {base: a, config: {seed: 3}}}"
    )
    module._open_once.cache_clear()
    settings, _ = plan_run("b", RunSources(file=path, out=tmp_path))
    assert (settings.common.rounds, settings.common.seed) == (4, 3)
    assert module._open_once.cache_info().misses == 1
    path.write_text("experiments: {b: {config: {rounds: 7}}}")
    assert find_experiment(path, "b").values == {"rounds": 7}, "a changed file is read again"


def test_the_small_skins_distillation_is_as_strong_for_a_pixel_and_a_site_as_the_papers() -> None:
    """By hand: 10^-6 x 224^2 pixels x 5 other sites = weight x 64^2 pixels x 3 other sites."""
    experiments = read_experiments(ROOT / "simulation.yaml")
    paper = experiments["fedevprompt-isic2019"].values["fedevprompt.distillation-weight"]
    assert paper == 1e-6
    for name in ("strength", "drop", "byte"):
        values = experiments[f"fedevprompt-{name}-long-skin"].values
        assert values["data.image-size"] == 64
        weight = values["fedevprompt.distillation-weight"]
        assert float(str(weight)) * 64**2 * 3 == pytest.approx(1e-6 * 224**2 * 5, rel=0.001)


def test_no_cluster_is_too_small_to_be_sent_in_uefls_named_tables() -> None:
    experiments = read_experiments(ROOT / "simulation.yaml")
    tables = {
        name: experiment.values
        for name, experiment in experiments.items()
        if experiment.values.get("method") == "uefl" and re.match(r"uefl-(table\d|.*small)", name)
    }
    assert len(tables) > 50
    for name, values in tables.items():
        assert values["uefl.centroid-min-count"] == 1, name


@pytest.mark.parametrize("data", ["digits", "mnist", "mnist-cpu", "fmnist-cpu"])
def test_methods_of_a_comparison_share_everything_but_the_method(data: str) -> None:
    def shared(method: str) -> dict[str, object]:
        values = find_experiment(ROOT / "simulation.yaml", f"{method}-{data}").values
        settings = resolve(values).common
        return {k: v for k, v in vars(settings).items() if k != "method"}

    assert shared("uefl") == shared("fedavg") == shared("local")


def test_a_method_is_an_experiment_of_its_defaults_unless_the_file_has_one(tmp_path: Path) -> None:
    assert find_experiment(ROOT / "simulation.yaml", "fedprox").values == {"method": "fedprox"}
    file = tmp_path / "simulation.yaml"
    file.write_text("experiments: {fedprox: {config: {method: fedavg}}}")
    assert find_experiment(file, "fedprox").values == {"method": "fedavg"}


def test_the_method_of_a_plugin_that_the_command_names_is_an_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "simulation.yaml"
    file.write_text("experiments: {mix-up: {config: {method: fedavg}}}")
    monkeypatch.chdir(tmp_path)
    sources = RunSources(file=file, changes=("rounds=3", "plugin=nets.py, plugs/mine.py"))
    assert declared_experiment("mine", sources).values == {"method": "mine"}
    with pytest.raises(SettingError, match="unknown experiment 'mine'"):
        declared_experiment("mine", RunSources(file=file))
    (tmp_path / "mine.py").touch()
    with pytest.raises(SettingError, match=r"--plugin mine\.py"):
        declared_experiment("mine", RunSources(file=file))


def test_a_method_is_offered_before_experiments_that_are_less_alike() -> None:
    for name, near in (("fedavgg", "fedavg"), ("fedavg-digts", "fedavg-digits")):
        with pytest.raises(SettingError, match=f"did you mean '{near}'"):
            find_experiment(ROOT / "simulation.yaml", name)


def test_an_experiment_takes_over_its_base(tmp_path: Path) -> None:
    path = tmp_path / "simulation.yaml"
    path.write_text(
        "experiments:\n"
        "  first: {config: {rounds: 4, seed: 1}, resources: {num-supernodes: 3}}\n"
        "  second: {base: first, config: {seed: 2}}\n"
    )
    second = find_experiment(path, "second")
    assert second.values == {"rounds": 4, "seed": 2}
    assert second.resources == {"num-supernodes": 3}
    with pytest.raises(SettingError, match="did you mean 'second'"):
        find_experiment(path, "secnd")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("experiments: {a: {base: b}, b: {base: a}}", "based on one another"),
        ("experiments: {a: {confg: {}}}", "'a' has the unknown key 'confg'; did you mean 'config'"),
        ("experiments: {a: }", "must be a mapping"),
        ("experiments: {a: hello}", "must be a mapping"),
        ("experiments: {a: {config: [1]}}", "must be a mapping"),
        ("experiments: {a: {base: [1]}}", "'a', 'base' must be a text"),
        ("experiments: {a: {config: {rounds: 1, rounds: 2}}}", "has the key 'rounds' twice"),
        ("experiments: {a: {}, a: {}}", "has the key 'a' twice"),
        ("experiments: {1: {}}", "experiment '1' must be a text"),
        ('experiments: {"a\\nb": {}}', "experiment 'a b' must be a name of one line"),
        ('experiments: {a: {base: "b\\nc"}}', "unknown experiment 'b c'"),
        ("experiments: {a: {base: }}", "'base' must be a text"),
        ("experiments: {a: {1: {}}}", "unknown key '1'"),
        (
            "experiments: {a: {config: {1: 2}}}",
            "'a', '(config|grid)', '1' must be a text",
        ),
        ("experiments: {a: {config: {rounds: [1]}}}", r"setting 'rounds' must be .* but is \[1\]"),
        (
            "experiments: {a: {grid: {1: [2]}}}",
            "'a', '(config|grid)', '1' must be a text",
        ),
        (
            "experiments: {'x-{a}': {}}",
            "'x-{a}' .* placeholders a in its name, .*'matrix' has none",
        ),
        ("experiments: {x: {matrix: {a: [1]}}}", "'x' .* placeholders none .*'matrix' has a:"),
        ("experiments: {'x-{a}': {matrix: }}", "'x-{a}', 'matrix' must be a mapping"),
        ("experiments: {'x-{a}': {matrix: [1]}}", "'x-{a}', 'matrix' must be a mapping"),
        ("experiments: {'x-{a}': {matrix: {a: 1}}}", "'matrix', 'a' must be a list of values"),
        ("experiments: {'x-{a}': {matrix: {a: []}}}", "'matrix', 'a' must be a list of values"),
        ("experiments: {'x-{a}': {matrix: {a: {}}}}", "'matrix', 'a' must be a list of values"),
        ("experiments: {'x-{a}': {matrix: {a: [[1]]}}}", "'matrix', 'a' must be a text"),
        ("experiments: {'x-{a}': {matrix: {a: [no]}}}", "'matrix', 'a' must be a text"),
        ("experiments: {'x-{a}': {matrix: {a: [1, '1']}}}", "'a' must have each value once"),
        (
            "experiments: {'x-{a}': {matrix: {a: {3: {confg: {}}}}}}",
            "'x-{a}', 'matrix', 'a', '3' has the unknown key 'confg'; did you mean 'config'",
        ),
        ("experiments: {'x-{a}': {matrix: {a: {3: [1]}}}}", "'a', '3' must be a mapping"),
        (
            "experiments: {'x-{a}': {matrix: {a: {3: {matrix: {b: [1]}}}}}}",
            "'a', '3' has the unknown key 'matrix'",
        ),
        (
            "experiments: {'x-{a}': {matrix: {a: [1]}, config: {seed: '{b}'}}}",
            "'x-{a}' has an unknown placeholder 'b'",
        ),
        ("experiments: {x-1: {}, 'x-{a}': {matrix: {a: [1]}}}", "'x-{a}' makes 'x-1', but so does"),
        (
            "experiments: {'{a}{b}': {matrix: {a: [1, 11], b: [1, 11]}}}",
            "'{a}{b}' makes '111', but so does '{a}{b}'",
        ),
        (
            "experiments: {'{a}{b}': "
            f"{{matrix: {{a: {list(range(40))}, b: {list(range(40))}}}}}}}",
            "'{a}{b}' stands for 1600 experiments, but at most 1000 may be",
        ),
        ("tuning: &a [*a]", "refers to itself"),
        ("experiments: [", "not valid YAML"),
        ("rounds: 3", "no mapping 'experiments'"),
    ],
)
def test_a_malformed_simulation_file_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "simulation.yaml"
    path.write_text(text)
    with pytest.raises(SettingError, match=told.replace("{", r"\{")) as caught:
        read_experiments(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value) or "unknown experiment" in str(caught.value)
