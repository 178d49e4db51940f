"""The matrix of an experiment: the names and settings of its cells, and their short form."""

import itertools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.core.errors import SettingError
from fedsilo.engines.experiments import Experiment, find_experiment, read_experiments
from fedsilo.engines.matrix import Cell, fill_all, list_cells, write_braces


def _read(folder: Path, experiments: dict[str, Any]) -> dict[str, Experiment]:
    path = folder / "simulation.yaml"
    path.write_text(yaml.safe_dump({"experiments": experiments}, sort_keys=False))
    return read_experiments(path)


def test_each_combination_of_values_is_an_experiment(tmp_path: Path) -> None:
    found = _read(
        tmp_path,
        {
            "short-{method}{size}": {
                "matrix": {
                    "method": ["fedavg", "local"],
                    "size": {"": None, "-cpu": {"config": {"width": 4}}},
                },
                "config": {"method": "{method}", "width": 128},
            }
        },
    )
    assert {name: one.values for name, one in found.items()} == {
        "short-fedavg": {"method": "fedavg", "network.width": 128},
        "short-fedavg-cpu": {"method": "fedavg", "network.width": 4},
        "short-local": {"method": "local", "network.width": 128},
        "short-local-cpu": {"method": "local", "network.width": 4},
    }


def test_a_value_keeps_its_type_where_a_text_is_only_its_placeholder(tmp_path: Path) -> None:
    found = _read(
        tmp_path,
        {
            "a-{gamma}-{codes}": {
                "about": "gamma {gamma}",
                "matrix": {"gamma": [0.1, 1], "codes": ["8"]},
                "config": {"uefl": {"gamma": "{gamma}"}, "track": "{codes}", "out": "r-{gamma}"},
                "grid": {"uefl.gamma": ["{gamma}", 2.0]},
            }
        },
    )
    first, second = found["a-0.1-8"], found["a-1-8"]
    assert first.values == {"uefl.gamma": 0.1, "run.track": "8", "run.out": "r-0.1"}
    assert first.grid == {"uefl.gamma": [0.1, 2.0]}
    assert (first.about, second.about) == ("gamma 0.1", "gamma 1")
    assert type(second.values["uefl.gamma"]) is int


def test_later_placeholders_replace_what_earlier_ones_and_the_entry_set(tmp_path: Path) -> None:
    found = _read(
        tmp_path,
        {
            "{a}-{b}": {
                "matrix": {
                    "a": {"x": {"config": {"seed": 2, "rounds": 2}, "trials": 5}},
                    "b": {"y": {"config": {"seed": 3}, "grid": {"seed": [1]}, "minutes": 4}},
                },
                "config": {"seed": 1, "rounds": 1, "silos": 4},
                "grid": {"rounds": [1]},
                "trials": 1,
            }
        },
    )
    one = found["x-y"]
    assert one.values == {"seed": 3, "rounds": 2, "split.silos": 4}
    assert one.grid == {"rounds": [1], "seed": [1]}
    assert (one.trials, one.minutes) == (5, 4)


def test_a_base_may_be_a_cell_and_depend_on_the_value(tmp_path: Path) -> None:
    found = _read(
        tmp_path,
        {
            "base-{size}": {
                "matrix": {"size": {"large": {"config": {"width": 128}}, "small": None}},
                "config": {"width": 4},
            },
            "own-{size}": {"base": "base-{size}", "matrix": {"size": ["large", "small"]}},
            "other-{kind}": {
                "matrix": {"kind": {"a": {"base": "base-large"}, "b": {"base": "own-small"}}},
                "config": {"seed": 7},
            },
        },
    )
    assert found["own-large"].values == {"network.width": 128}
    assert found["own-small"].values == {"network.width": 4}
    assert found["other-a"].values == {"network.width": 128, "seed": 7}
    assert found["other-b"].values == {"network.width": 4, "seed": 7}


def test_an_unknown_cell_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    _read(tmp_path, {"table7-gamma-{gamma}": {"matrix": {"gamma": [0.1, 0.2]}}})
    with pytest.raises(SettingError, match=r"did you mean 'table7-gamma-0\.[12]'"):
        find_experiment(tmp_path / "simulation.yaml", "table7-gamma-0.3")


_WORDS = st.lists(st.text("abz019-.", max_size=4), min_size=1, max_size=3, unique=True)


@settings(max_examples=50, deadline=None)
@given(first=_WORDS, second=_WORDS)
def test_names_are_the_product_and_their_short_form_is_what_a_shell_expands(
    first: list[str], second: list[str]
) -> None:
    matrix = {"a": dict.fromkeys(first), "b": dict.fromkeys(second)}
    wanted = [f"x{one}_{two}_" for one, two in itertools.product(first, second)]
    cells = list_cells("x{a}_{b}_", matrix)
    assert [cell.name for cell in cells] == wanted
    short = write_braces("x{a}_{b}_", cells)
    assert short is not None
    bash = shutil.which("bash") or "bash"
    done = subprocess.run([bash, "-c", f"echo {short}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == wanted


def test_cells_that_are_no_product_have_no_short_form() -> None:
    cells = [Cell("{a}{b}", {"a": one, "b": two}) for one, two in ("xx", "xy", "yx")]
    assert write_braces("{a}{b}", cells) is None
    assert write_braces("{a}{b}", cells[:2]) == "x{x,y}"


def test_keys_and_other_values_are_not_filled() -> None:
    content = {"{a}": ["{a}", 3, True, None, "{momentum: 0.9}", "{a}{a}"]}
    assert fill_all(content, {"a": 1}) == {"{a}": [1, 3, True, None, "{momentum: 0.9}", "11"]}


def test_the_entries_of_the_page_about_experiments_are_what_it_says(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "experiments.md").read_text()
    entry, matrix = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "simulation.yaml").write_text(entry + matrix)
    found = read_experiments(tmp_path / "simulation.yaml")
    names = ["fedavg-digits", "fedavg-digits-short", "fedbn-digits", "fedbn-digits-short"]
    assert list(found) == ["fedavg-hearts", "picsr-hearts", *names]
    assert all(f"`{name}`" in page for name in names)
    assert found["picsr-hearts"].values["train.learning-rate"] == 0.001
    assert found["fedbn-digits-short"].values["rounds"] == 3
