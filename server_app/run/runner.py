"""One run: meet the sites, begin or resume, train, write the run directory, print the table."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from flwr.serverapp import Grid

from fedsilo.core.errors import FedsiloError
from fedsilo.core.one_line import reason_of
from fedsilo.datasets.registry import silo_count
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records.failures import FailureLog
from fedsilo.server_app.records.run_directory import (
    RunDirectory,
    only_writer,
    open_run_directory,
    with_run_name,
)
from fedsilo.server_app.run.beginning import (
    assemble,
    changed_software,
    refuse_other_config,
    terms_of,
    write_beginning,
)
from fedsilo.server_app.run.checks import NOTICES, find_notices
from fedsilo.server_app.run.ending import show_end, write_end
from fedsilo.server_app.run.terminal import make_console, printer, progress_bars
from fedsilo.strategies.loop.ask import TooFewSitesError
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import meet_sites


def run(
    grid: Grid,
    settings: RunSettings,
    launch: Mapping[str, Any] | None = None,
) -> RunDirectory:
    """Run ``settings`` over the sites of ``grid`` and return the run directory.

    ``launch`` holds the engine and resources for config.toml, so that ``fedsilo resume`` uses the
    same. The caller draws the pictures, once the run is complete.

    Raises:
        FedsiloError: the run failed. No file is half-written, and finished rounds can be resumed.
    """
    settings = with_run_name(settings).pin_plugins()
    common, console = settings.common, make_console()
    say = partial(printer(console), style="yellow")
    directory = open_run_directory(common.out, common.run_name, common.resume)
    # Before the sites are asked, because their answers may take minutes
    refuse_other_config(directory, settings)
    if directory.has_ended():
        console.print(f"{directory.path} holds a finished run: nothing to resume")
        return directory
    other = changed_software(directory)
    if other:
        say(other)
    began = time.monotonic()
    participants = meet_sites(grid, common, silo_count(common), terms_of(settings))
    for sentence in find_notices(NOTICES, participants, common):
        say(sentence)
    # Files are written only under the lock, so a second process cannot use the same directory
    with only_writer(directory, new=not common.resume):
        loop, hooks = assemble(settings, participants, directory, console)
        for sentence in loop.method.notices():
            say(sentence)
        write_beginning(directory, settings, participants, launch or {})
        met = time.monotonic()
        progress = hooks.progress
        with progress.following(), progress_bars(console, lambda: progress.progress):
            # The end is within the block too: 'finished' is shown only once summary.json is there
            with _note_failure(loop, hooks.recorder.failures):
                loop.start(grid, common.rounds, common.reply_timeout)
            seconds = {"total": time.monotonic() - began, "rounds": time.monotonic() - met}
            summary = write_end(directory, loop, hooks, seconds, say)
    show_end(directory, loop.method, summary, console)
    return directory


@contextmanager
def _note_failure(loop: RoundLoop, failures: FailureLog) -> Iterator[None]:
    """Record an error that ends the rounds, because the process that shows it ends too."""
    try:
        yield
    except TooFewSitesError:
        raise  # the record already has the failure of each site
    except Exception as error:
        code, cause = "", reason_of(error)
        if isinstance(error, FedsiloError):
            code, cause = error.code, str(error)
        # If the disk is full, the error itself matters and not its record
        with suppress(FedsiloError):
            failures.add(loop.state.round + 1, "", "", code, cause)
        raise
