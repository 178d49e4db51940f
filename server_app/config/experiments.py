"""The experiments of simulation.yaml, and its other sections, such as the tuning's budget.

A command reads the file once, and checks only the experiments that it runs; ``check_experiments``
checks all.
"""

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, WrapValidator

from fedsilo.datasets.io.declarations import FileModel, check_content, misfit, within
from fedsilo.datasets.io.yaml_text import parse_yaml, read_yaml
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.methods import METHODS
from fedsilo.models.contract.one_line import one_line, shown
from fedsilo.models.contract.settings_schema import (
    Value,
    build_from_file,
    unknown_key,
    unknown_name,
)
from fedsilo.server_app.config.matrix import Cell, fill_all, has_placeholder, list_cells, read_values
from fedsilo.server_app.config.resources import check_resources
from fedsilo.server_app.config.settings import declared_defaults, flat_values, resolve

S = TypeVar("S")

SIMULATION_FILE = "simulation.yaml"

# The same text is parsed once a process: one command looks for several parts of one file
_parse_once = lru_cache(maxsize=1)(parse_yaml)


def _settings(content: Any) -> Any:
    """Flatten a mapping of settings; anything else is returned for pydantic to refuse."""
    return _flat(content) if isinstance(content, dict) else content or {}


def _grid(content: Any) -> Any:
    if not isinstance(content, dict):
        return content or {}
    known = declared_defaults()
    grid = {}
    for key, values in content.items():
        if isinstance(key, str) and key not in known:
            raise within(str(unknown_key(key, known)))
        if not isinstance(values, list) or not values:
            raise misfit(f"must have a list of values for '{key}', not {shown(values)}")
        grid[key] = [_flat({key: value}).get(key, value) for value in values]
    return grid


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


_Values = Annotated[dict[str, Experiment], WrapValidator(read_values)]


class Entry(Experiment):
    """An entry of simulation.yaml: one experiment, or a matrix of several (see ``matrix``).

    ``matrix`` has placeholder -> value -> what the value sets, over what the entry sets.
    """

    matrix: dict[str, _Values] = Field(default_factory=dict)


class SimulationFile:
    """The experiments of a simulation file: their names, and each of them when it is asked for.

    Only an entry with a matrix is checked at once, because its matrix says which names there are.
    Every other mistake is reported when its experiment is asked for.

    Attributes:
        cells: an experiment's name -> its place in the file, in the order of the file.
    """

    def __init__(self, path: Path) -> None:
        """Read a simulation file.

        Raises:
            SettingError: the file is missing or is no YAML, or a name or a matrix is wrong.
        """
        raw = read_simulation(path).get("experiments")
        if not isinstance(raw, dict):
            raise SettingError(f"{path} has no mapping 'experiments'")
        self._path = path
        self._raw = raw
        self._entries: dict[str, Entry] = {}
        self.cells: dict[str, Cell] = {}
        for name, content in raw.items():
            for cell_name, cell in self._cells_of(name, content).items():
                if cell_name in self.cells:
                    other = one_line(self.cells[cell_name].entry)
                    raise self._error(
                        name, f"makes '{one_line(cell_name)}', but so does '{other}': rename one"
                    )
                self.cells[cell_name] = cell

    def _cells_of(self, name: Any, content: Any) -> dict[str, Cell]:
        """List the experiments of an entry."""
        has_matrix = isinstance(content, dict) and "matrix" in content
        if not has_matrix and not has_placeholder(name):
            return {name: Cell(name, {})}
        matrix = self.entry(name).matrix
        try:
            return list_cells(name, matrix)
        except SettingError as error:
            raise self._error(name, str(error)) from None

    def entry(self, name: str) -> Entry:
        """Return an entry of the file; SettingError if it is malformed."""
        if name not in self._entries:
            self._entries |= check_content(
                dict[Annotated[str, AfterValidator(_one_line)], Entry],
                {name: self._raw[name]},
                lambda sentence: SettingError(f"{self._path}: experiment {sentence}"),
            )
        return self._entries[name]

    def _error(self, name: str, sentence: str) -> SettingError:
        return SettingError(f"{self._path}: experiment '{one_line(name, 100)}' {sentence}")

    def find(self, name: str, chain: tuple[str, ...] = ()) -> Experiment:
        """Return an experiment with its base's settings, which its own settings override.

        Args:
            name: the experiment's name.
            chain: the experiments that are based on it, for the error about a loop.

        Raises:
            SettingError: there is no such experiment, it is malformed, or its bases form a loop.
        """
        if name not in self.cells:
            raise unknown_name("experiment", one_line(name), self.cells)
        if name in chain:
            loop = " -> ".join((*chain, name))
            raise SettingError(f"{self._path}: experiments {loop} are based on one another")
        own = self._without_base(self.cells[name])
        if "base" not in own.stated_fields():
            return own
        base = self.find(own.base, (*chain, name))
        # What a base is about, and its minutes, are not those of the experiments based on it
        both = _put_over(base, own)
        return both.model_copy(update={"about": own.about, "minutes": own.minutes})

    def _without_base(self, cell: Cell) -> Experiment:
        """Return an experiment as its entry and the values of its matrix state it."""
        entry = self.entry(cell.entry)
        made: Experiment = entry
        for key, value in cell.values.items():
            made = _put_over(made, entry.matrix[key][value])
        if not entry.matrix:
            return made
        try:
            filled = fill_all(made.stated_fields(), cell.values)
        except SettingError as error:
            raise self._error(cell.entry, f"has an {error}") from None
        return made.model_copy(update=filled)


def simulation_file(given: Path | None) -> Path:
    """Return the given simulation file; if None, the working folder's, else fedsilo's own."""
    local = Path(SIMULATION_FILE)
    if given is not None or local.is_file():
        return given or local
    return Path(__file__).resolve().parents[2] / SIMULATION_FILE


def read_experiments(path: Path) -> dict[str, Experiment]:
    """Read and check all experiments of a simulation file.

    Raises:
        SettingError: the file is missing or is no YAML, or an experiment is malformed.
    """
    file = SimulationFile(path)
    return {name: file.find(name) for name in file.cells}


def find_experiment(path: Path, name: str) -> Experiment:
    """Return the experiment ``name``; a method's name without an experiment runs by defaults.

    Other experiments of the file are not checked.
    """
    file = SimulationFile(path)
    if name in METHODS and name not in file.cells:
        return Experiment(config={"method": name})
    return file.find(name)


def check_experiments(path: Path) -> dict[str, str]:
    """Check that every experiment of a simulation file could run, up to its data.

    Returns:
        Name of each experiment -> what is wrong with it; an empty text if nothing is.

    Raises:
        SettingError: the file is missing or is no YAML, or a name or a matrix is wrong.
    """
    file = SimulationFile(path)
    found = {}
    for name in file.cells:
        try:
            experiment = file.find(name)
            resolve(experiment.values)
            check_resources(experiment.resources)
            found[name] = ""
        except SettingError as error:
            found[name] = str(error)
    return found


def _put_over(under: Experiment, own: Experiment) -> Experiment:
    """Return an experiment with what ``own`` states over it; settings are merged by key."""
    update = own.stated_fields()
    update.pop("matrix", None)
    for part in ("values", "grid", "resources"):
        update[part] = getattr(under, part) | getattr(own, part)
    return under.model_copy(update=update)


def read_section(path: Path, name: str, cls: type[S]) -> S:
    """Read a section of a simulation file as ``cls``; SettingError if it is malformed.

    A missing section gives the defaults of ``cls``.
    """
    section = read_simulation(path).get(name) or {}
    if not isinstance(section, dict):
        raise SettingError(f"{path}: '{name}' must be a mapping")
    return build_from_file(cls, section, place=f"{name}: ")


def read_simulation(path: Path) -> dict[str, Any]:
    """Read a simulation file as a mapping, which callers must not change.

    Raises:
        SettingError: the file is missing, or is no mapping.
    """
    if not path.exists():
        raise SettingError(f"{path} is missing: name another by --file, or leave --file out")
    content = read_yaml(path, SettingError, _parse_once)
    if not isinstance(content, dict):
        raise SettingError(f"{path} has no mapping 'experiments'")
    return content
