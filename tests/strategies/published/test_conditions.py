"""Conditions of published numbers: met, not met, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.site_facts import SiteFacts
from fedsilo.models.methods.uefl import UEFLSettings
from fedsilo.server_app.config.experiments import Experiment, read_experiments
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.loop.reporting import Published
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.registry import strategy_class
from fedsilo.strategies.published.conditions import Conditions, first_of, in_words
from fedsilo.strategies.published.uefl import shifted_digits

ROOT = Path(__file__).resolve().parents[3]
NUMBERS = Published({"all": {"accuracy": 0.5}})
DIGITS = Conditions(
    {"dataset": ["digits"], "batch-size": [32, 64], "uefl.codes": [8]},
    least={"rounds": 5},
    given=["initial-weights"],
    sites=("a", "b"),
)
THERE: dict[str, Any] = {
    "dataset": "digits",
    "batch_size": 64,
    "rounds": 5,
    "initial_weights": "x.safetensors",
}


def beside(sites: tuple[str, ...] = ("a", "b"), own: Any = None, **changes: Any) -> Published:
    return DIGITS.beside(NUMBERS, CommonSettings(**THERE | changes), own, sites)


def test_numbers_stand_where_all_is_as_it_was() -> None:
    assert beside() == NUMBERS
    assert beside(own=UEFLSettings(codes=8)) == NUMBERS
    assert beside(("b", "a"), rounds=50, batch_size=32).unlike == ""


@pytest.mark.parametrize(
    ("changes", "unlike"),
    [
        ({"batch_size": 16}, "'batch-size' is 16 and not 32 or 64"),
        ({"rounds": 4}, "'rounds' is 4 and not 5 or more"),
        ({"initial_weights": ""}, "'initial-weights' names no file"),
        ({"own": UEFLSettings(codes=4)}, "'uefl.codes' is 4 and not 8"),
        ({"sites": ("a",)}, "the sites are without b"),
        ({"sites": ("a", "c", "d")}, "the sites are without b and with 2 that the paper has not"),
        (
            {"batch_size": 1, "rounds": 1},
            "'batch-size' is 1 and not 32 or 64; 'rounds' is 1 and not 5 or more",
        ),
    ],
)
def test_what_differs_is_said_and_no_number_stands(changes: dict[str, Any], unlike: str) -> None:
    found = beside(**changes)
    assert (found, found.unlike) == ({}, unlike)


def test_of_other_data_nothing_is_said() -> None:
    found = beside(dataset="mnist", batch_size=1)
    assert (found, found.unlike) == ({}, "")


def test_many_differences_are_counted() -> None:
    assert in_words(["a", "b", "c", "d"]) == "a; b; c; d"
    assert in_words(["a", "b", "c", "d", "e", "f"]) == "a; b; c; d; 2 more"


def test_of_several_papers_the_one_that_measured_this_stands_then_one_that_measured_its_data() -> (
    None
):
    silent, unlike = Published(), Published(unlike="'rounds' is 1")
    assert first_of(silent, unlike, NUMBERS) == NUMBERS
    assert first_of(silent, unlike).unlike == "'rounds' is 1"
    assert first_of(silent).unlike == ""


def test_of_a_table_with_many_rows_the_nearest_is_told_of() -> None:
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
    found = shifted_digits("UEFL", there, UEFLSettings(codes=64))
    assert found.unlike == "'uefl.codes' is 64 and not 32"


def test_every_experiment_at_a_papers_size_has_the_papers_numbers() -> None:
    experiments = read_experiments(ROOT / "simulation.yaml")
    of_papers = [n for n in experiments if n.endswith(("-heart", "-isic2019", "-mammography"))]
    without = {name for name in of_papers if not _of_experiment(experiments[name])}
    # In no paper: patients of all hospitals pooled
    assert without == {"mix-heart"}


def _of_experiment(experiment: Experiment) -> Published:
    settings = resolve(experiment.values)
    sites = {
        "heart": ("cleveland", "hungary", "switzerland", "va"),
        "isic2019": ("bcn", "msk4", "rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias"),
        "mammography": ("ge", "hologic", "siemens"),
    }[settings.common.dataset]
    facts = {
        name: SiteFacts(name, name, (13,), 2, {"train": [9, 9]}, {"train": "a"}) for name in sites
    }
    participants = Participants(facts, {name: index for index, name in enumerate(sites)})
    method = strategy_class(settings.common.method)
    return method(settings.common, settings.own, participants).published()
