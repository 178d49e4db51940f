"""Describes a planned run without starting it: the plan, its cost, and what it would write."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from fedsilo.core.one_line import as_word, format_count
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import load_silo, silo_names
from fedsilo.engines.planning import estimate_steps
from fedsilo.models.networks.build import build_classifier
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records.progress import bytes_text
from fedsilo.server_app.records.run_directory import open_run_directory
from fedsilo.server_app.run.checks import PLAN_CHECKS, Plan, raise_first

NOTHING_RUN = "nothing was run or written; the same command without --dry-run starts it"
_WEIGHT = 4  # bytes of a float32


def describe_run(
    settings: RunSettings, resources: Mapping[str, Value], engine: str
) -> Iterator[str]:
    """Check that a planned run could begin, and yield three lines that describe it.

    The lines give the plan, the estimated computing steps and message size, and the folder of the
    run. Nothing is run or written, but the first site's data are read for the estimate.

    Args:
        settings: the settings of the run.
        resources: the number of simulated sites and their shares of cores and GPUs, with all keys
            that ``check_resources`` returns.
        engine: the engine that would run it, or ``auto``.

    Raises:
        FedsiloError: the run could not begin, for example because its directory exists already.
    """
    common = settings.common
    directory = open_run_directory(common.out, common.run_name, common.resume)
    raise_first(PLAN_CHECKS, Plan(common, resources, engine))
    sites = format_count(int(resources["num-supernodes"]), "site")
    rounds = format_count(common.rounds, "round")
    yield f"plan: {common.method} on {common.dataset}, {sites}, {rounds}, seed {common.seed}"
    yield f"cost: {_cost(settings)}"
    yield f"would write: {as_word(Path(directory.path))}"


def _cost(settings: RunSettings) -> str:
    """Estimate the cost of a run in one phrase.

    The phrase has three numbers:

    - the optimiser steps of all sites in all rounds
    - the number of values in the network, such as its weights
    - the bytes of a message that holds the whole network

    The data of the first site are loaded, because the shape of the samples is needed.
    """
    common = settings.common
    steps = format_count(estimate_steps(common), "optimiser step")
    shape = load_silo(silo_names(common)[0], common).shape
    weights = 0
    for array in build_classifier(common, shape).state_dict().values():
        weights += array.numel()
    return (
        f"about {steps} of all sites together; a network of {weights:,} numbers, so "
        f"{bytes_text(weights * _WEIGHT)} in each message that holds all of it"
    )
