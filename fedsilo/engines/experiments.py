"""The experiments of simulation.yaml, and its other sections, such as the tuning's budget.

A command reads the file once, and checks only the experiments that it runs. All are checked by
``api.experiment_list``.
"""

from collections.abc import Collection, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, WrapValidator

from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import SettingError, unknown_key, unknown_name
from fedsilo.core.files.declarations import FileModel, check_content, misfit, within
from fedsilo.core.files.locations import installed_folder
from fedsilo.core.files.yaml_text import parse_yaml, read_yaml
from fedsilo.core.methods import OURS
from fedsilo.core.one_line import one_line, quote_value
from fedsilo.core.plugins import find_plugins, module_of, plugin_entries
from fedsilo.core.settings.removed import with_current_keys
from fedsilo.core.settings.written_settings import flat_values
from fedsilo.core.settings_schema import build_from_file
from fedsilo.engines.matrix import Cell, fill_all, has_placeholder, list_cells, read_values
from fedsilo.server_app.config.settings import declared_defaults

S = TypeVar("S")

SIMULATION_FILE = "simulation.yaml"
_MOST_BASES = 50


def _flat_settings(content: Any) -> Any:
    """Flatten nested settings into one mapping with keys ``group.key``, before their validation.

    None and other empty values become an empty mapping. Any other value that is not a mapping is
    returned unchanged, so that pydantic rejects it.

    Raises:
        PydanticCustomError: a setting is given twice, a group is empty, or a value has the wrong
            type.
    """
    if not isinstance(content, dict):
        return content or {}
    try:
        return flat_values(content)
    except SettingError as error:
        raise within(str(error)) from None


def _read_grid(content: Any) -> Any:
    """Convert a tuning grid, setting -> list of values to try, as a step before validation.

    Current names of settings replace former ones. If a setting takes text in YAML, a mapping or
    list becomes such text. An empty grid becomes an empty mapping. Any other content that is not a
    mapping is returned unchanged, so that pydantic rejects it.

    Raises:
        PydanticCustomError: in one of these cases:

            - A key is unknown, or is given under two names.
            - A key has something other than a list with at least one value.
            - A value has the wrong type.
    """
    if not isinstance(content, dict):
        return content or {}
    known = declared_defaults()
    grid: dict[str, Any] = {}
    try:
        for key, values in with_current_keys(content).items():
            if isinstance(key, str) and key not in known:
                raise unknown_key(key, known)
            if not isinstance(values, list) or not values:
                raise misfit(f"must have a list of values for '{key}', not {quote_value(values)}")
            grid[key] = [flat_values({key: value}).get(key, value) for value in values]
    except SettingError as error:
        raise within(str(error)) from None
    return grid


def _check_one_line(name: str) -> str:
    if len(name.splitlines()) != 1:
        raise misfit("must be a name of one line")
    return name


FlatSettings = Annotated[dict[str, Any], BeforeValidator(_flat_settings)]
Grid = Annotated[dict[str, Any], BeforeValidator(_read_grid)]


class Experiment(FileModel):
    """A named experiment of simulation.yaml: settings, resources, and the grid to tune over.

    ``trials`` is the number of grid points from which its settings were chosen; 0 if they were not
    tuned. ``minutes`` is the duration of a run on two cores; 0 if nobody has measured it.
    """

    about: Any = None
    base: str = ""
    values: FlatSettings = Field(default_factory=dict, alias="config")
    grid: Grid = Field(default_factory=dict)
    resources: FlatSettings = Field(default_factory=dict)
    trials: Annotated[int, Field(ge=0)] = 0
    minutes: Annotated[int, Field(ge=0)] = 0


# Strictly checked as texts, then keyed by the values themselves
_Values = Annotated[dict[Any, Experiment], WrapValidator(read_values)]


class Entry(Experiment):
    """An entry of simulation.yaml: one experiment, or a matrix of several (see ``matrix``).

    ``matrix`` has placeholder -> value -> the value's settings, which override the entry's.
    """

    matrix: dict[str, _Values] = Field(default_factory=dict)


class SimulationFile:
    """Reads a simulation file: experiments, each checked when it is asked for, and other sections.

    An entry's own name takes precedence over names that a matrix makes, so finding an entry by its
    name needs no matrix.

    Attributes:
        content: the parsed file, which callers must not change.
    """

    def __init__(self, text: str, path: str) -> None:
        """Parse the text of a simulation file.

        Raises:
            YamlError: the text is not valid YAML.
            SettingError: the content is not a mapping.
        """
        content = parse_yaml(text, path)
        if not isinstance(content, dict):
            raise SettingError(f"{path} has no mapping 'experiments'")
        self.content: dict[str, Any] = content
        self._path = path
        self._entries: dict[str, Entry] = {}

    @cached_property
    def cells(self) -> Mapping[str, Cell]:
        """Map the name of each experiment to its cell, in the order of the file.

        A cell has the name of the file's entry that makes the experiment. If the entry has a
        matrix, the cell also has the matrix's values for this experiment. Otherwise it has no
        values.

        Raises:
            SettingError: the file has no mapping 'experiments', two experiments have the same name,
                or a matrix or a name is invalid.
        """
        cells: dict[str, Cell] = {}
        for entry in self._raw_entries():
            for cell in self._cells_of(entry):
                if cell.name in cells:
                    other = one_line(cells[cell.name].entry)
                    raise self._error(
                        entry, f"makes '{one_line(cell.name)}', but so does '{other}': rename one"
                    )
                cells[cell.name] = cell
        return cells

    def _raw_entries(self) -> dict[Any, Any]:
        entries = self.content.get("experiments")
        if not isinstance(entries, dict):
            raise SettingError(f"{self._path} has no mapping 'experiments'")
        return entries

    def _cells_of(self, entry: Any) -> list[Cell]:
        """List the cells of an entry, one for each experiment that the entry makes.

        An entry is a name of the file with its content. If it has a matrix, there is a cell for
        each combination of the matrix's values. Otherwise, there is one cell.

        Raises:
            SettingError: the entry or its matrix is malformed.
        """
        if isinstance(entry, str) and self._is_one_entry(entry):
            return [Cell(entry, {})]
        matrix = self.entry(entry).matrix  # refuses a name that is not a text
        try:
            return list_cells(entry, matrix)
        except SettingError as error:
            raise self._error(entry, str(error)) from None

    def has(self, name: str) -> bool:
        """Tell whether the file has an experiment of this name.

        Matrices are expanded only if the name is not that of an entry without a matrix.
        """
        return self._is_one_entry(name) or name in self.cells

    def _is_one_entry(self, name: str) -> bool:
        """Tell whether the file's entry ``name`` makes exactly one experiment, called ``name`` too.

        The result is True if the entry has no matrix, and its name has no placeholder such as
        ``{gamma}``. If the file has no entry of this name, the result is False.

        Raises:
            SettingError: the file has no mapping 'experiments'.
        """
        entries = self._raw_entries()
        if name not in entries or has_placeholder(name):
            return False
        content = entries[name]
        return not (isinstance(content, dict) and "matrix" in content)

    def entry(self, name: str) -> Entry:
        """Return the entry of the file with this name, without filling in its placeholders.

        An entry makes one experiment, or several experiments if it has a matrix. ``name`` is the
        name in the file, with its placeholders. An entry is checked at the first call, and the
        result is kept for later calls.

        Raises:
            SettingError: the entry, or its name, is malformed.
            KeyError: the file has no such entry.
        """
        if name not in self._entries:
            self._entries |= check_content(
                dict[Annotated[str, AfterValidator(_check_one_line)], Entry],
                {name: self._raw_entries()[name]},
                lambda sentence: SettingError(f"{self._path}: experiment {sentence}"),
            )
        return self._entries[name]

    def _error(self, name: str, sentence: str) -> SettingError:
        return SettingError(f"{self._path}: experiment '{one_line(name, 100)}' {sentence}")

    def find(self, name: str, chain: tuple[str, ...] = ()) -> Experiment:
        """Return an experiment with all its settings, including those inherited from its bases.

        A base is another experiment, which may have a base too. An experiment's settings override
        those of its base. ``about`` and ``minutes`` are never inherited, because the purpose and
        duration of the base are not those of the experiment.

        Args:
            name: the experiment's name.
            chain: the names of the experiments that are based on this one, for the detection of a
                loop. Callers leave it empty.

        Raises:
            SettingError: the experiment does not exist or is malformed, or its bases form a loop or
                a chain of more than 50 experiments.
        """
        # A long row without a loop would end in Python's RecursionError
        if name in chain or len(chain) == _MOST_BASES:
            row = " -> ".join((*chain, name))
            raise SettingError(
                f"{self._path}: experiments {row} are based on one another, in a loop or in a row "
                f"of more than {_MOST_BASES}"
            )
        if self._is_one_entry(name):
            own: Experiment = self.entry(name)
        elif name in self.cells:
            own = self._from_matrix(self.cells[name])
        else:
            raise unknown_name("experiment", one_line(name), self.cells)
        if "base" not in own.stated_fields():
            return own
        base = self.find(own.base, (*chain, name))
        # A base's purpose and minutes do not hold for the experiments based on it
        both = _override(base, own)
        return both.model_copy(update={"about": own.about, "minutes": own.minutes})

    def _from_matrix(self, cell: Cell) -> Experiment:
        """Build the experiment of a matrix cell from its entry, without the settings of its base.

        A matrix may give settings to each value of a placeholder. The settings of the cell's values
        override the entry's settings. If two placeholders set the same key, the later placeholder
        in the matrix wins. Then each placeholder in the experiment's fields is replaced by the
        cell's value.

        Raises:
            SettingError: a placeholder in the entry's fields is not in the matrix.
        """
        entry = self.entry(cell.entry)
        made: Experiment = entry
        # Later placeholders override earlier ones, and all override the entry
        for key, value in cell.values.items():
            made = _override(made, entry.matrix[key][value])
        try:
            filled = fill_all(made.stated_fields(), cell.values)
        except SettingError as error:
            raise self._error(cell.entry, f"has an {error}") from None
        return made.model_copy(update=filled)


def simulation_file(given: Path | None) -> Path:
    """Return the path of the simulation file that a command uses.

    It is ``given`` if the user named a file, which need not exist. Otherwise it is simulation.yaml
    in the working folder or, if that does not exist, the file that is installed with fedsilo.
    """
    local = Path(SIMULATION_FILE)
    if given is not None or local.is_file():
        return given or local
    return installed_folder() / SIMULATION_FILE


# One command looks for several parts of one file. The cache is keyed by the file's text, so a file
# that has changed is parsed again
_open_once = lru_cache(maxsize=1)(SimulationFile)


def open_simulation(path: Path) -> SimulationFile:
    """Read a simulation file, whose experiments are checked only when they are used.

    If the text of the file has not changed since the last call for it, the result of that call is
    returned.

    Raises:
        SettingError: the file is missing, is not valid YAML, or is not a mapping.
    """
    if not path.exists():
        raise SettingError(f"{path} is missing: name another by --file, or leave --file out")
    file: SimulationFile = read_yaml(path, SettingError, _open_once)
    return file


def read_experiments(path: Path) -> dict[str, Experiment]:
    """Read and check all experiments of a simulation file, and return them by name.

    An experiment may name another one as its base, and then inherits the settings that it does not
    set itself. The order is that of the file.

    Raises:
        SettingError: the file is missing or is not valid YAML, or an experiment is malformed. A
            base that does not exist, or bases that form a loop, are refused too.
    """
    file = open_simulation(path)
    return {name: file.find(name) for name in file.cells}


def find_experiment(path: Path, name: str, plugins: Collection[str] = ()) -> Experiment:
    """Return the experiment ``name`` with all its settings. Other experiments are not checked.

    If the file has no experiment of that name, but ``name`` is a method, the result is an
    experiment with that method and with defaults for everything else.

    Args:
        path: the simulation file.
        name: the name of an experiment or of a method. Methods come from fedsilo, from installed
            packages and from ``plugins``.
        plugins: the names of the plugin modules that the command names. A module's name counts as
            the name of a method, and the module is not loaded.

    Raises:
        SettingError: the file or the experiment cannot be used, or the name is unknown. If the
            working folder has a file ``name``.py, the message advises adding it as a plugin.
    """
    file = open_simulation(path)
    if file.has(name):
        return file.find(name)
    methods = {*OURS, *plugins}
    if name not in methods:
        methods |= find_plugins("method", OURS).keys()
    if name in methods:
        return Experiment(config={"method": name})
    if name.isidentifier() and Path(f"{name}.py").is_file():
        raise SettingError(
            f"unknown experiment '{name}'; if {name}.py has the method, add --plugin {name}.py"
        )
    raise unknown_name("experiment", one_line(name), {*methods, *file.cells})


def declared_experiment(name: str, sources: RunSources) -> Experiment:
    """Find the experiment ``name`` in the simulation file that a command names or uses by default.

    If the file has no experiment of that name, but ``name`` is a method, the result is an
    experiment with that method and with defaults for everything else. The name of a plugin module
    counts as a method: ``mine`` is one if ``sources.changes`` has ``plugin=mine.py``. Other changes
    are not used.

    Raises:
        SettingError: there is no such experiment or method, or the file cannot be used.
    """
    modules: list[str] = []
    for change in sources.changes:
        key, _, value = change.partition("=")
        if key.strip() == "plugin":
            modules += map(module_of, plugin_entries(value))
    return find_experiment(simulation_file(sources.file), name, modules)


def _override(under: Experiment, own: Experiment) -> Experiment:
    """Return a copy of the experiment ``under``, overridden by the fields that ``own`` states.

    Settings, grid and resources are merged key by key. If both experiments have a key, the value of
    ``own`` is kept. Any other field that ``own`` states replaces that of ``under`` as a whole.
    ``own`` may come from an entry with a ``matrix``, which is ignored.
    """
    update = own.stated_fields()
    update.pop("matrix", None)
    for part in ("values", "grid", "resources"):
        update[part] = getattr(under, part) | getattr(own, part)
    return under.model_copy(update=update)


def read_section(path: Path, name: str, cls: type[S]) -> S:
    """Read a section of a simulation file, such as ``tuning``, into the dataclass ``cls``.

    Keys that the section lacks have the defaults of ``cls``. If the section is missing or empty,
    all keys have their defaults.

    Raises:
        SettingError: the file cannot be read, the section is not a mapping, or it does not fit
            ``cls``.
    """
    section = open_simulation(path).content.get(name) or {}
    if not isinstance(section, dict):
        raise SettingError(f"{path}: '{name}' must be a mapping")
    return build_from_file(cls, section, place=f"{name}: ")
