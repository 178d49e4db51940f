"""Experiments of a simulation file, and what is told of one that cannot be read."""

import re
from pathlib import Path

import pytest

from fedsilo.models.contract.errors import SettingError
from fedsilo.server_app.config.experiments import find_experiment, read_experiments
from fedsilo.server_app.config.settings import resolve

ROOT = Path(__file__).resolve().parents[3]


def test_every_experiment_of_simulation_yaml_is_valid() -> None:
    experiments = read_experiments(ROOT / "simulation.yaml")
    assert {"uefl-digits", "uefl-mnist", "uefl-mnist-cpu", "uefl-fmnist-cpu"} <= set(experiments)
    for experiment in experiments.values():
        resolve(experiment.values)


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
        ("tuning: &a [*a]", "refers to itself"),
        ("experiments: [", "not valid YAML"),
        ("rounds: 3", "no mapping 'experiments'"),
    ],
)
def test_a_malformed_simulation_file_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "simulation.yaml"
    path.write_text(text)
    with pytest.raises(SettingError, match=told) as caught:
        read_experiments(path)
    assert "\n" not in str(caught.value)
