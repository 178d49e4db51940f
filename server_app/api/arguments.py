"""What the functions of the API take: paths, runs and settings, in the forms that suit a caller."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, cast

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.api.run import Run

if TYPE_CHECKING:
    from fedsilo.server_app.run.planning import RunSources

AnyPath = Path | str
AnyRun = Run | Path | str  # a run, or its directory
Settings = Mapping[str, Value] | Sequence[str]  # by key, {"uefl.gamma": 0.2}, or as key=value
Tell = Callable[[str], None]  # takes a line about what goes on
Watch = Callable[[int, int], None]  # takes how much is done, and of how much

Engine = Literal["ray", "inline"]
Layer = Literal["embedding", "penultimate"]
Reader = Literal["research", "clinic", "dpo"]
Split = Literal["train", "val", "test"]
MeasuredSplit = Literal["test", "val"]
Track = Literal["none", "tensorboard", "mlflow"]


class Changes(TypedDict, total=False):
    """Where settings come from: ``settings`` are over ``config``, and both over the experiment's.

    ``file`` is the simulation.yaml with the experiment; by default the working folder's or, if
    there is none, fedsilo's own.
    """

    settings: Settings | None
    config: AnyPath | None
    file: AnyPath | None


class Sources(Changes, total=False):
    """Where the settings of a run come from, and the folder of its run directory."""

    out: AnyPath | None


def path_of(given: AnyPath | None) -> Path | None:
    """Return a path that was given as a path or a text."""
    return None if given is None else Path(given)


def folder_of(run: AnyRun) -> Path:
    """Return the run directory of a run."""
    return run.path if isinstance(run, Run) else Path(run)


def folders_of(runs: Sequence[AnyRun]) -> list[Path]:
    """Return the run directories of runs."""
    return [folder_of(run) for run in runs]


def texts_of(settings: Settings | None) -> tuple[str, ...]:
    """Return settings as texts ``key=value``."""
    if isinstance(settings, Mapping):
        return tuple(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in settings.items())
    return tuple(settings or ())


def run_sources(given: Changes) -> RunSources:
    """Return where the settings of a run come from, given as ``Changes`` or ``Sources``."""
    from fedsilo.server_app.run.planning import RunSources

    return RunSources(
        file=path_of(given.get("file")),
        config=path_of(given.get("config")),
        changes=texts_of(given.get("settings")),
        out=path_of(cast(Sources, given).get("out")),
    )


def silent(line: str) -> None:
    """Print nothing."""


def refuse_below(minimum: int, option: str, value: int | None) -> None:
    """Refuse an option's number that is too small.

    Raises:
        SettingError: it is.
    """
    if value is not None and value < minimum:
        raise SettingError(f"--{option} is {value}; it must be at least {minimum}")
