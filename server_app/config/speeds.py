"""The setting 'speeds': how many optimiser steps a virtual second each simulated site takes."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsilo.datasets.io.yaml_text import read_yaml, structured
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.one_line import shown
from fedsilo.models.contract.seeding import derive_seed
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.maths.pacing import steps_of_round

if TYPE_CHECKING:  # a command that lists loads no PyTorch
    from fedsilo.strategies.meeting.participants import Participants

_DRAWN = "lognormal:"
_FILES = (".yaml", ".yml", ".json")


def written_out(text: str) -> str:
    """Return 'speeds' with a file's content in place of its name, or raise a SettingError."""
    if not text.endswith(_FILES):
        return text
    return json.dumps(read_yaml(Path(text).expanduser(), SettingError))


def site_speeds(common: CommonSettings, sites: Sequence[str]) -> dict[str, float]:
    """Return the speed of each site; one that a mapping does not name has 1.

    Raises:
        SettingError: a speed is not above 0, a site is unknown, or the text says something else.
    """
    declared = declared_speeds(common.speeds)
    if isinstance(declared, float):
        draws = {s: np.random.default_rng(derive_seed(common.seed, "speed", s)) for s in sites}
        return {s: math.exp(declared * draw.standard_normal()) for s, draw in draws.items()}
    if isinstance(declared, list):
        if len(declared) != len(sites):
            raise SettingError(
                f"setting 'speeds' has {len(declared)} speeds, and there are {len(sites)} sites: "
                "give one for each, in the order of their names"
            )
        return dict(zip(sorted(sites), declared, strict=True))
    if unknown := [str(site) for site in declared if site not in sites]:
        raise SettingError(
            f"setting 'speeds' names site {shown(unknown[0])}; the sites are {', '.join(sites)}"
        )
    return {site: declared.get(site, 1.0) for site in sites}


def seconds_of(common: CommonSettings, participants: "Participants") -> dict[str, float]:
    """Return how long a round takes each site on the virtual clock; nothing of sites that are real.

    Raises:
        SettingError: 'speeds' are of sites that are real, see also ``site_speeds``.
    """
    if not participants.simulated():
        if common.speeds:
            raise SettingError(
                "setting 'speeds' is of simulated sites, and these are real: remove it"
            )
        return {}
    speeds = site_speeds(common, participants.sites())
    sizes = {site: facts.sizes().get("train", 1) for site, facts in participants.facts.items()}
    return {site: steps_of_round(common, sizes[site]) / speeds[site] for site in speeds}


def declared_speeds(text: str) -> Any:
    """Return the deviation of a distribution, a list of speeds, or speeds by site.

    Raises:
        SettingError: the text is of none of them, or a speed is not above 0.
    """
    if text.startswith(_DRAWN):
        return _number("the deviation of 'speeds'", text.removeprefix(_DRAWN))
    text = written_out(text)
    example = "[1, 1, 0.1]" if text.lstrip().startswith("[") else "{north: 0.1}"
    content = structured("speeds", text, example)
    by_site = isinstance(content, dict)
    named = content if by_site else dict(enumerate(content, start=1))
    speeds = {s: _number(f"the speed of site {s} in 'speeds'", named[s]) for s in named}
    return speeds if by_site else list(speeds.values())


def _number(what: str, given: Any) -> float:
    try:
        number = float("nan" if isinstance(given, bool) else given)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise SettingError(f"{what} is {shown(given)}; it must be a number above 0")
    return number
