"""The Flower ServerApp, which turns a run config into a run directory."""

import json
import logging
import os
import warnings
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsilo.core.errors import FedsiloError, RunDirectoryError, describe_system_error
from fedsilo.core.one_line import as_word
from fedsilo.core.processes import LAUNCH, VERBOSE

app = ServerApp()


class _WithoutTraceback(logging.Filter):
    """Hides Flower's traceback and exit code after the app has logged the error in one line."""

    dropped = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False to hide a log record, or True to show it.

        A record whose exception is a FedsiloError is hidden, because the app logs that error as one
        line. After the first hidden record, Flower's records of the exit are redundant. So records
        whose message starts with "Exit Code" are hidden from then on. All other records are shown.
        """
        error = None
        if record.exc_info:
            error = record.exc_info[1]
        self.dropped |= isinstance(error, FedsiloError)
        ours = isinstance(error, FedsiloError) or str(record.msg).startswith("Exit Code")
        return not (self.dropped and ours)


_WITHOUT_TRACEBACK = _WithoutTraceback()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Do the work that the setting 'run.purpose' names: a meeting, a survey or a training run.

    A meeting ("meet") checks whether training could begin with the connected sites. A survey
    ("survey") asks the sites to describe their data. Neither trains anything. Flower calls this
    function when the server's app starts.

    Args:
        grid: connects the server with the sites.
        context: Flower's context, which holds the run config.

    Raises:
        FedsiloError: the work failed. The error is first logged as one line. An OSError is logged
            in the same way. It is then raised as a RunDirectoryError, which is a FedsiloError, with
            the OSError as its cause. All other exceptions pass through unlogged.
    """
    warnings.filterwarnings("ignore", "Tip: In future versions of Ray", FutureWarning)
    log = logging.getLogger("flwr")
    if not os.environ.get(VERBOSE):
        log.addFilter(_WITHOUT_TRACEBACK)
    # Logged at once, because loading PyTorch, Ray and the data may take half a minute
    log.info("fedsilo: loading PyTorch and asking the sites who they are")
    try:
        _run(grid, context)
    except FedsiloError as error:
        log.error("fedsilo: %s", error)
        raise
    except OSError as error:
        line = describe_system_error(error)
        log.error("fedsilo: %s", line)
        raise RunDirectoryError(line) from error


def _run(grid: Grid, context: Context) -> None:
    from fedsilo.server_app.config.settings import resolve
    from fedsilo.server_app.run.checks import DATA_CHECKS, Plan, check_vectorised, raise_first
    from fedsilo.server_app.run.meeting import write_meeting
    from fedsilo.server_app.run.runner import run
    from fedsilo.server_app.run.survey import run_survey
    from fedsilo.strategies.meeting.simulated_sites import is_simulation, with_all_sites
    from fedsilo.strategies.wire.messaging import retry_soon

    retry_soon()
    settings = resolve(context.run_config)
    launch: dict[str, Any] = json.loads(os.environ.get(LAUNCH, "{}"))
    # Without a launch, 'flwr run' was called by hand, with any number of SuperNodes
    if not launch and is_simulation(grid):
        grid = with_all_sites(grid, settings.common)
        raise_first(DATA_CHECKS, Plan(settings.common, engine="ray"))
    if settings.common.purpose == "meet":
        write_meeting(grid, settings)
    elif settings.common.purpose == "survey":
        run_survey(grid, settings)
    else:
        raise_first((check_vectorised,), Plan(settings.common, engine=launch.get("engine", "ray")))
        directory = run(grid, settings, launch)
        # 'flwr run' draws no pictures, unlike a command of fedsilo
        if not launch:
            print(f"to draw its pictures: fedsilo plot {as_word(directory.path)}")
