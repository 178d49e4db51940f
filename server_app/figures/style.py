"""What the pictures of finished runs have in common: titles, sites, colours."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from client_app.methods.base import SiteMethod
from models.contract.errors import FedsiloError, SettingError
from models.contract.settings_schema import as_mapping, defaults
from models.networks.site_network import SiteNetwork
from server_app.config.settings import RunSettings
from server_app.figures.explain import finished_site
from server_app.records.run_directory import RunDirectory

Colour = tuple[float, float, float, float]


def run_title(run_dir: Path, settings: RunSettings) -> str:
    """Return a run's name, and below it the method with what it does otherwise than by default."""
    usual = defaults(type(settings.own))
    switches = [
        f"{key} {value}" for key, value in as_mapping(settings.own).items() if value != usual[key]
    ]
    method = RunDirectory(run_dir).read_json("summary.json")["title"]
    told = textwrap.wrap(", ".join([method, *switches]), 40, break_on_hyphens=False)
    return "\n".join([run_dir.resolve().name, *told])


def sites_of(run_dir: Path, wanted: Sequence[str]) -> list[str]:
    """Return the sites of a run, or those of them that are ``wanted``.

    Raises:
        SettingError: one is not in the run.
    """
    sites = list(RunDirectory(run_dir).read_json("silos.json"))
    for site in wanted:
        if site not in sites:
            raise SettingError(
                f"there is no site '{site}' in {run_dir}: its sites are {', '.join(sites)}"
            )
    return [site for site in sites if site in wanted] if wanted else sites


def opened(
    run_dir: Path, site: str, data_dir: Path | None, state_dir: Path | None
) -> tuple[SiteMethod, SiteNetwork]:
    """Return a site's method at the end of a run, and its network.

    Raises:
        FedsiloError: the run has not ended, or nothing of its model or the data is here.
    """
    method = finished_site(run_dir, site, data_dir, state_dir)
    return method, method.open_network()


@contextmanager
def naming(run_dir: Path) -> Iterator[None]:
    """Put the run, of which there may be several, before what went wrong with it."""
    try:
        yield
    except FedsiloError as error:
        told = str(error)
        raise type(error)(told if str(run_dir) in told else f"{run_dir}: {told}") from None


def refuse_shared_state(state_dir: Path | None, runs: Sequence[Path], sites: int) -> None:
    """Refuse one folder of private state for several runs or sites, by a ``SettingError``."""
    if state_dir and (len(runs) > 1 or sites > 1):
        raise SettingError(
            f"--state-dir {state_dir} is the state of one site in one run: name one of each, or "
            "leave it out where the states lie in the run directories"
        )


def colours(names: Sequence[str]) -> dict[str, Colour]:
    """Return a colour of each name; up to twenty are told apart well."""
    from matplotlib import colormaps

    if len(names) <= 20:
        palette: Any = colormaps["tab10" if len(names) <= 10 else "tab20"]
        return {name: palette(index) for index, name in enumerate(names)}
    palette = colormaps["turbo"]
    return {name: palette(index / (len(names) - 1)) for index, name in enumerate(names)}
