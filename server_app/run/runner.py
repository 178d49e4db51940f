"""One run: meet the sites, begin or resume, train, write the run directory, print the table."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from flwr.serverapp import Grid
from rich.console import Console

from fedsilo.core.errors import FedsiloError, RunDirectoryError, SettingError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.methods import title_of
from fedsilo.core.one_line import reason_of
from fedsilo.core.settings.common_settings import AUTO, Aggregation
from fedsilo.datasets.registry import cut_of, data_set, silo_count
from fedsilo.server_app.config import settings as run_settings
from fedsilo.server_app.config.operator_files import operator_terms
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records import run_directory
from fedsilo.server_app.records.checkpoints import BestRound, CheckpointHook
from fedsilo.server_app.records.privacy_account import PrivacyHook
from fedsilo.server_app.records.progress_hook import ProgressHook
from fedsilo.server_app.records.recorder import Recorder
from fedsilo.server_app.records.run_directory import CUT, SILOS, RunDirectory
from fedsilo.server_app.records.tracking import TrackingHook
from fedsilo.server_app.run import checks
from fedsilo.server_app.run.changed_software import changed_site_software, changed_software
from fedsilo.server_app.run.ending import RunHooks, show_end, write_end
from fedsilo.server_app.run.terminal import make_console, printer, progress_bars
from fedsilo.strategies.loop.ask import TooFewSitesError
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants, meet_sites
from fedsilo.strategies.meeting.terms import Terms
from fedsilo.strategies.methods.registry import strategy_class


def run(
    grid: Grid,
    settings: RunSettings,
    launch: Mapping[str, Any] | None = None,
) -> RunDirectory:
    """Train over the sites of ``grid`` as ``settings`` state, and return the run directory.

    This function writes the run's files, except for pictures. It prints notices, progress and the
    table of results. If a resumed run has already finished, one line says so, and nothing else
    happens.

    Args:
        grid: connects the server with the sites.
        settings: the settings of the run.
        launch: the engine and resources, which config.toml stores for ``fedsilo resume``.

    Raises:
        FedsiloError: the run failed. No file is half-written, and a resumed run continues after the
            last finished round.
    """
    settings = run_directory.with_run_name(settings).pin_plugins()
    common, console = settings.common, make_console()
    say = partial(printer(console), style="yellow")
    directory = run_directory.open_run_directory(common.out, common.run_name, common.resume)
    if common.resume:
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
    for sentence in checks.find_notices(checks.NOTICES, participants, common):
        say(sentence)
    if common.resume:
        for sentence in changed_site_software(directory, participants):
            say(sentence)
    # Files are written only under the lock, so a second process cannot use the same directory
    with run_directory.only_writer(directory, new=not common.resume):
        loop, hooks = assemble(settings, participants, directory, console)
        for sentence in loop.method.notices():
            say(sentence)
        write_beginning(directory, settings, participants, launch or {})
        met = time.monotonic()
        progress = hooks.progress
        with progress.following(), progress_bars(console, lambda: progress.progress):
            # The end is within the block too: 'finished' is shown only once summary.json is there
            with _note_failure(loop, hooks.recorder):
                loop.start(grid, common.rounds, common.reply_timeout)
            seconds = {"total": time.monotonic() - began, "rounds": time.monotonic() - met}
            summary = write_end(directory, loop, hooks, seconds, say)
    show_end(directory, loop.method, hooks.recorder, summary, console)
    return directory


@contextmanager
def _note_failure(loop: RoundLoop, recorder: Recorder) -> Iterator[None]:
    """If the ``with`` block fails, note the error in the run's failures, and raise it again.

    The failure is recorded for the round after the last finished one. A TooFewSitesError is not
    recorded, because there is already a failure of each site. If the failure cannot be recorded,
    only the error of the block is raised.
    """
    try:
        yield
    except TooFewSitesError:
        raise
    except Exception as error:
        code, cause = "", reason_of(error)
        if isinstance(error, FedsiloError):
            code, cause = error.code, str(error)
        # If the disk is full, the error itself matters and not its record
        with suppress(FedsiloError):
            recorder.failures.add(loop.state.round + 1, "", "", code, cause)
        raise


def terms_of(settings: RunSettings) -> Terms:
    """Return the conditions for a site to take part, from the operator's files and the method.

    The fields are:

    - ``registry``: the node id of each site,
    - ``weights``: the agreed number of training samples of each site,
    - ``unfit``: a function that returns why a site does not suit the method, or None.

    ``registry`` and ``weights`` are None if the operator has no such file.

    Raises:
        SettingError: a file of the operator cannot be used.
    """
    return dataclasses.replace(operator_terms(settings.common), unfit=settings.own.why_unfit)


def chosen_aggregation(settings: RunSettings, participants: Participants) -> Aggregation:
    """Return the run's rule for averaging models, with 'auto' resolved to "mean" or "norm-clip".

    "norm-clip" limits the size of each site's update, so that no hospital has too much influence.
    'auto' becomes "mean" in simulations, with secure aggregation, and if the method does not
    support "norm-clip" with these settings. In all other runs, it becomes "norm-clip". Any rule
    other than 'auto' is returned unchanged.
    """
    common, cls = settings.common, strategy_class(settings.common.method)
    if common.aggregation != AUTO:
        return common.aggregation
    clipped = dataclasses.replace(common, aggregation="norm-clip")
    is_table = data_set(common.dataset).is_table
    # The papers, which simulations repeat, average without clipping
    if participants.are_simulated() or common.secure_aggregation != "none":
        return "mean"
    try:
        cls.capabilities.refuse_more(clipped, is_table)
        settings.own.check(clipped, is_table)
    except SettingError:  # the method does not average, or not with these settings
        return "mean"
    # It hardly changes an honest run (docs/results/norm-clip.csv)
    return clipped.aggregation


def assemble(
    settings: RunSettings, participants: Participants, directory: RunDirectory, console: Console
) -> tuple[RoundLoop, RunHooks]:
    """Build the round loop and its hooks, which observe the run and write its records.

    First, the aggregation 'auto' is replaced by "mean" or "norm-clip". A line is printed if it
    becomes "norm-clip". Then the sites are checked: their number, changes since a resumed run
    began, and whether they can report the metric for early stopping. A resumed run starts from its
    newest checkpoint, if it has one.

    Returns:
        The loop at its starting state, and those hooks whose records are needed at the end.

    Raises:
        FedsiloError: the sites fail a check, the method cannot build its first state, or the
            checkpoints of a resumed run are unusable.
    """
    common, cls = settings.common, strategy_class(settings.common.method)
    say = printer(console)
    chosen = chosen_aggregation(settings, participants)
    if chosen != common.aggregation:
        common = dataclasses.replace(common, aggregation=chosen)
        if chosen != "mean":
            say(
                f"aggregation: {chosen}, because the sites are real and the run sets none",
                style="yellow",
            )
    checks.raise_first(checks.SITE_CHECKS, checks.Beginning(common, participants, directory))
    # The order matters: a hook uses what earlier hooks have recorded in the round, and the
    # checkpoint comes after all hooks whose states it stores
    recorder = Recorder(directory)
    recording: list[Hook] = [recorder]
    privacy = None
    if common.is_private():
        privacy = PrivacyHook(common)
        recording.append(privacy)
    method, best = cls(common, settings.own, participants), None
    if common.early_stopping_metric != "none":
        best = BestRound(common, directory, recorder, method)
        recording.append(best)
    checkpoint = CheckpointHook(
        directory.checkpoints, settings.decisive(), recording, cls.state_class
    )
    title = f"{title_of(common.method)} on {common.dataset}, seed {common.seed}"
    progress = ProgressHook(directory, common, title, cls.marks, recorder, privacy, say)
    hooks = [*recording, checkpoint, progress]
    if common.track != "none":
        hooks.append(TrackingHook(common, directory.path, recorder, settings.decisive()))
    loop = RoundLoop(method, hooks, str(directory.path))
    if common.resume:
        newest = checkpoint.resume()
        if newest is not None:
            loop.state = newest
    # A method that cannot begin fails here, before anything is written
    _ = loop.state
    return loop, RunHooks(recorder, privacy, progress, best)


def refuse_other_config(directory: RunDirectory, settings: RunSettings) -> None:
    """Check that the run in ``directory`` has the same decisive settings as ``settings``.

    Decisive settings are those that change the result (``RunSettings.decisive``). Nothing is
    checked if the directory has no config.toml.

    Raises:
        RunDirectoryError: a decisive setting differs (the message has both values), config.toml is
            malformed, or another version of fedsilo wrote it.
        SettingError: config.toml cannot be read, or fedsilo refuses its settings or plugins.
    """
    path = directory.path / "config.toml"
    if not path.is_file():
        return
    before = run_settings.resolve_recorded(run_settings.read_run_config(path).settings)
    other = run_settings.differences(before.decisive(), settings.decisive())
    if other:
        raise RunDirectoryError(
            f"{directory.path} holds a run with other settings: {other}; resume with the same "
            "settings, or choose another 'run.name'"
        )


def write_beginning(
    directory: RunDirectory,
    settings: RunSettings,
    participants: Participants,
    launch: Mapping[str, Any],
) -> None:
    """Write silos.json, cut.json and config.toml before the first round.

    silos.json is always written anew. cut.json has the split of the images into silos. It is
    written only for a simulation whose data set fedsilo splits at random. A resumed run keeps its
    config.toml.

    Args:
        directory: the run directory.
        settings: the run's settings.
        participants: the sites that answered, with their facts.
        launch: the engine and resources for config.toml. It is empty if they are unknown.
    """
    directory.write_json(SILOS, run_directory.silos_document(participants))
    if participants.are_simulated():
        cut = cut_of(settings.common)
        if cut:
            directory.write_json(CUT, cut)
    # config.toml comes last, because a directory without it can be used again
    config = directory.path / "config.toml"
    if not config.is_file():
        write_atomically(config, run_directory.config_document(settings, launch))
