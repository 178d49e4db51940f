"""A run's beginning without the run: the sites are met, nothing is trained, no directory is made.

What was heard is a ``Meeting``: an engine in this process returns it, the app in a deployment
with the setting 'purpose' at 'meet', writes it to a file in the folder of runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.datasets.registry import silo_count
from fedsilo.models.contract.errors import FedsiloError, RunDirectoryError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records.run_directory import named, runs_folder, silos_document
from fedsilo.server_app.run.notices import what_is_odd, who_is_missing
from fedsilo.server_app.run.runner import terms_of
from fedsilo.strategies.loop.participants import Participants, hear_sites, needed_sites
from fedsilo.strategies.methods.registry import strategy_class


@dataclass(frozen=True)
class Meeting:
    """What the sites said, and what a run would make of it.

    Attributes:
        asked: nodes that were asked.
        needed: sites that a run needs.
        sites: what ``silos.json`` of a run says of each site that can take part.
        refused: a line for each node or pair that cannot, and why.
        notices: what a run would say of missing silos and odd data.
        leaves: what the method makes leave each site, in words.
        noise: the method's own noise that is no differential privacy; empty: none.
        fault: why the method cannot begin with these sites; empty: it can.
    """

    asked: int
    needed: int
    sites: Mapping[str, Mapping[str, Any]]
    refused: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    noise: str = ""
    fault: str = ""

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def meet(grid: Grid, settings: RunSettings) -> Meeting:
    """Ask the sites of ``grid`` who they are, as a run would, and go no further.

    Raises:
        FedsiloError: too few, or too many, are connected, or an operator's file cannot be used.
    """
    common = settings.common
    met = hear_sites(grid, common, silo_count(common), terms_of(settings))
    needed = needed_sites(met, common)
    if not met.facts:
        return Meeting(len(met.asked), needed, {}, met.refused)
    leaves, noise, fault = _begun(settings, met)
    return Meeting(
        len(met.asked),
        needed,
        silos_document(met),
        met.refused,
        (*who_is_missing(met, common), *what_is_odd(met)),
        leaves,
        noise,
        fault,
    )


def _begun(settings: RunSettings, met: Participants) -> tuple[tuple[str, ...], str, str]:
    """Build the method and what it would send first: what leaves, its noise, why it cannot."""
    try:
        cls = strategy_class(settings.common.method)
        method = cls(settings.common, settings.own, met)
        leaves = (*met.leaves(), *method.disclosures().leaves)
        method.initial_state(met.task())
        return leaves, method.disclosures().noise, ""
    except FedsiloError as error:
        return (), "", str(error)


def meet_inline(settings: RunSettings, nodes: int) -> Meeting:
    """Meet ``nodes`` simulated sites in this process; errors as ``meet``."""
    from fedsilo.client_app.app import app
    from fedsilo.server_app.run.inline_engine import InlineGrid, flower_identity, partition_configs

    with flower_identity():
        return meet(InlineGrid(app, settings.as_mapping(), partition_configs(nodes)), settings)


def write_meeting(grid: Grid, settings: RunSettings) -> None:
    """Meet the sites and write what they said to ``meeting_file``."""
    written = json.dumps(meet(grid, settings).document(), indent=2)
    write_atomically(meeting_file(named(settings).common), f"{written}\n")


def meeting_file(common: CommonSettings) -> Path:
    """Return the file of a meeting: ``<out>/<run-name>-meeting.json``."""
    return runs_folder(common.out) / f"{common.run_name}-meeting.json"


def read_meeting(path: Path) -> Meeting:
    """Return the meeting that ``write_meeting`` wrote.

    Raises:
        RunDirectoryError: it is not there or is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        lists = {key: tuple(content[key]) for key in ("refused", "notices", "leaves")}
        return Meeting(**(content | lists))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunDirectoryError(f"{path} cannot be read ({error}): meet the sites again") from None
