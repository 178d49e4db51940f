"""The experiments of simulation.yaml, and the budgets that stand beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedsilo.datasets.io.text_files import file_fault
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.one_line import one_line
from fedsilo.models.contract.settings_schema import Value, setting, unknown_key, unknown_name

if TYPE_CHECKING:
    from fedsilo.server_app.config.old_keys import with_new_keys
from fedsilo.server_app.config.experiment_file import Parts
from fedsilo.server_app.config.old_keys import with_new_keys
from fedsilo.server_app.config.settings import declared_defaults

S = TypeVar("S")

SIMULATION_FILE = "simulation.yaml"


@dataclass(frozen=True)
class Experiment:
    """A named experiment of simulation.yaml: settings, resources, and the grid to tune over."""

    name: str
    values: Mapping[str, Value]
    resources: Mapping[str, Value]
    grid: Mapping[str, Sequence[Value]] = field(default_factory=dict)


@dataclass(frozen=True)
class Tuning:
    """The budget of tuning, the same for every experiment."""

    trials: int = setting(16, "points of the grid that are tried", minimum=1)
    folds: int = setting(5, "validation folds of the training data", minimum=2)
    seeds: int = setting(3, "seeds, each with another shuffling into folds", minimum=1)


def simulation_file(given: Path | None) -> Path:
    """Return the simulation file: the given one, else the working folder's, else fedsilo's own."""
    local = Path(SIMULATION_FILE)
    if given is not None or local.is_file():
        return given or local
    return Path(__file__).resolve().parents[2] / SIMULATION_FILE


def read_experiments(path: Path) -> dict[str, Experiment]:
    """Return the experiments of a simulation file; ``base`` names one whose settings come first.

    Raises:
        SettingError: the file is missing, no YAML, or an experiment is malformed.
    """
    from fedsilo.server_app.config.experiment_file import parts  # pydantic, only where it is used

    raw = _read_yaml(path).get("experiments")
    if not isinstance(raw, dict):
        raise SettingError(f"{path} has no mapping 'experiments'")
    declared = {name: parts(name, content, path) for name, content in raw.items()}
    return {name: _experiment(name, declared, path, ()) for name in declared}


def _read_yaml(path: Path) -> dict[str, Any]:
    from fedsilo.datasets.io.declarations import YamlError, parse_yaml

    if fault := file_fault(path):
        raise SettingError(f"{path} {fault}")
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(
            f"{path} cannot be read ({error.strerror}): run this in fedsilo's "
            "folder or name the file by --file"
        ) from None
    except YamlError as error:
        detail = f": {one_line(error.detail)}" if error.detail else ""
        raise SettingError(f"{error.of(str(path))}{detail}") from None
    except UnicodeDecodeError as error:
        raise SettingError(f"{path} is no valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise SettingError(f"{path} has no mapping 'experiments'")
    return content


def _experiment(
    name: str, declared: Mapping[str, Parts], path: Path, chain: tuple[str, ...]
) -> Experiment:
    if name not in declared:
        raise unknown_name("experiment", " ".join(name.split()), declared)
    if name in chain:
        raise SettingError(
            f"{path}: experiments {' -> '.join((*chain, name))} are based on one another"
        )
    own_parts = declared[name]
    values: dict[str, Value] = {}
    resources: dict[str, Value] = {}
    grid: dict[str, Sequence[Value]] = {}
    if "base" in own_parts.given():
        base = _experiment(own_parts.base, declared, path, (*chain, name))
        values, resources, grid = dict(base.values), dict(base.resources), dict(base.grid)
    values = _without_renamed(values, own_parts.config)
    return Experiment(
        name, values | own_parts.config, resources | own_parts.resources, grid | own_parts.grid
    )


def _without_renamed(base: Mapping[str, Value], own: Mapping[str, Value]) -> dict[str, Value]:
    """Return a base's settings without those that the experiment itself gives by an old key."""
    if own.keys() <= declared_defaults().keys():
        return dict(base)
    together = {**base, **own}
    method = {} if "method" not in together else {"method": together["method"]}
    renamed = with_new_keys({**own, **method})[0].keys() - own.keys() - method.keys()
    return {key: value for key, value in base.items() if key not in renamed}


def find_experiment(path: Path, name: str) -> Experiment:
    """Return the experiment ``name`` of a simulation file."""
    experiments = read_experiments(path)
    if name not in experiments:
        raise unknown_name("experiment", name, experiments)
    return experiments[name]


def read_tuning(path: Path) -> Tuning:
    """Return the budget under ``tuning`` in a simulation file.

    Raises:
        SettingError: the file cannot be read, or the budget is malformed.
    """
    return read_section(path, "tuning", Tuning)


def read_section(path: Path, name: str, cls: type[S]) -> S:
    """Return a section of a simulation file as ``cls``, its defaults if there is none.

    Raises:
        SettingError: the file cannot be read, or the section is malformed.
    """
    from fedsilo.datasets.io.declarations import Fault, checked, settings_model

    def refusal(flaw: Fault) -> SettingError:
        if flaw.kind == "unknown":
            return unknown_key(f"{name}: {flaw.key}", [f"{name}: {key}" for key in flaw.keys])
        return SettingError(flaw.sentence)

    raw = _read_yaml(path).get(name) or {}
    if not isinstance(raw, dict):
        raise SettingError(f"{path}: '{name}' must be a mapping")
    return cls(**checked(settings_model(cls), raw, refusal).given())
