"""``fedsilo doctor``: options only."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsilo.models.contract.errors import SettingError
from fedsilo.server_app.cli.options import (
    DEPLOY,
    ChangesOption,
    ConfigOption,
    ExperimentArgument,
    FileOption,
    SeedOption,
    SupernodesOption,
    example,
)
from fedsilo.server_app.cli.printing import line_printer

if TYPE_CHECKING:
    from fedsilo.server_app.config.settings import RunSettings
    from fedsilo.server_app.doctor.findings import Finding

_Deployment = Annotated[
    Path | None,
    typer.Option(
        "--deployment", "--dir", help="a folder of 'fedsilo deploy', whose settings are taken"
    ),
]
_Sites = Annotated[
    list[str],
    typer.Option(
        "--site",
        default_factory=list,
        show_default=False,
        help="a site of the deployment (default: all)",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="print JSON instead of lines")]
_MaybeExperiment = Annotated[str | None, typer.Argument(metavar="[experiment]", show_default=False)]
_SuperLink = Annotated[
    str, typer.Option("--superlink", show_default=False, help="the server's host:port")
]
_RootCertificates = Annotated[
    Path | None, typer.Option("--root-certificates", help="the authority's certificate")
]
_NodeKey = Annotated[
    Path | None, typer.Option("--auth-supernode-private-key", help="the hospital's key")
]
_NodeConfig = Annotated[
    list[str],
    typer.Option(
        "--node-config",
        metavar="KEY=VALUE",
        default_factory=list,
        show_default=False,
        help="what the SuperNode is told, in one text or several",
    ),
]
_Host = Annotated[
    str, typer.Option("--host", show_default=False, help="to listen on (default 127.0.0.1)")
]
_NodePort = Annotated[
    int, typer.Option("--port", show_default=False, help="of the SuperNode (default 9094)")
]
_ControlPort = Annotated[
    int, typer.Option("--port", show_default=False, help="of the Control API (default 8000)")
]
_Fleet = Annotated[
    str,
    typer.Option(
        "--fleet-api-address",
        show_default=False,
        help="where hospitals reach it (default 0.0.0.0:9092)",
    ),
]
_Hospitals = Annotated[
    list[str],
    typer.Option(
        "--hospital",
        default_factory=list,
        show_default=False,
        help="a hospital that the registry must know",
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Add ``doctor site | server | run``."""
    doctor = typer.Typer(rich_markup_mode=app.rich_markup_mode)
    doctor.command(
        "site",
        help="look at a hospital's node, by the arguments that start it",
        epilog=example("doctor site picsr-heart --deployment hearts --site va"),
    )(_site)
    doctor.command(
        "server",
        help="look at the server, by the arguments of flower-superlink",
        epilog=example("doctor server --deployment hearts"),
    )(_server)
    doctor.command(
        "run",
        help="meet the sites of a run and train nothing",
        epilog=example("doctor run uefl-digits --set rounds=3"),
    )(_run)
    app.add_typer(
        doctor,
        name="doctor",
        help="what stands in a run's way, and what to do about it",
        epilog=example("doctor run uefl-digits"),
        rich_help_panel=DEPLOY,
    )


def _site(
    experiment: _MaybeExperiment = None,
    *,
    deployment: _Deployment = None,
    sites: _Sites,
    superlink: _SuperLink = "",
    root_certificates: _RootCertificates = None,
    key: _NodeKey = None,
    node_config: _NodeConfig,
    host: _Host = "127.0.0.1",
    port: _NodePort = 9094,
    changes: ChangesOption,
    config: ConfigOption = None,
    file: FileOption = None,
    as_json: _Json = False,
) -> None:
    from fedsilo.server_app.deploy.deployment import read_deployment
    from fedsilo.server_app.doctor import setups
    from fedsilo.server_app.doctor.findings import examine
    from fedsilo.server_app.doctor.registry import TARGETS
    from fedsilo.server_app.doctor.site import SiteSetup

    settings = _settings(experiment, tuple(changes), config, file)
    by_hand = setups.node_config(node_config)
    if deployment:
        _refuse_both({"--superlink": superlink, "--node-config": node_config})
        made = setups.sites_of(read_deployment(deployment), sites, settings)
    else:
        if sites:
            raise SettingError("--site is of a deployment: by hand it is a key of --node-config")
        made = [SiteSetup(by_hand, superlink, root_certificates, key, host, port, settings)]
    found = (f for setup in made for f in examine(TARGETS["site"], setup, setup.name))
    _tell("site", found, as_json)


def _server(
    *,
    deployment: _Deployment = None,
    authority: Annotated[
        Path | None, typer.Option("--ssl-ca-certfile", help="the authority's certificate")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option("--ssl-certfile", help="the server's certificate")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--ssl-keyfile", help="the key of that certificate")
    ] = None,
    database: Annotated[Path | None, typer.Option("--database", help="Flower's database")] = None,
    fleet: _Fleet = "0.0.0.0:9092",
    host: _Host = "127.0.0.1",
    port: _ControlPort = 8000,
    hospitals: _Hospitals,
    as_json: _Json = False,
) -> None:
    from fedsilo.server_app.config.operator_files import REGISTRY
    from fedsilo.server_app.deploy.deployment import read_deployment
    from fedsilo.server_app.doctor.findings import examine
    from fedsilo.server_app.doctor.registry import TARGETS
    from fedsilo.server_app.doctor.server import ServerSetup
    from fedsilo.server_app.doctor.setups import server_of

    if deployment:
        _refuse_both({"--database": database, "--hospital": hospitals})
        setup = server_of(read_deployment(deployment))
    else:
        runs, registry = (os.environ.get(name, "") for name in ("FEDSILO_RUNS", REGISTRY))
        setup = ServerSetup(
            authority=authority,
            certificate=certificate,
            key=key,
            database=database,
            fleet=fleet,
            control=f"{host}:{port}",
            runs=Path(runs) if runs else None,
            registry=Path(registry) if registry else None,
            hospitals=tuple((name, None) for name in hospitals),
        )
    _tell("server", examine(TARGETS["server"], setup), as_json)


def _run(
    experiment: ExperimentArgument,
    *,
    deployment: _Deployment = None,
    changes: ChangesOption,
    config: ConfigOption = None,
    file: FileOption = None,
    supernodes: SupernodesOption = None,
    seed: SeedOption = None,
    as_json: _Json = False,
) -> None:
    from fedsilo.server_app.deploy.deployment import read_deployment
    from fedsilo.server_app.doctor.findings import examine
    from fedsilo.server_app.doctor.registry import TARGETS
    from fedsilo.server_app.doctor.run import RunSetup
    from fedsilo.server_app.run.planning import RunSources

    sources = RunSources(file=file, config=config, changes=tuple(changes))
    where = read_deployment(deployment) if deployment else None
    setup = RunSetup(experiment, sources, seed, supernodes, where)
    setup.planned  # noqa: B018  # an experiment that does not exist is one line, and no finding
    _tell("run", examine(TARGETS["run"], setup), as_json)


def _settings(
    experiment: str | None, changes: tuple[str, ...], config: Path | None, file: Path | None
) -> RunSettings | None:
    """Return an experiment's settings, None where none is named."""
    if experiment is None:
        if changes or config:
            raise SettingError("--set and --config change an experiment: name one")
        return None
    from fedsilo.server_app.run.planning import RunSources, planned

    return planned(experiment, RunSources(file=file, config=config, changes=changes))[0]


def _refuse_both(given: dict[str, object]) -> None:
    """Refuse options that a deployment says itself."""
    for option, value in given.items():
        if value:
            raise SettingError(f"{option} is the deployment's to say: leave it or --deployment out")


def _tell(target: str, findings: Iterable[Finding], as_json: bool) -> None:
    """Print what is found, line by line as it comes, or as JSON at the end; exit by it."""
    from fedsilo.server_app.doctor.findings import exit_code
    from fedsilo.server_app.doctor.report import document, last_line, lines_of
    from fedsilo.server_app.run.progress_bars import make_console

    say, found = line_printer(make_console()), []
    for finding in findings:
        found.append(finding)
        for line in lines_of(finding) if not as_json else ():
            say(line)
    if as_json:
        print(json.dumps(document(target, found), indent=2))
    else:
        say(last_line(found))
    if code := exit_code(found):
        raise typer.Exit(code)
