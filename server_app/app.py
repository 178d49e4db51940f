"""The Flower ServerApp: from run config to run directory. It knows no method by name."""

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
        FedsiloError: one line that says what is wrong and what to do; it is logged first.
    """
    log = logging.getLogger("flwr")
    try:
        _run(grid, context)
    except FedsiloError as error:
        log.error("fedsilo: %s", error)
        raise
    except OSError as error:
        line = f"{error.filename or 'system'}: {error.strerror}"
        log.error("fedsilo: %s", line)
        raise RunDirectoryError(line) from error


def _run(grid: Grid, context: Context) -> None:
    from fedsilo.server_app.config.settings import resolve
    from fedsilo.server_app.run.meeting import write_meeting
    from fedsilo.server_app.run.ray_engine import LAUNCH_VARIABLE
    from fedsilo.server_app.run.runner import run
    from fedsilo.server_app.studies.finish import finish_run
    from fedsilo.server_app.studies.survey.collect import run_survey

    settings = resolve(context.run_config)
    if settings.common.purpose == "meet":
        write_meeting(grid, settings)
    elif settings.common.purpose == "survey":
        run_survey(grid, settings)
    else:
        run(grid, settings, json.loads(os.environ.get(LAUNCH_VARIABLE, "{}")), finish_run)
