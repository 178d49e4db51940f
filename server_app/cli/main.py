"""The ``fedsilo`` command: runs, comparisons, the choice of settings, and what belongs to them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import typer

from models.contract.errors import DataError, FedsiloError, RunDirectoryError, SettingError
from models.contract.settings import CommonSettings
from models.contract.settings_schema import Value, defaults, key_of, rule_of
from server_app.cli import deploy, finetune
from server_app.cli.figures import add_pictures
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
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] and words[0] in _TYPED:
        run = partial(_typed_app(), words, standalone_mode=False)
    else:
        options = _parser().parse_args(words)
        run = partial(options.handler, options)
    try:
        run()
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


_TYPED = ("finetune", "pretrain", "deploy")


def _typed_app() -> typer.Typer:
    """Return the commands that are typed already."""
    app = typer.Typer()
    for module in (finetune, deploy):
        module.add_commands(app)
    return app


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedsilo", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_runs, _add_compare, _add_evidence, _add_small_commands):
        add(commands)
    add_pictures(commands)
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

    plot = commands.add_parser("plot", help="draw the learning curves of a finished run again")
    plot.add_argument("run_dir", type=Path)
    plot.set_defaults(handler=_plot)

    explain = commands.add_parser("explain", help="why a run's model answers so for one patient")
    explain.add_argument("run_dir", type=Path)
    explain.add_argument("--site", required=True, help="the patient's site")
    explain.add_argument("--row", type=int, required=True, help="row of the split, from 0")
    explain.add_argument("--split", choices=("train", "val", "test"), default="test")
    explain.add_argument("--data-dir", type=Path, help="the data directory (default: the run's)")
    explain.add_argument("--state-dir", type=Path, help="the site's state (default: the run's)")
    explain.add_argument("--json", type=Path, help="also write it as JSON")
    explain.add_argument("--picture", type=Path, help="also draw it as PNG")
    explain.set_defaults(handler=_explain)

    attention = commands.add_parser("attention", help="draw where a run's ViT looked, per site")
    attention.add_argument("run_dir", type=Path)
    attention.add_argument("--site", help="one site (default: all)")
    attention.add_argument("--split", choices=("train", "val", "test"), default="test")
    attention.add_argument("--images", type=int, default=5, help="images per class (default 5)")
    attention.add_argument("--data-dir", type=Path, help="the data directory (default: the run's)")
    attention.add_argument("--state-dir", type=Path, help="the site's state (default: the run's)")
    attention.add_argument("--out", type=Path, help="folder of the pictures (default: the run's)")
    attention.set_defaults(handler=_attention)

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


def _fetch(options: argparse.Namespace) -> None:
    from datasets.io.download import fetch
    from datasets.registry import data_set

    files = data_set(options.dataset).files
    if files is None:
        raise DataError(f"data set '{options.dataset}' has no public files: nothing to fetch")
    for line in fetch(files, options.data_dir, options.base_url):
        print(line, flush=True)


def _plot(options: argparse.Namespace) -> None:
    from server_app.figures.learning_curves import draw_curves, draw_pictures
    from server_app.records.run_directory import RunDirectory
    from strategies.methods.registry import strategy_class

    directory = RunDirectory(options.run_dir)
    draw_curves(directory)
    print(directory.path / "curves.png")
    method = strategy_class(directory.read_json("summary.json")["method"])
    for path in draw_pictures(directory, method.pictures):
        print(path)


def _explain(options: argparse.Namespace) -> None:
    from server_app.figures.explain import explain

    explain(options)


def _attention(options: argparse.Namespace) -> None:
    from server_app.figures.explain import draw_attention

    draw_attention(options)


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
