"""A survey from an experiment's name to its page: over simulated sites, or over a deployment."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.deploy import run as deployed
from fedsilo.server_app.run.inline_engine import inline_grid
from fedsilo.server_app.run.planning import RunSources, planned
from fedsilo.server_app.studies.survey.collect import FILE, run_survey
from fedsilo.server_app.studies.survey.document import read_survey_document
from fedsilo.server_app.studies.survey.page import survey_page

PAGE = "survey.html"
Say = Callable[[str], None]


def survey(
    experiment: str,
    sources: RunSources,
    say: Say,
    *,
    deployment: Path | None = None,
    supernodes: int | None = None,
    name: str | None = None,
) -> Path:
    """Ask an experiment's sites what their data are like.

    Args:
        experiment: its name: which data set, cut how.
        sources: where its settings come from.
        say: is told who answers, and each command.
        deployment: ask the hospitals of this one; None: simulated sites.
        supernodes: simulated sites; None: the experiment's.
        name: of the run directory; None: experiment and time.

    Returns:
        The page; ``survey.json`` lies beside it.

    Raises:
        FedsiloError: no site answers, or what is asked for cannot be.
    """
    run_name = name or _name(experiment)
    overrides: dict[str, Value] = {"purpose": "survey", "run-name": run_name, "resume": False}
    if deployment is not None:
        folder = deployed.run(experiment, deployment, sources, say, overrides=overrides)
    else:
        settings, resources = planned(
            experiment, sources, supernodes=supernodes, overrides=overrides
        )
        with inline_grid(settings, int(resources["num-supernodes"])) as grid:
            folder = run_survey(grid, settings, say).path
    document = read_survey_document(folder / FILE)
    write_atomically(folder / PAGE, survey_page(document))
    return folder / PAGE


def _name(experiment: str) -> str:
    """Return a name that no earlier run has."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"survey-{re.sub(r'[^A-Za-z0-9._+-]', '-', experiment)}-{stamp}"
