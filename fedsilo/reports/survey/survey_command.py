"""``fedsilo survey``: ask simulated sites or a deployment's, and write the page."""

import re
import time
from collections.abc import Callable
from pathlib import Path

from fedsilo.core.arguments import RunSources
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.settings_schema import Value
from fedsilo.deployment import deployed_run as deployed
from fedsilo.engines.inline_engine import inline_grid
from fedsilo.engines.planning import plan_run
from fedsilo.reports.survey.document import read_survey_document
from fedsilo.reports.survey.survey_page import survey_page
from fedsilo.server_app.run.survey import SURVEY, run_survey

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
    """Ask an experiment's sites about their data, and return the page; survey.json is next to it.

    The experiment decides which data set, and how it is cut. Asked are the hospitals of a
    ``deployment`` or simulated sites, ``supernodes`` or the experiment's number of them.

    Raises:
        FedsiloError: no site answers, or the request cannot be met.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    run_name = name or f"survey-{re.sub(r'[^A-Za-z0-9._+-]', '-', experiment)}-{stamp}"
    overrides: dict[str, Value] = {
        "run.purpose": "survey",
        "run.name": run_name,
        "run.resume": False,
    }
    if deployment is not None:
        folder = deployed.run(experiment, deployment, sources, say, overrides=overrides)
    else:
        settings, resources = plan_run(
            experiment, sources, supernodes=supernodes, overrides=overrides
        )
        with inline_grid(settings, int(resources["num-supernodes"])) as grid:
            folder = run_survey(grid, settings, say).path
    document = read_survey_document(folder / SURVEY)
    write_atomically(folder / PAGE, survey_page(document))
    return folder / PAGE
