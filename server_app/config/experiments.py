"""The experiments of simulation.yaml, and its other sections, such as the tuning's budget."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from fedsilo.datasets.io.declarations import FileModel, check_content, misfit, within
from fedsilo.datasets.io.yaml_text import read_yaml
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.methods import METHODS
from fedsilo.models.contract.one_line import one_line, shown
from fedsilo.models.contract.settings_schema import (
    Value,
    build_from_file,
    unknown_key,
    unknown_name,
)
from fedsilo.models.contract.written_settings import flat_values
from fedsilo.server_app.config.settings import declared_defaults

S = TypeVar("S")

SIMULATION_FILE = "simulation.yaml"
_INHERITED = ("values", "resources", "grid")


def _settings(content: Any) -> Any:
    """Flatten a mapping of settings; anything else is returned for pydantic to refuse."""
    return _flat(content) if isinstance(content, dict) else content or {}


def _grid(content: Any) -> Any:
    if not isinstance(content, dict):
        return content or {}
    known = declared_defaults()
    for key, values in content.items():
        if isinstance(key, str) and key not in known:
            raise within(str(unknown_key(key, known)))
        if not isinstance(values, list) or not values:
            raise misfit(f"must have a list of values for '{key}', not {shown(values)}")
        content[key] = [_flat({key: value}).get(key, value) for value in values]
    return content


def _flat(values: dict[Any, Any]) -> dict[str, Value]:
    try:
        return flat_values(values)
    except SettingError as error:
        raise within(str(error)) from None


def _one_line(name: str) -> str:
    if len(name.splitlines()) != 1:
        raise misfit("must be a name of one line")
    return name


FlatSettings = Annotated[dict[str, Any], BeforeValidator(_settings)]
Grid = Annotated[dict[str, Any], BeforeValidator(_grid)]


class Experiment(FileModel):
    """A named experiment of simulation.yaml: settings, resources, and the grid to tune over.

    ``trials`` is the number of grid points from which its settings were chosen, or 0 if it was not
    tuned; ``minutes`` is a run's duration on two cores, or 0 if that was not measured.
    """

    about: Any = None
    base: str = ""
    values: FlatSettings = Field(default_factory=dict, alias="config")
    grid: Grid = Field(default_factory=dict)
    resources: FlatSettings = Field(default_factory=dict)
    trials: Annotated[int, Field(ge=0)] = 0
    minutes: Annotated[int, Field(ge=0)] = 0


def simulation_file(given: Path | None) -> Path:
    """Return the given simulation file; if None, the working folder's, else fedsilo's own."""
    local = Path(SIMULATION_FILE)
    if given is not None or local.is_file():
        return given or local
    return Path(__file__).resolve().parents[2] / SIMULATION_FILE


def read_experiments(path: Path) -> dict[str, Experiment]:
    """Read the experiments of a simulation file; each inherits the settings of its ``base``.

    Raises:
        SettingError: the file is missing or is no YAML, or an experiment is malformed.
    """
    raw = read_simulation(path).get("experiments")
    if not isinstance(raw, dict):
        raise SettingError(f"{path} has no mapping 'experiments'")
    declared: dict[str, Experiment] = check_content(
        dict[Annotated[str, AfterValidator(_one_line)], Experiment],
        raw,
        lambda sentence: SettingError(f"{path}: experiment {sentence}"),
    )
    return {name: _apply_base(name, declared, path) for name in declared}


def find_experiment(path: Path, name: str) -> Experiment:
    """Return the experiment ``name``; a method's name without an experiment runs by defaults."""
    experiments = read_experiments(path)
    if name in METHODS and name not in experiments:
        return Experiment(config={"method": name})
    if name not in experiments:
        raise unknown_name("experiment", name, experiments)
    return experiments[name]


def _apply_base(
    name: str, declared: Mapping[str, Experiment], path: Path, chain: tuple[str, ...] = ()
) -> Experiment:
    """Return an experiment with its base's settings, which its own settings override.

    Raises:
        SettingError: a base is unknown, or the bases form a loop.
    """
    if name not in declared:
        raise unknown_name("experiment", one_line(name), declared)
    if name in chain:
        loop = " -> ".join((*chain, name))
        raise SettingError(f"{path}: experiments {loop} are based on one another")
    own = declared[name]
    if "base" not in own.stated_fields():
        return own
    base = _apply_base(own.base, declared, path, (*chain, name))
    update = {part: getattr(base, part) | getattr(own, part) for part in _INHERITED}
    return own.model_copy(update={**update, "trials": own.trials or base.trials})


def read_section(path: Path, name: str, cls: type[S]) -> S:
    """Read a section of a simulation file as ``cls``; SettingError if it is malformed.

    A missing section gives the defaults of ``cls``.
    """
    section = read_simulation(path).get(name) or {}
    if not isinstance(section, dict):
        raise SettingError(f"{path}: '{name}' must be a mapping")
    return build_from_file(cls, section, place=f"{name}: ")


def read_simulation(path: Path) -> dict[str, Any]:
    """Read a simulation file as a mapping; SettingError if it is missing or no mapping."""
    if not path.exists():
        raise SettingError(f"{path} is missing: name another by --file, or leave --file out")
    content = read_yaml(path, SettingError)
    if not isinstance(content, dict):
        raise SettingError(f"{path} has no mapping 'experiments'")
    return content
