"""Conditions of published numbers: met, not met, and what is said of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsilo.core.methods import known_defaults
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import as_mapping
from fedsilo.engines.experiments import Experiment, read_experiments
from fedsilo.models.methods.uefl import UEFLSettings
from fedsilo.runs.published.published_numbers import (
    Conditions,
    Published,
    in_words,
    published_numbers,
)
from fedsilo.server_app.config.settings import resolve

ROOT = Path(__file__).resolve().parents[4]
FILES = sorted((ROOT / "fedsilo" / "runs" / "published").glob("*.yaml"))
DIGITS = Conditions(
    {"dataset": ["digits"], "train.batch-size": [32, 64], "uefl.codes": [8]},
    at_least={"rounds": 5},
    files=["train.initial-weights"],
    sites=("a", "b"),
)
MISSING_AND_MORE = "the sites are without b and with 2 more than in the paper"
THERE: dict[str, Any] = {
    "dataset": "digits",
    "batch_size": 64,
    "rounds": 5,
    "initial_weights": "x.safetensors",
}


def departures(sites: tuple[str, ...] = ("a", "b"), own: Any = None, **changes: Any) -> str:
    values = as_mapping(CommonSettings(**THERE | changes)) | (as_mapping(own) if own else {})
    return in_words(DIGITS.departures(values, sites))


def test_conditions_of_the_papers_setting_have_no_departures() -> None:
    assert departures() == ""
    assert departures(own=UEFLSettings(codes=8)) == ""
    assert departures(("b", "a"), rounds=50, batch_size=32) == ""


@pytest.mark.parametrize(
    ("changes", "unlike"),
    [
        ({"batch_size": 16}, "'train.batch-size' is 16, but must be 32 or 64"),
        ({"rounds": 4}, "'rounds' is 4, but must be at least 5"),
        ({"initial_weights": ""}, "'train.initial-weights' names no file"),
        ({"own": UEFLSettings(codes=4)}, "'uefl.codes' is 4, but must be 8"),
        ({"sites": ("a",)}, "the sites are without b"),
        (
            {"sites": ("a", "c", "d")},
            MISSING_AND_MORE,
        ),
        (
            {"batch_size": 1, "rounds": 1},
            "'train.batch-size' is 1, but must be 32 or 64; 'rounds' is 1, but must be at least 5",
        ),
    ],
)
def test_conditions_of_another_setting_name_what_differs(
    changes: dict[str, Any], unlike: str
) -> None:
    assert departures(**changes) == unlike


def test_published_numbers_of_other_data_are_none_without_a_reason() -> None:
    values = as_mapping(CommonSettings(method="fedavg", dataset="digits", batch_size=16))
    assert published_numbers(values, ["s1a"]) == Published()


def test_in_words_of_six_differences_counts_the_last_two() -> None:
    assert in_words(["a", "b", "c", "d"]) == "a; b; c; d"
    assert in_words(["a", "b", "c", "d", "e", "f"]) == "a; b; c; d; 2 more"


def test_published_numbers_of_many_rows_name_how_the_nearest_differs() -> None:
    there = CommonSettings(
        dataset="mnist",
        width=128,
        leading_norm=False,
        pixel_scale="raw",
        local_epochs=20,
        batch_size=1024,
        learning_rate=1e-4,
        rounds=60,
    )
    found = published_numbers(as_mapping(there) | as_mapping(UEFLSettings(codes=64)), [])
    assert found.unlike == "'uefl.codes' is 64, but must be 32"


def test_every_experiment_at_a_papers_size_has_its_numbers() -> None:
    experiments = read_experiments(ROOT / "simulation.yaml")
    ends = ("-heart", "-isic2019", "-mammography")
    of_papers = [name for name in experiments if name.endswith(ends)]
    without = {name for name in of_papers if not _of_experiment(experiments[name]).numbers}
    # PICSR's table has neither pooled patients nor these rivals of ours
    ours = (
        *(
            "fedyogi",
            "fedadagrad",
            "scaffold",
            "feddyn",
            "cyclic",
            "fedper",
            "fedrep",
        ),
        *("fedswa", "ditto", "apfl", "fedbabu"),
    )
    rivals = {f"{name}-heart" for name in ours}
    assert without == {"mix-heart"} | rivals


def _of_experiment(experiment: Experiment) -> Published:
    settings = resolve(experiment.values)
    sites = {
        "heart": ("cleveland", "hungary", "switzerland", "va"),
        "isic2019": ("bcn", "msk4", "rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias"),
        "mammography": ("ge", "hologic", "siemens"),
    }[settings.common.dataset]
    return published_numbers(settings.as_mapping(), sites)


def _keys_of_conditions(content: Any) -> Iterator[str]:
    """Yield the keys that conditions name anywhere in a paper's file."""
    if isinstance(content, list):
        for item in content:
            yield from _keys_of_conditions(item)
    elif isinstance(content, dict):
        for name in ("settings", "at-least", "files", "defaults"):
            yield from content.get(name, ())
        for item in content.values():
            yield from _keys_of_conditions(item)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_condition_names_a_setting_because_a_misspelt_one_would_hold_for_every_run(
    path: Path,
) -> None:
    named = set(_keys_of_conditions(yaml.safe_load(path.read_text())))
    assert named - known_defaults().keys() == set()


def test_the_papers_files_have_conditions() -> None:
    contents = [yaml.safe_load(path.read_text()) for path in FILES]
    assert len({key for content in contents for key in _keys_of_conditions(content)}) > 20
