"""The arguments of the commands: their types, and the help that the command line shows.

A command is a function, decorated with ``command``. Its parameters are the arguments and options of
the command line, and ``Annotated`` gives each one its help:

    @command
    def calibrate(
        run_dir: Annotated[AnyRun, "the run directory"],
        *,
        coverage: Annotated[float, "coverage of the prediction sets"] = 0.9,
    ) -> Calibration:

On the command line, a parameter before the ``*`` is positional, and a parameter after it is an
option such as ``--coverage``. ``Option`` in place of the help text changes the name or the form of
an option. A parameter without help exists only in Python.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypedDict,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from fedsilo.core.arguments import (
    AnyPath,
    AnyRun,
    Plugins,
    RunSources,
    Settings,
    path_of,
    plugin_texts,
    texts_of,
)

# Offered here too, so that a command finds all shared options in this module
from fedsilo.core.arguments import MaybePath as MaybePath
from fedsilo.core.arguments import Option as Option
from fedsilo.core.arguments import SimulationFile as SimulationFile
from fedsilo.core.errors import FedsiloError, SettingError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


Engine = Literal["auto", "processes", "ray", "inline"]
Family = Literal["logistic", "linear", "poisson", "cox"]
Ties = Literal["efron", "breslow"]
Trusted = Literal["server", "sums"]
Layer = Literal["embedding", "penultimate"]
Reader = Literal["research", "clinic", "dpo"]
Split = Literal["train", "val", "test"]
MeasuredSplit = Literal["test", "val"]
Sampler = Literal["grid", "tpe"]
TunedMetric = Literal[
    "accuracy",
    "balanced-accuracy",
    "pooled-balanced-accuracy",
    "auc",
    "average-precision",
    "mae",
    "rmse",
    "r2",
    "c-index",
    "brier",
    "dice",
    "iou",
]
RunState = Literal["finished", "running", "interrupted", "failed", "unreadable"]
Track = Literal["none", "tensorboard", "mlflow", "wandb"]

# Parameters that several commands have
RunDir = Annotated[AnyRun, "the run directory"]
RunDirs = Annotated[Sequence[AnyRun], "run directories"]
ExperimentName = Annotated[str, "an experiment ('fedsilo experiments' lists them), or a method"]
ExperimentNames = Annotated[Sequence[str], "experiments, or methods"]
Supernodes = Annotated[int | None, "number of simulated sites (default: the experiment's, or all)"]
Seed = Annotated[int | None, "a seed that replaces the experiment's"]
RunName = Annotated[str | None, "name of the run directory; a number is added if it exists"]
RayAddress = Annotated[
    str | None,
    Option("a running Ray cluster (default: Ray starts one for this run)", value="auto|HOST:PORT"),
]
Tracker = Annotated[Track | None, "the tracker that also gets the metrics after each round"]
ENGINE_HELP = (
    "where sites train: inline in this process, processes in one process per core, ray with Flower "
    "and Ray, also on a cluster; auto takes the quicker one"
)
AnyEngine = Annotated[Engine, ENGINE_HELP]
Jobs = Annotated[int | str, Option("number of runs at once, 0 for one per core", value="N|slurm")]
SlurmParameters = Annotated[
    Sequence[str],
    Option(
        "with --jobs slurm: slurm_partition, timeout_min, cpus_per_task, mem_gb ...",
        value="KEY=VALUE",
    ),
]
Sites = Annotated[Sequence[str], "a site (default: all)"]
ModelSite = Annotated[str | None, "the site whose model is used (default: the model of all sites)"]
CalibrationFile = Annotated[MaybePath, "the file that 'calibrate' wrote (default: the run's)"]
SplitOfSamples = Annotated[Split, "the split with the samples"]
DataDir = Annotated[MaybePath, "the data directory (default: the run's)"]
StateDir = Annotated[MaybePath, "the site's state (default: the run's)"]
OwnPlugin = Annotated[
    Plugins,
    Option("your own copy FILE.py of the run's plugin, or its installed module", value="FILE.py"),
]
NewPlugin = Annotated[
    Plugins,
    Option(
        "a file FILE.py or a module with a network, method, data set or partition of your own",
        value="FILE.py",
    ),
]
DeploymentFolder = Annotated[AnyPath, "the folder of a 'fedsilo deploy'"]
OptionalDeployment = Annotated[MaybePath, "the folder of a 'fedsilo deploy'"]


class Changes(TypedDict, total=False):
    """The sources of settings: ``settings`` override ``config``, and both override the experiment.

    ``file`` is the simulation.yaml with the experiment. By default it is the one in the working
    folder or, if there is none, fedsilo's own. ``plugin`` lists files and modules of plugins.
    """

    settings: Annotated[
        Settings | None,
        Option("a setting that replaces the experiment's", name="--set", value="KEY=VALUE"),
    ]
    plugin: NewPlugin
    config: Annotated[MaybePath, Option("a file of settings", value="FILE.toml")]
    file: SimulationFile


class Sources(Changes, total=False):
    """The sources of a run's settings, and the parent folder of its run directory."""

    out: Annotated[MaybePath, "folder of run directories (default: the settings' own, else runs)"]


def run_sources(given: Changes) -> RunSources:
    """Collect the sources of a command's settings: its files, its changes and its output folder.

    ``given`` has the options of the command by name, and may lack any of them. The changes are the
    entries of ``settings``. ``plugin`` becomes a change ``plugin=...`` before them. As a later
    change overrides an earlier one, a 'plugin' among ``settings`` overrides the option.
    """
    entries = plugin_texts(given.get("plugin"))
    plugins = [f"plugin={', '.join(entries)}"] if entries else []
    return RunSources(
        file=path_of(given.get("file")),
        config=path_of(given.get("config")),
        changes=(*plugins, *texts_of(given.get("settings"))),
        out=path_of(cast(Sources, given).get("out")),
    )


@overload
def command(function: Callable[P, Iterator[T]]) -> Callable[P, list[T]]: ...
@overload
def command(function: Callable[P, R]) -> Callable[P, R]: ...
def command(function: Callable[P, Any]) -> Callable[P, Any]:
    """Turn a function into a command of fedsilo that Python code can call too.

    Python code calls the wrapper that is returned. The wrapper first checks the arguments. If the
    function yields values, the wrapper returns them as a list. If a ``FedsiloError`` ends the
    function early, the values so far are attached to the error as notes (``add_note``). The command
    line unwraps the function, and prints each value when it is yielded.
    """

    @wraps(function)
    def check_and_call(*args: P.args, **kwargs: P.kwargs) -> Any:
        signature = inspect.signature(function)
        given = signature.bind(*args, **kwargs).arguments
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
        check_arguments(function, given)
        result = function(*args, **kwargs)
        if inspect.isgenerator(result):
            return _collect(result)
        return result

    return check_and_call


def _collect(results: Iterable[Any]) -> list[Any]:
    """Collect in a list the values that a command yields, until the command ends.

    If the command raises a FedsiloError, the values so far are attached to the error as notes, and
    the error is raised again.
    """
    collected = []
    try:
        for result in results:
            collected.append(result)
    except FedsiloError as error:
        for result in collected:
            error.add_note(str(result))
        raise
    return collected


def parameters_of(function: Callable[..., Any], skip: int = 0) -> dict[str, inspect.Parameter]:
    """Return a function's parameters by name, each with the type of its annotation.

    Annotations that are strings are converted to the types that they name. A parameter such as
    ``**sources``, whose type is an unpacked ``TypedDict``, is replaced by the keys of this type.
    Each key becomes a keyword-only parameter with default None.

    Args:
        function: the function. If it is a wrapper, the wrapped function is read.
        skip: the number of parameters to leave out at the beginning.
    """
    function = inspect.unwrap(function)
    found: dict[str, inspect.Parameter] = {}
    for parameter in list(inspect.signature(function).parameters.values())[skip:]:
        hint = _resolve(parameter.annotation, function.__globals__)
        if parameter.kind is not parameter.VAR_KEYWORD:
            found[parameter.name] = parameter.replace(annotation=hint)
            continue
        keys = get_type_hints(get_args(hint)[0], include_extras=True)
        for name, own in keys.items():
            found[name] = inspect.Parameter(
                name, parameter.KEYWORD_ONLY, default=None, annotation=own
            )
    return found


def _resolve(annotation: Any, names: dict[str, Any]) -> Any:
    """Convert an annotation, which may be a string, to the type that it names.

    Names in the string are looked up in ``names``, the globals of the function's module. An
    ``Annotated`` type stays ``Annotated``, with its metadata.
    """

    # get_type_hints resolves all annotations of a function, so this function has only this one
    def holder() -> None: ...

    holder.__annotations__ = {"it": annotation}
    return get_type_hints(holder, names, include_extras=True)["it"]


def option_of(hint: Any) -> Option | None:
    """Return the help that an ``Annotated`` type has for the command line.

    It is the first string or ``Option`` in the type. A string becomes an ``Option``. The result is
    None without such help.
    """
    for entry in getattr(hint, "__metadata__", ()):
        if isinstance(entry, str):
            return Option(entry)
        if isinstance(entry, Option):
            return entry
    return None


def members_of(hint: Any) -> list[Any]:
    """List the types that a parameter accepts.

    The metadata of an ``Annotated`` type are ignored. A union gives its members. Any other type
    gives only itself, also a ``Literal`` with several values.
    """
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return list(get_args(hint))
    return [hint]


_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check the arguments of a call against the function's signature, before the call.

    Every name is checked, but missing arguments are not noticed. A value is checked only if its
    parameter accepts only None, a ``Literal``, numbers, booleans and texts. If the parameter also
    accepts another type, such as a path or a sequence, the value is not checked here.

    Args:
        function: the function that is called.
        given: name of an argument -> its value.

    Raises:
        SettingError: an argument has the wrong type, or is not one of the values of its
            ``Literal``.
        TypeError: an argument's name is not the name of a parameter.
    """
    known = parameters_of(function)
    for name, value in given.items():
        if name not in known:
            # ``**sources`` takes any name, so that Python would not refuse a misspelt one
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}")
        _check_argument(name, members_of(known[name].annotation), value)


def _check_argument(name: str, members: list[Any], value: object) -> None:
    # The value must fit one member of the union. The code that reads a path or another type
    # checks it, so such a member accepts any value here
    words: list[str] = []
    for member in members:
        choices = get_args(member) if get_origin(member) is Literal else ()
        if member is type(None):
            choices = (None,)
        if value in choices:
            return
        if choices:
            words += [str(choice) for choice in choices]
        elif member not in _WORDS or _is_a(member, value):
            return
        else:
            words.append(_WORDS[member])
    raise SettingError(f"{name!r} must be {_one_of(words)}, but is {value!r}")


def _is_a(kind: type, value: object) -> bool:
    # True is an int in Python, but a number of seeds is not True
    if isinstance(value, bool):
        return kind is bool
    # NumPy's numbers count too
    if kind is int:
        return isinstance(value, Integral)
    if kind is float:
        return isinstance(value, Real)
    return isinstance(value, kind)


def _one_of(words: Sequence[str]) -> str:
    """Join choices: three or more as 'one of auto, inline, ray', fewer as 'a text or None'."""
    if len(words) > 2:
        return f"one of {', '.join(words)}"
    return " or ".join(words)
