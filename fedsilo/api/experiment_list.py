"""Lists the experiments of a simulation file by method, a line each, and shows one in full."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.core.errors import FedsiloError, SettingError, unknown_key, unknown_name
from fedsilo.core.methods import METHODS, about
from fedsilo.core.one_line import format_count, one_line
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import build, values_of
from fedsilo.datasets.registry import DATA_SETS, data_set, overview, silo_count
from fedsilo.engines.experiments import (
    Experiment,
    SimulationFile,
    find_experiment,
    open_simulation,
)
from fedsilo.engines.matrix import write_braces
from fedsilo.server_app.config.resources import check_resources
from fedsilo.server_app.config.settings import declared_defaults

_LONGEST_NAMES = 48  # characters of the column of names; longer names move their line to the right
_LONGEST_LINE = 160
_FEW = 3  # values that a line lists; of more numbers it has the range


@dataclass(frozen=True)
class _Facts:
    """The facts about an experiment that its line shows.

    Attributes:
        data: the name of the data set, with the size of its download if it has one.
        silos: the number of silos; 0 if it is unknown until the data are read.
        rounds: the number of rounds.
        cost: the measured duration if the file has one; otherwise 'GPU' or 'CPU'.
    """

    data: str
    silos: int
    rounds: int
    cost: str


def list_experiments(path: Path, method: str | None = None, here: bool = False) -> Iterator[str]:
    """Yield the lines of a list of experiments, grouped by method.

    Methods are sorted by name. Each has a heading, and below it a line for each experiment, or for
    all experiments of a matrix. Their name on the line is then a pattern such as ``a-{x,y}``. If an
    experiment cannot run, its line has the reason. If ``method`` has no experiment to list, a line
    says how to run the method with its defaults.

    Args:
        path: the simulation file.
        method: list only the experiments with this method. None for all.
        here: list only the experiments whose data are on this machine. These are data in the folder
            $FEDSILO_DATA, or data that come with an installed package.

    Raises:
        SettingError: the file or an entry is malformed, or the method is unknown.
    """
    file = open_simulation(path)
    by_method = _choose_experiments(file, method, here)
    for name in [method] if method else sorted(by_method):
        yield _describe_method(name)
        if name not in by_method:
            yield f"  no experiment here; by its defaults: fedsilo simulate {name}"
            continue
        rows: dict[str, str] = {}  # names of an entry's experiments -> the text of their line
        for found in by_method[name].values():
            rows |= _describe_entry(file, found)
        width = min(max(map(len, rows)), _LONGEST_NAMES)
        for names, text in rows.items():
            yield _format_line(names, text, width)


def experiment_records(
    path: Path, method: str | None = None, here: bool = False
) -> list[dict[str, Any]]:
    """Return the facts that the list of experiments shows, as a dictionary for each experiment.

    The experiments are selected by ``method`` and ``here`` as in ``list_experiments``, and sorted
    by method. The keys are ``experiment``, ``method``, ``about``, ``data``, ``silos`` (int),
    ``rounds`` (int) and ``cost``. ``silos`` is 0 if the number is unknown. If the experiment cannot
    run, the key ``fault`` with the reason replaces the last four keys.

    Raises:
        SettingError: the file or an entry is malformed, or the method is unknown.
    """
    records = []
    for name, entries in sorted(_choose_experiments(open_simulation(path), method, here).items()):
        for experiments in entries.values():
            for key, experiment in experiments.items():
                record = {"experiment": key, "method": name, "about": str(experiment.about or "")}
                try:
                    record |= vars(_find_facts(experiment))
                except FedsiloError as error:
                    record["fault"] = str(error)
                records.append(record)
    return records


def _choose_experiments(
    file: SimulationFile, method: str | None, here: bool
) -> dict[str, dict[str, dict[str, Experiment]]]:
    """Select the experiments to list, grouped by method and by entry of the file.

    An entry of the file makes one experiment, or several if it has a matrix of settings.

    Args:
        file: the simulation file.
        method: select only experiments with this method. None for all methods.
        here: select only experiments whose data are on this machine.

    Returns:
        The name of the method -> the name of the entry -> the name of the experiment -> the
        experiment. If ``method`` has no experiments, the result is empty.

    Raises:
        SettingError: ``method`` is neither built in nor used by an experiment of the file.
    """
    by_method = _group_by_method(file)
    if method is not None and method not in METHODS and method not in by_method:
        raise unknown_name("method", method, {*METHODS, *by_method})
    if here:
        by_method = _select_here(by_method)
    if method is None:
        return by_method
    return {name: found for name, found in by_method.items() if name == method}


def _select_here(
    by_method: Mapping[str, Mapping[str, Mapping[str, Experiment]]],
) -> dict[str, dict[str, dict[str, Experiment]]]:
    """Select the experiments whose data sets have files on this machine.

    ``by_method`` and the result have the same form: method -> entry of the file -> name ->
    experiment. Methods and entries without such an experiment are left out.
    """
    found = {row["name"] for row in overview("") if row["here"]}
    chosen: dict[str, dict[str, dict[str, Experiment]]] = {}
    for method, entries in by_method.items():
        for entry, experiments in entries.items():
            for name, experiment in experiments.items():
                if experiment.values.get("dataset", CommonSettings.dataset) in found:
                    chosen.setdefault(method, {}).setdefault(entry, {})[name] = experiment
    return chosen


def _describe_method(name: str) -> str:
    """Format the heading of a method, "name: description".

    The description of a plugin's method is always 'a plugin', because listing must not execute the
    plugin's code.
    """
    if name not in METHODS:
        return f"{name}: a plugin"
    return f"{name}: {about(name)}"


def _format_line(names: str, text: str, width: int) -> str:
    """Format a line of the list: the names, padded to ``width`` characters, then the text.

    A text that is too long is shortened so that the line has at most 160 characters. If the names
    leave less than 40 characters for the text, it gets 40, and the line is longer.
    """
    start = f"  {names:{width}}  "
    return start + one_line(text, max(_LONGEST_LINE - len(start), 40))


def _group_by_method(file: SimulationFile) -> dict[str, dict[str, dict[str, Experiment]]]:
    """Group the experiments of a file: method -> entry of the file -> name -> experiment.

    An entry with a matrix has several experiments. If their methods differ, the entry is listed
    under each of those methods. An experiment without a method has the default one.
    """
    by_method: dict[str, dict[str, dict[str, Experiment]]] = {}
    for name, cell in file.cells.items():
        experiment = file.find(name)
        method = str(experiment.values.get("method", CommonSettings.method))
        by_method.setdefault(method, {}).setdefault(cell.entry, {})[name] = experiment
    return by_method


def _describe_entry(file: SimulationFile, experiments: Mapping[str, Experiment]) -> dict[str, str]:
    """Build the lines of the list for the experiments that one entry of the file makes.

    An entry with a matrix makes an experiment for each combination of the matrix values. If the
    given ``experiments`` cover every combination of the values that they have, they share one line,
    under a name such as ``a-{x,y}``. This line has their description, or the entry's if their
    descriptions differ. Otherwise each experiment has its own line.

    Args:
        file: the simulation file.
        experiments: name -> experiment, all with the same method.

    Returns:
        The name at the beginning of each line -> the text of the line.
    """
    # A cell is one combination of the values of a matrix
    cells = [file.cells[name] for name in experiments]
    entry = cells[0].entry
    together = write_braces(entry, cells)
    if together is None:
        return {name: _describe([one], one.about) for name, one in experiments.items()}
    purposes = {str(one.about or ""): None for one in experiments.values()}
    purpose = next(iter(purposes))
    # If the cells have different descriptions, the line has that of the whole entry
    if len(purposes) > 1:
        purpose = file.entry(entry).about
    return {together: _describe(list(experiments.values()), purpose)}


def _describe(experiments: Sequence[Experiment], purpose: Any) -> str:
    """Describe one or more experiments by their data, silos, rounds, cost and purpose.

    The form is "digits, 3 silos, 5 rounds, GPU; a first example". If there are more than three data
    sets, only their number is given. A cost of 'CPU' for all experiments is left out, and so is an
    empty ``purpose``. If an experiment cannot run, the text is only 'cannot run:' and the reason.

    Args:
        experiments: the experiments, at least one.
        purpose: the description of the experiments.
    """
    # Dictionaries without values keep each text once and in order, which sets do not
    data: dict[str, None] = {}
    costs: dict[str, None] = {}
    silos: set[int] = set()
    rounds: set[int] = set()
    for experiment in experiments:
        try:
            facts = _find_facts(experiment)
        except FedsiloError as error:
            return f"cannot run: {error}"
        data[facts.data] = None
        costs[facts.cost] = None
        silos.add(facts.silos)
        rounds.add(facts.rounds)
    parts = [f"{len(data)} data sets"]
    if len(data) <= _FEW:
        parts = list(data)
    parts += [_format_count(silos, "silo"), _format_count(rounds, "round")]
    if list(costs) != ["CPU"]:
        parts.append(" or ".join(costs))
    text = ", ".join(parts)
    if purpose:
        text += f"; {purpose}"
    return text


def _find_facts(experiment: Experiment) -> _Facts:
    """Find the facts about an experiment that the list shows: its data, silos, rounds and cost.

    The experiment is not run. If the file states how many minutes a run took, the cost is these
    minutes. Otherwise it is 'GPU' if the experiment's resources have a GPU, else 'CPU'. An unknown
    number of silos is 0. The number is always unknown for a plugin's data set, because listing must
    not execute a plugin.

    Raises:
        FedsiloError: a setting is out of range, or a file that declares silos is wrong. Also raised
            if a setting's key is unknown, unless the method is a plugin, which may add keys.
    """
    # A run would refuse an unknown key, so the list must not show such an experiment as fine
    common = build(CommonSettings, values_of(CommonSettings, experiment.values))
    known = declared_defaults()
    for key in experiment.values:
        if key not in known and common.method in METHODS:  # a plugin declares its keys itself
            raise unknown_key(key, known)
    cost = "CPU"
    if experiment.minutes:
        cost = f"about {experiment.minutes} min on two cores"
    elif experiment.resources.get("client-resources-num-gpus"):
        cost = "GPU"
    if common.dataset not in DATA_SETS:  # listing experiments must not execute a plugin
        return _Facts(f"{common.dataset} of a plugin", 0, common.rounds, cost)
    data = common.dataset
    public = data_set(data).licence
    if public and public.files and public.bytes():
        data += f" ({public.size_text()})"
    return _Facts(data, silo_count(common) or 0, common.rounds, cost)


def _format_count(numbers: Set[int], noun: str) -> str:
    """Format how many things several experiments have, such as "3 or 9 silos".

    Up to three different numbers are listed, the lowest first. More than three are written as a
    range, such as "10 to 600 rounds". A single number is written as "3 silos" or "1 silo". The
    number 0 means that the user's own data decide. It is written "own", as in "own or 3 silos".

    Args:
        numbers: the number of each experiment, without duplicates.
        noun: the thing, in the singular.
    """
    different = sorted(numbers)
    if len(different) == 1 and different[0]:
        return format_count(different[0], noun)
    if len(different) > _FEW:
        return f"{different[0] or 'own'} to {different[-1]} {noun}s"
    texts = [str(number or "own") for number in different]
    return f"{' or '.join(texts)} {noun}s"


def show_experiment(path: Path, name: str) -> Iterator[str]:
    """Yield the lines of a simulation file (YAML) that has just one experiment, written in full.

    Settings that the experiment inherits from a base, or gets from a matrix, are written out. Keys
    without a value are left out. The first two lines are comments: one on the data, silos, rounds
    and cost, and one on the method.

    Args:
        path: the simulation file to read.
        name: the name of the experiment. The name of a method stands for an experiment with the
            method's default settings.

    Raises:
        SettingError: the name is unknown, or the file is malformed.
    """
    import yaml

    experiment = find_experiment(path, name)
    method = str(experiment.values.get("method", CommonSettings.method))
    yield f"# {_describe([experiment], None)}"
    yield f"# {_describe_method(method)}"
    content: dict[str, Any] = {
        "about": experiment.about,
        "config": experiment.values,
        "grid": experiment.grid,
        "resources": experiment.resources,
        "trials": experiment.trials,
        "minutes": experiment.minutes,
    }
    written = {}
    for key, value in content.items():
        if value:
            written[key] = value
    text = yaml.safe_dump({"experiments": {name: written}}, sort_keys=False, allow_unicode=True)
    yield from text.splitlines()


def check_experiments(path: Path) -> dict[str, str]:
    """Check the settings and resources of every experiment of a simulation file.

    The experiments are planned but not started, and their data are not read. Resources are the
    cores and GPUs that an experiment asks for. Their names and ranges are checked, but not whether
    this machine has as many. Plugins that the experiments name are executed, as in a run.

    Returns:
        Name of each experiment -> the error that would stop its run, or "" if there is none.

    Raises:
        SettingError: the file is missing, is not valid YAML or has no experiments, a name is
            invalid or repeated, or a matrix is invalid. A matrix is the part of an entry that makes
            several experiments from it.
    """
    # Imported here, because planning imports PyTorch and a list needs no planning
    from fedsilo.core.arguments import RunSources
    from fedsilo.engines.planning import planned_settings

    file = open_simulation(path)
    sources = RunSources(file=path)
    found = {}
    for name in file.cells:
        try:
            planned_settings(name, sources)
            check_resources(file.find(name).resources)
            found[name] = ""
        except FedsiloError as error:
            found[name] = str(error)
    return found


def check_all(path: Path) -> Iterator[str]:
    """Check every experiment of a simulation file, and yield a line for each that cannot run.

    If all experiments can run, a single line says that no mistake was found.

    Raises:
        SettingError: the file is malformed. Also raised after the last line if experiments cannot
            run, with their number.
    """
    faults = check_experiments(path)
    wrong = 0
    for name, fault in faults.items():
        if fault:
            wrong += 1
            yield f"{name}: {fault}"
    number = format_count(len(faults), "experiment")
    if wrong:
        raise SettingError(f"{path}: {wrong} of {number} cannot run: correct each line above")
    yield f"{path}: {number}, no mistake found"
