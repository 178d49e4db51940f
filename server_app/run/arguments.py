"""What the commands' functions take: paths, runs and settings, in the forms that suit a caller."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, cast

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings_schema import Value


class HasPath(Protocol):
    """A run, such as the ``Run`` of the API."""

    @property
    def path(self) -> Path:
        """The run directory."""


AnyPath = Path | str
AnyRun = HasPath | Path | str  # a run, or its directory
Plugins = Sequence[AnyPath] | AnyPath | None  # files FILE.py, or modules of installed packages
Settings = Mapping[str, Value] | Sequence[str]  # by key, {"uefl.gamma": 0.2}, or as key=value
Tell = Callable[[str], None]  # takes a line about what goes on
Watch = Callable[[int, int], None]  # takes how much is done, and of how much

Engine = Literal["auto", "processes", "ray", "inline"]
Layer = Literal["embedding", "penultimate"]
Reader = Literal["research", "clinic", "dpo"]
Split = Literal["train", "val", "test"]
MeasuredSplit = Literal["test", "val"]
Sampler = Literal["grid", "tpe"]
TunedMetric = Literal["accuracy", "balanced-accuracy", "pooled-balanced-accuracy", "auc"]
Track = Literal["none", "tensorboard", "mlflow", "wandb"]


class Changes(TypedDict, total=False):
    """Where settings come from: ``settings`` are over ``config``, and both over the experiment's.

    ``file`` is the simulation.yaml with the experiment; by default the working folder's or, if
    there is none, fedsilo's own. ``plugin`` are files and modules with plugs.
    """

    settings: Settings | None
    plugin: Plugins
    config: AnyPath | None
    file: AnyPath | None


class Sources(Changes, total=False):
    """Where the settings of a run come from, and the folder of its run directory."""

    out: AnyPath | None


@dataclass(frozen=True, kw_only=True)
class RunSources:
    """Where a run's settings come from.

    Attributes:
        file: the simulation file, or None for the usual one.
        config: a TOML file of settings that override the experiment's.
        changes: settings that override both, each ``key=value``.
        out: folder of run directories, or None for the settings' own or ``runs``.
    """

    file: Path | None = None
    config: Path | None = None
    changes: tuple[str, ...] = ()
    out: Path | None = None


def path_of(given: AnyPath | None) -> Path | None:
    """Return a path given as a path or a text; SettingError for anything else, such as a frame."""
    try:
        return None if given is None else Path(given)
    except TypeError:
        kind = type(given).__name__
        raise SettingError(f"a {kind} is not a path: write it to a file and name that") from None


def several(given: Any) -> list[Any]:
    """Return what was given as a sequence; a text, a path or a run alone is one."""
    if isinstance(given, Path | str) or not isinstance(given, Iterable):
        return [] if given is None else [given]
    return list(given)


def folder_of(run: AnyRun) -> Path:
    """Return the run directory of a run."""
    return Path(run) if isinstance(run, Path | str) else run.path


def folders_of(runs: Sequence[AnyRun]) -> list[Path]:
    """Return the run directories of runs."""
    return [folder_of(run) for run in several(runs)]


def texts_of(settings: Settings | None) -> tuple[str, ...]:
    """Return settings as texts ``key=value``."""
    if isinstance(settings, Mapping):
        return tuple(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in settings.items())
    return tuple(several(settings))


def plugin_texts(plugin: Plugins) -> list[str]:
    """Return the files and modules of plugs as texts."""
    return [str(entry) for entry in several(plugin)]


def run_sources(given: Changes) -> RunSources:
    """Return where the settings of a run come from, given as ``Changes`` or ``Sources``."""
    entries = plugin_texts(given.get("plugin"))
    plugins = [f"plugin={', '.join(entries)}"] if entries else []
    return RunSources(
        file=path_of(given.get("file")),
        config=path_of(given.get("config")),
        changes=(*plugins, *texts_of(given.get("settings"))),
        out=path_of(cast(Sources, given).get("out")),
    )


def silent(line: str) -> None:
    """Print nothing."""


def refuse_below(minimum: int, option: str, value: int | None) -> None:
    """Raise a SettingError if an option's number is too small."""
    if value is not None and value < minimum:
        raise SettingError(f"--{option} is {value}; it must be at least {minimum}")
