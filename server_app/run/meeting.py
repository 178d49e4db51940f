"""A rehearsal of a run: the sites are asked for their facts, but nothing is trained.

The result is a ``Meeting``, and no run directory is made. An engine in this process returns the
meeting. In a deployment the setting 'run.purpose' is "meet", and the app writes the meeting to
``meeting_file``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from pydantic import TypeAdapter

from fedsilo.core.errors import FedsiloError, RunDirectoryError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.files.text_files import file_fault
from fedsilo.core.one_line import one_line
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import silo_count
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records.run_directory import runs_folder, silos_document, with_run_name
from fedsilo.server_app.run import checks
from fedsilo.server_app.run.runner import chosen_aggregation, terms_of
from fedsilo.strategies.meeting.participants import hear_sites, needed_sites
from fedsilo.strategies.methods.registry import strategy_class


@dataclass(frozen=True)
class Meeting:
    """The replies of the sites, and the conclusions that a run would draw from them.

    Attributes:
        asked: number of nodes that were asked.
        needed: number of sites that a run needs.
        sites: for each site that can take part, its entry in a run's ``silos.json``.
        refused: a line with the reason for each node that cannot take part.
        notices: the lines that a run would print about missing silos and odd data.
        leaves: a description of the data that leave each site under the method.
        noise: a description of the method's noise that is not differential privacy, or empty.
        fault: the reason why the method cannot begin with these sites, or empty.
    """

    asked: int
    needed: int
    sites: Mapping[str, Mapping[str, Any]]
    refused: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    noise: str = ""
    fault: str = ""


def meet(grid: Grid, settings: RunSettings) -> Meeting:
    """Ask the sites for their facts, and check whether a run with these settings could begin.

    Nothing is trained, and no run directory is made. The sites are checked as in a run, and the
    method's first state is built. If this fails, the error's text becomes ``fault``. The texts
    ``leaves`` (the data that leave a site) and ``noise`` are then empty.

    If no site can take part, nothing is checked. ``refused`` has the reasons, and ``sites``,
    ``notices``, ``leaves`` and ``fault`` are empty.

    Raises:
        FedsiloError: too few or too many nodes are connected, 'server.sites' is not usable, or a
            file of the operator cannot be used.
    """
    common = settings.common
    met = hear_sites(grid, common, silo_count(common), terms_of(settings))
    heard = Meeting(len(met.asked), needed_sites(met, common), silos_document(met), met.refused)
    if not met.facts:
        return heard
    # The checks that could stop the run come last, so that the report has everything else by then
    heard = replace(heard, notices=tuple(checks.find_notices(checks.DOCTOR_NOTICES, met, common)))
    common = replace(common, aggregation=chosen_aggregation(settings, met))
    try:
        checks.raise_first(checks.SITE_CHECKS, checks.Beginning(common, met))
        method = strategy_class(common.method)(common, settings.own, met)
        method.initial_state()
    except FedsiloError as error:
        return replace(heard, fault=str(error))
    return replace(heard, leaves=tuple(method.leaves()), noise=method.disclosures().noise)


def write_meeting(grid: Grid, settings: RunSettings) -> None:
    """Meet the sites (``meet``), and write the result as JSON into the folder of run directories.

    A meeting is a rehearsal of a run. The file is ``<run-name>-meeting.json``, and an existing file
    is replaced. If the settings have no run name, a name is generated.

    Raises:
        FedsiloError: the sites cannot be met, or the folder is a relative path.
    """
    written = TypeAdapter(Meeting).dump_json(meet(grid, settings), indent=2)
    write_atomically(meeting_file(with_run_name(settings).common), written)


def meeting_file(common: CommonSettings) -> Path:
    """Return the path of a meeting's file: ``<out>/<run-name>-meeting.json``."""
    return runs_folder(common.out) / f"{common.run_name}-meeting.json"


def read_meeting(path: Path) -> Meeting:
    """Read the meeting (the rehearsal of a run) that ``write_meeting`` wrote to ``path``.

    Raises:
        RunDirectoryError: the file is missing, unreadable or malformed.
    """
    # Checked first, because reading a pipe would wait for its writer
    fault = file_fault(path)
    if fault is None:
        try:
            return TypeAdapter(Meeting).validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            fault = f"cannot be read ({one_line(error, 200)})"
    raise RunDirectoryError(f"{path} {fault}: meet the sites again")
