"""The ``fedsilo`` command: runs, comparisons, the choice of settings, and what belongs to them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import typer

from models.contract.errors import DataError, FedsiloError, RunDirectoryError, SettingError
from models.contract.settings import CommonSettings
from models.contract.settings_schema import Value, defaults, key_of, rule_of
from server_app.cli.deploy import add_deploy
from server_app.cli.figures import add_commands
from server_app.cli.finetune import add_finetune
from server_app.config.settings import (
    known_defaults,
    launch_values,
    read_experiments,
    resolve,
    run_values,
)
from server_app.run.planning import RunSources, planned, simulation_file, start

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0 well, 1 an error told in one line."""
    options = _parser().parse_args(arguments)
    handler: Callable[[argparse.Namespace], None] = options.handler
    try:
        handler(options)
    except FedsiloError as error:
        print(f"fedsilo: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left; nothing more to say
        return 1
    except OSError as error:
        print(f"fedsilo: error: {error.filename or 'system'}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fedsilo: interrupted; 'fedsilo resume RUN-DIR' goes on", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedsilo", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_runs, _add_compare, _add_evidence, _add_small_commands):
        add(commands)
    _add_pictures(commands)
    _add_against(commands)
    add_finetune(commands)
    add_deploy(commands, _add_settings_options)
    return parser


def _add_runs(commands: Commands) -> None:
    simulate = commands.add_parser("simulate", help="run an experiment of simulation.yaml")
    simulate.add_argument("experiment")
    _add_run_options(simulate)
    simulate.add_argument("--seed", type=int, help="seed, instead of the experiment's")
    simulate.add_argument("--name", help="name of the run directory")
    simulate.set_defaults(handler=_simulate)

    resume = commands.add_parser("resume", help="go on with a run that was cut short")
    resume.add_argument("run_dir", type=Path)
    resume.add_argument("--engine", choices=("ray", "inline"), help="default: as before")
    resume.add_argument("--supernodes", type=int, help="simulated sites (default: as before)")
    resume.set_defaults(handler=_resume)


def _add_compare(commands: Commands) -> None:
    compare = commands.add_parser("compare", help="run experiments over seeds, print a table")
    compare.add_argument("experiments", nargs="+", metavar="experiment")
    _add_run_options(compare)
    compare.set_defaults(engine="inline", handler=_compare)
    compare.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    compare.add_argument("--jobs", type=int, default=0, help="runs at once (default: one a core)")
    compare.add_argument(
        "--split",
        choices=("test", "val"),
        default="test",
        help="val: figures of the validation data, to choose settings by",
    )
    compare.add_argument(
        "--splits", action="store_true", help="let each seed draw a split of its own (fold-seed)"
    )
    _add_shown(compare)


def _add_shown(compare: argparse.ArgumentParser) -> None:
    compare.add_argument(
        "--metrics", metavar="M,...", help="names or patterns of metrics (default: the data set's)"
    )
    compare.add_argument(
        "--median", action="store_true", help="median and range over seeds, not mean and sd"
    )
    compare.add_argument(
        "--tests", metavar="M,...", help="metrics of which to test whether experiments differ"
    )
    compare.add_argument("--paired", action="store_true", help="test the differences by seed")
    compare.add_argument("--csv", type=Path, help="also write the table as CSV")
    compare.add_argument("--markdown", type=Path, help="also write table and tests as Markdown")


def _add_evidence(commands: Commands) -> None:
    tune = commands.add_parser("tune", help="choose an experiment's settings on training data")
    tune.add_argument("experiment")
    tune.set_defaults(handler=_tune)
    cross = commands.add_parser("crossvalidate", help="repeated cross-validation over each site")
    cross.add_argument("experiments", nargs="+", metavar="experiment")
    cross.add_argument("--folds", type=int, default=5, help="folds of each site (default 5)")
    cross.add_argument("--repeats", type=int, default=5, help="shufflings (default 5)")
    cross.add_argument("--csv", type=Path, help="also write the tables as CSV")
    cross.add_argument("--markdown", type=Path, help="also write the tables as Markdown")
    cross.set_defaults(handler=_crossvalidate)
    for parser in (tune, cross):
        _add_settings_options(parser)
        parser.add_argument("--jobs", type=int, default=0, help="runs at once (default: a core)")
        parser.set_defaults(supernodes=None)


def _add_small_commands(commands: Commands) -> None:
    fetch = commands.add_parser("fetch", help="download a data set's files, with checksums")
    fetch.add_argument("dataset")
    fetch.add_argument("--data-dir", type=Path, required=True)
    fetch.add_argument("--base-url", default="", help="another place with the same files")
    fetch.set_defaults(handler=_fetch)

    pre = commands.add_parser("pretrain", help="train an experiment's ViT on public images")
    pre.add_argument("experiment")
    _add_settings_options(pre)
    pre.add_argument("--weights", type=Path, help="file (default: what backbone-weights names)")
    pre.set_defaults(handler=_pretrain, supernodes=None)

    settings = commands.add_parser("settings", help="list every setting, its default and range")
    settings.add_argument(
        "--pyproject", action="store_true", help="as the run-config section of pyproject.toml"
    )
    settings.set_defaults(handler=_settings)

    experiments = commands.add_parser("experiments", help="list the experiments")
    experiments.add_argument("--file", type=Path, default=None)
    experiments.set_defaults(handler=_experiments)


def _add_settings_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="changes",
        help="a setting, instead of the experiment's",
    )
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="settings from a file")
    parser.add_argument(
        "--out", type=Path, help="folder of run directories (default: the settings', else runs)"
    )
    parser.add_argument("--file", type=Path, default=None, help="simulation.yaml to read")


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    _add_settings_options(parser)
    parser.add_argument(
        "--engine",
        choices=("ray", "inline"),
        default="ray",
        help="ray: by 'flwr run'; inline: in this process (default %(default)s)",
    )
    parser.add_argument("--supernodes", type=int, help="simulated sites (default: all silos)")


def _simulate(options: argparse.Namespace) -> None:
    more: dict[str, Value] = {}
    if options.seed is not None:
        more["seed"] = options.seed
    if options.name:
        more["run-name"] = options.name
    settings, resources = planned(
        options.experiment, sources_of(options), supernodes=options.supernodes, more=more
    )
    start(settings, resources, options.engine)


def sources_of(options: argparse.Namespace) -> RunSources:
    """Return where the settings come from."""
    return RunSources(
        file=options.file, config=options.config, changes=tuple(options.changes), out=options.out
    )


def _resume(options: argparse.Namespace) -> None:
    from server_app.records.run_directory import RunDirectory
    from server_app.run.ray_engine import check_resources

    directory = RunDirectory(options.run_dir.resolve())
    config = directory.path / "config.toml"
    if not config.is_file():
        raise RunDirectoryError(
            f"{directory.path} has no config.toml: it is no run directory, or "
            "its run never began; start it anew"
        )
    launch = launch_values(config)
    values = run_values(config) | {
        "resume": True,
        "out": str(directory.path.parent),
        "run-name": directory.path.name,
    }
    resources = dict(launch.get("resources", {}))
    resources.setdefault("num-supernodes", len(directory.read_json("silos.json")))
    if options.supernodes is not None:
        resources["num-supernodes"] = options.supernodes
    engine = options.engine or launch.get("engine", "ray")
    start(resolve(values), check_resources(resources), engine)


def _compare(options: argparse.Namespace) -> None:
    from server_app.compare.over_seeds import compare

    _at_least(options, seeds=1, jobs=0)
    compare(options)


def _tune(options: argparse.Namespace) -> None:
    from server_app.compare.tune import tune

    _at_least(options, jobs=0)
    tune(options)


def _crossvalidate(options: argparse.Namespace) -> None:
    from server_app.compare.crossvalidate import crossvalidate

    _at_least(options, folds=2, repeats=1, jobs=0)
    crossvalidate(options)


def _at_least(options: argparse.Namespace, **bounds: int) -> None:
    for option, least in bounds.items():
        if getattr(options, option) < least:
            raise SettingError(
                f"--{option} is {getattr(options, option)}; it must be at least {least}"
            )


def _pretrain(options: argparse.Namespace) -> None:
    from server_app.finetune.pretrain import pretrain

    pretrain(options)


def _fetch(options: argparse.Namespace) -> None:
    from datasets.io.download import fetch
    from datasets.registry import data_set

    files = data_set(options.dataset).files
    if files is None:
        raise DataError(f"data set '{options.dataset}' has no public files: nothing to fetch")
    for line in fetch(files, options.data_dir, options.base_url):
        print(line, flush=True)


def _against(options: argparse.Namespace) -> None:
    from server_app.compare.over_setting import against

    against(options)


def _add_against(commands: Commands) -> None:
    shares = commands.add_parser("against", help="draw a figure of finished runs over a setting")
    shares.add_argument("setting", help="in which the runs differ, for example unseen")
    shares.add_argument(
        "folders", nargs="+", type=Path, metavar="run_dir", help="a run, or a folder of runs"
    )
    shares.add_argument("--metric", default="accuracy", help="(default %(default)s)")
    shares.add_argument("--split", choices=("test", "val"), default="test", help="(default test)")
    shares.add_argument(
        "--picture", type=Path, default=Path("against.png"), help="(default %(default)s)"
    )
    shares.set_defaults(handler=_against)


def _add_pictures(commands: Commands) -> None:
    """Add the commands of ``figures``, which typer reads: until all of them are."""
    app = typer.Typer(add_completion=False)
    add_commands(app)
    for command in app.registered_commands:
        name = str(getattr(command.callback, "__name__", ""))
        parser = commands.add_parser(name, help=command.help, add_help=False, prefix_chars="\0")
        parser.add_argument("rest", nargs=argparse.REMAINDER)
        parser.set_defaults(handler=lambda options, name=name: _typed(app, [name, *options.rest]))


def _typed(app: typer.Typer, arguments: list[str]) -> None:
    try:
        app(arguments, prog_name="fedsilo")
    except SystemExit as end:
        if end.code:
            raise


def _settings(options: argparse.Namespace) -> None:
    if options.pyproject:
        import tomli_w

        print("[tool.flwr.app.config]\n" + tomli_w.dumps(known_defaults()), end="")
        return
    from strategies.methods.registry import METHODS, strategy_class

    _list_settings("every method", CommonSettings)
    for method in METHODS:
        _list_settings(f"method {method}", strategy_class(method).settings_class)


def _list_settings(title: str, cls: type) -> None:
    print(f"# {title}")
    for key, default in defaults(cls).items():
        rule = rule_of(cls, key)
        allowed = f"; {rule.allowed()}" if rule.allowed() else ""
        print(f"{key_of(key)} = {default!r}  ({rule.help}{allowed})")


def _experiments(options: argparse.Namespace) -> None:
    from datasets.registry import silo_count

    for name, experiment in read_experiments(simulation_file(options.file)).items():
        settings = resolve(experiment.values)
        print(
            f"{name}: {settings.common.method} on {settings.common.dataset}, "
            f"{silo_count(settings.common) or 'own'} silos, {settings.common.rounds} rounds"
        )


if __name__ == "__main__":
    sys.exit(main())
