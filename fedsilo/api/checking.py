"""The doctor: what prevents a run, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

from fedsilo.api import options
from fedsilo.core.arguments import path_of, several
from fedsilo.core.errors import SettingError
from fedsilo.deployment.options import NodeConfig

if TYPE_CHECKING:
    from fedsilo.deployment.doctor.findings import Finding
    from fedsilo.deployment.doctor.site import SiteSetup
    from fedsilo.server_app.config.settings import RunSettings


@options.command
def site(
    experiment: Annotated[str | None, "also check the site for this experiment"] = None,
    *,
    deployment: options.OptionalDeployment = None,
    site: Annotated[Sequence[str], "a site of the deployment (default: all)"] = (),
    kit: Annotated[
        options.MaybePath,
        "a kit, or the folder into which it was opened; of the next options, only --node-config "
        "can be added",
    ] = None,
    superlink: Annotated[str, "the server's host:port"] = "",
    root_certificates: Annotated[options.MaybePath, "the authority's certificate"] = None,
    key: Annotated[
        options.MaybePath, options.Option("the hospital's key", name="--auth-supernode-private-key")
    ] = None,
    node_config: NodeConfig = (),
    host: Annotated[str | None, "address to listen on (default: 127.0.0.1)"] = None,
    port: Annotated[int | None, "port of the SuperNode (default: 9094)"] = None,
    **sources: Unpack[options.Changes],
) -> Iterator[Finding]:
    """Check whether a hospital's node can start and take part in runs.

    The node's start arguments come from ``deployment``, from ``kit``, or from the other options.
    With ``experiment``, a run of it is checked too.

    Yields:
        The findings, site by site. A failed check is a finding, not an error.

    Raises:
        FedsiloError: an option has no effect, or a file cannot be read.
    """
    from fedsilo.deployment.doctor.findings import examine
    from fedsilo.deployment.doctor.site import CHECKS, SiteSetup
    from fedsilo.deployment.worker.hospital import parse_node_config
    from fedsilo.engines.planning import planned_settings

    by_hand: dict[str, object] = {
        "--superlink": superlink,
        "--root-certificates": root_certificates,
        "--auth-supernode-private-key": key,
        "--host": host,
        "--port": port,
    }
    if deployment:
        _refuse_with("--deployment", by_hand | {"--kit": kit, "--node-config": node_config})
    elif kit:
        _refuse_with("--kit", by_hand | {"--site": site})
    elif site:
        raise SettingError(
            "--site needs --deployment: name the deployment, or give 'site' in --node-config"
        )
    settings = None
    if experiment is not None:
        settings = planned_settings(experiment, options.run_sources(sources))
    elif any(sources.values()):
        raise SettingError(
            "--set, --config, --file and --plugin have no effect without an experiment: name one"
        )
    # A zip is opened into a temporary folder, which must stay until the last check
    with ExitStack() as opened:
        if deployment:
            setups = _setups_of_deployment(Path(deployment), several(site), settings)
        elif kit:
            setups = [_setup_of_kit(Path(kit), several(node_config), settings, opened)]
        else:
            node, own_port = parse_node_config(several(node_config)), 9094 if port is None else port
            certificates, own_key = path_of(root_certificates), path_of(key)
            own = (superlink, certificates, own_key, host or "127.0.0.1", own_port, settings)
            setups = [SiteSetup(node, *own)]
        for setup in setups:
            yield from examine(CHECKS, setup, setup.name)


def _setups_of_deployment(
    folder: Path, sites: Sequence[str], settings: RunSettings | None
) -> list[SiteSetup]:
    """Collect for each site of a deployment the arguments that start its node.

    If ``sites`` is empty, all sites of this machine are taken. ``settings`` are those of a run that
    the sites could join. None checks only the nodes.
    """
    from fedsilo.deployment.deployment import read_deployment
    from fedsilo.deployment.doctor.site import SiteSetup

    members = read_deployment(folder)
    chosen = members.choose_sites(sites)
    return [SiteSetup.of(members, name, settings) for name in chosen]


def _setup_of_kit(
    path: Path, node_config: Sequence[str], settings: RunSettings | None, opened: ExitStack
) -> SiteSetup:
    """Collect from a hospital's kit the arguments that start its node.

    The kit is a zip, or the folder into which it was opened. A zip is opened into a temporary
    folder, which ``opened`` removes when it is closed. ``node_config`` overrides the kit's entries.
    """
    from fedsilo.deployment.doctor.hospital_checks import build_setup, open_temporarily
    from fedsilo.deployment.kit import read_kit

    kit = read_kit(path)
    home = kit.path.resolve()
    if not home.is_dir():
        home = opened.enter_context(open_temporarily(kit))
    return build_setup(kit, home, node_config, settings)


@options.command
def server(
    *,
    deployment: options.OptionalDeployment = None,
    authority: Annotated[
        options.MaybePath, options.Option("the authority's certificate", name="--ssl-ca-certfile")
    ] = None,
    certificate: Annotated[
        options.MaybePath, options.Option("the server's certificate", name="--ssl-certfile")
    ] = None,
    certificate_key: Annotated[
        options.MaybePath,
        options.Option("the key of the server's certificate", name="--ssl-keyfile"),
    ] = None,
    database: Annotated[options.MaybePath, "Flower's database"] = None,
    fleet: Annotated[
        str | None,
        options.Option(
            "address by which hospitals reach the server (default: 0.0.0.0:9092)",
            name="--fleet-api-address",
        ),
    ] = None,
    host: Annotated[str | None, "address to listen on (default: 127.0.0.1)"] = None,
    port: Annotated[int | None, "port of the Control API (default: 8000)"] = None,
    hospital: Annotated[Sequence[str], "a hospital that the registry must know"] = (),
) -> Iterator[Finding]:
    """Check whether the server can start and serve runs.

    Without ``deployment``, the other arguments describe the server. $FEDSILO_RUNS then names the
    folder of runs, and $FEDSILO_SITE_REGISTRY the file of the hospitals' keys.

    Yields:
        The findings, in a fixed order. A failed check is a finding, not an error.

    Raises:
        FedsiloError: ``deployment`` is given with another option, or cannot be read.
    """
    from fedsilo.deployment.deployment import read_deployment
    from fedsilo.deployment.doctor.findings import examine
    from fedsilo.deployment.doctor.server import CHECKS, ServerSetup
    from fedsilo.server_app.config.operator_files import REGISTRY

    if deployment:
        by_hand = {
            "--ssl-ca-certfile": authority,
            "--ssl-certfile": certificate,
            "--ssl-keyfile": certificate_key,
            "--database": database,
            "--fleet-api-address": fleet,
            "--host": host,
            "--port": port,
            "--hospital": hospital,
        }
        _refuse_with("--deployment", by_hand)
        setup = ServerSetup.of(read_deployment(Path(deployment)))
    else:
        setup = ServerSetup(
            authority=path_of(authority),
            certificate=path_of(certificate),
            key=path_of(certificate_key),
            database=path_of(database),
            fleet=fleet or "0.0.0.0:9092",
            control=f"{host or '127.0.0.1'}:{8000 if port is None else port}",
            runs=path_of(os.environ.get("FEDSILO_RUNS") or None),
            registry=path_of(os.environ.get(REGISTRY) or None),
            hospitals=tuple((name, None) for name in several(hospital)),
        )
    yield from examine(CHECKS, setup)


@options.command
def run(
    experiment: options.ExperimentName,
    *,
    deployment: options.OptionalDeployment = None,
    supernodes: options.Supernodes = None,
    seed: options.Seed = None,
    **sources: Unpack[options.Changes],
) -> Iterator[Finding]:
    """Ask the sites of a run for their facts, but train nothing.

    Facts such as sample counts decide whether the experiment could run. Without ``deployment``, the
    sites are simulated on this machine.

    Yields:
        The findings. A failed check is a finding, not an error.

    Raises:
        FedsiloError: an argument is wrong, or the deployment or data cannot be read.
    """
    from fedsilo.deployment.deployment import read_deployment
    from fedsilo.deployment.doctor.findings import examine
    from fedsilo.deployment.doctor.run_checks import CHECKS, RunSetup

    where = None
    if deployment:
        _refuse_with("--deployment", {"--supernodes": supernodes})
        where = read_deployment(Path(deployment))
    setup = RunSetup(experiment, options.run_sources(sources), seed, supernodes, where)
    setup.plan  # noqa: B018  # an unknown experiment is an error, not a finding
    yield from examine(CHECKS, setup)


def _refuse_with(source: str, others: Mapping[str, object]) -> None:
    """Refuse options that would have no effect together with the given option ``source``.

    ``others`` maps each option to its value. None or an empty value means that the option is not
    given.

    Raises:
        SettingError: an option in ``others`` is given.
    """
    for option, value in others.items():
        if value != "" and several(value):
            raise SettingError(f"{option} has no effect with {source}: remove one of the two")
