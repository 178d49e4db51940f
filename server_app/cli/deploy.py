"""The ``deploy`` commands: options only."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_FOLDER = Path("deployment")


def add_deploy(commands: Commands, add_run_options: Callable[..., None]) -> None:
    """Add ``deploy up | status | logs | run | down``."""
    deploy = commands.add_parser("deploy", help="a server and hospitals as processes, with TLS")
    actions = deploy.add_subparsers(required=True, metavar="ACTION")
    up = _action(actions, "up", "start all that does not run")
    up.add_argument("experiment", nargs="?", default="uefl-digits", help="(default %(default)s)")
    up.add_argument("--sites", type=int, help="how many silos the experiment is cut into")
    up.add_argument("--site", action="append", default=[], help="a site by name, instead")
    up.add_argument("--data-dir", type=Path, help="where the sites' data lie")
    up.add_argument("--device", help="of all sites (default cpu)")
    up.add_argument("--file", type=Path, help="simulation.yaml to read")
    up.add_argument(
        "--node-config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="what else every SuperNode is told, for example allow-folds=true",
    )
    _action(actions, "status", "print what runs")
    logs = _action(actions, "logs", "print the end of a log")
    logs.add_argument("member", nargs="?", default="server", help="server (default) or a site")
    logs.add_argument("--lines", type=int, default=40, help="(default %(default)s)")
    run = _action(actions, "run", "run an experiment there, and wait")
    run.add_argument("experiment")
    add_run_options(run)
    run.add_argument("--seed", type=int, help="seed, instead of the experiment's")
    run.add_argument("--name", help="name of the run directory")
    _action(actions, "down", "end all processes")


def _action(actions: Commands, name: str, told: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=told)
    parser.add_argument(
        "--dir", type=Path, default=_FOLDER, help="the deployment's folder (default %(default)s)"
    )
    parser.set_defaults(handler=_handle, action=name)
    return parser


def _handle(options: argparse.Namespace) -> None:
    from server_app.deploy import commands as deploy
    from server_app.deploy import run as deploy_run

    module = deploy_run if options.action == "run" else deploy
    handler: Callable[[argparse.Namespace], None] = getattr(module, options.action)
    handler(options)
