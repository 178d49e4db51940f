"""The Flower ServerApp: from run config to run directory. It knows no method by name."""

from __future__ import annotations

import json
import logging
import os

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsilo.models.contract.errors import FedsiloError, RunDirectoryError

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run config asks for.

    Raises:
        FedsiloError: with one line that says what was wrong and what to do; logged before.
    """
    from fedsilo.server_app.config.settings import resolve
    from fedsilo.server_app.run.meeting import write_meeting
    from fedsilo.server_app.run.ray_engine import LAUNCH_VARIABLE
    from fedsilo.server_app.run.runner import run
    from fedsilo.server_app.run.survey import run_survey
    from fedsilo.server_app.studies.figures.learning_curves import draw_run

    try:
        launch = json.loads(os.environ.get(LAUNCH_VARIABLE, "{}"))
        settings = resolve(context.run_config)
        if settings.common.purpose == "meet":
            write_meeting(grid, settings)
        elif settings.common.purpose == "survey":
            run_survey(grid, settings)
        else:
            run(grid, settings, launch, draw_run)
    except FedsiloError as error:
        logging.getLogger("flwr").error("fedsilo: %s", error)
        raise
    except OSError as error:
        line = f"{error.filename or 'system'}: {error.strerror}"
        logging.getLogger("flwr").error("fedsilo: %s", line)
        raise RunDirectoryError(line) from error
