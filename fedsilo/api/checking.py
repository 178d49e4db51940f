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

    A node is the process by which a hospital takes part. Its start arguments come from one of
    these:

    - ``deployment``, for all its sites on this machine or only those in ``site``
    - ``kit``, to which only ``node_config`` may be added
    - ``superlink``, ``root_certificates``, ``key``, ``node_config``, ``host`` and ``port``

    With ``experiment``, the checks also cover a run of it, whose settings ``sources`` may change.

    Yields:
        The findings of all checks, site by site. A failed check is a finding, not an error.

    Raises:
        SettingError: a site or an experiment is unknown, or a given option would have no effect.
        FedsiloError: the deployment, the kit or the node config cannot be read.
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

    Args:
        folder: the deployment's folder.
        sites: the names of the sites, in the order of the result. Empty for all sites of this
            machine.
        settings: the settings of a run, to check whether the sites could join it. None to check
            only the nodes.

    Returns:
        A setup for each site, with the arguments of its node and ``settings``.

    Raises:
        FedsiloError: the folder is not a deployment, or a site is unknown.
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

    A kit has the files with which a hospital joins a deployment. It is a zip, or the folder into
    which the zip was opened. A zip is opened here into a temporary folder. A folder is used as it
    is.

    Args:
        path: the zip or the folder.
        node_config: entries ``key=value``, which override the kit's own node config.
        settings: the settings of a run, to check whether the hospital could join it. None to check
            only the node.
        opened: the stack of open resources. Closing the stack removes the temporary folder.

    Returns:
        The arguments of the node, with ``settings``.

    Raises:
        FedsiloError: the kit or the node config cannot be read.
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

    The server is described by ``deployment``, or by the other parameters and two environment
    variables. ``FEDSILO_RUNS`` then names the folder of runs, and ``FEDSILO_SITE_REGISTRY`` the
    file that binds hospitals' names to keys. After a failed check, only the checks that depend on
    it are skipped.

    Yields:
        The findings of the checks, in a fixed order. A failed check is a finding, not an error.
        Each check runs only when its finding is requested.

    Raises:
        SettingError: ``deployment`` is given together with another option.
        FedsiloError: the deployment cannot be read.
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

    Facts are a site's answers before round 1, such as sample counts and software versions. From the
    facts, the checks find out whether the experiment could run. The sites are those of
    ``deployment``. Without a deployment, they are simulated on this machine.

    Yields:
        The findings of the checks, in a fixed order. A failed check is a finding, not an error.

    Raises:
        SettingError: the experiment or a setting is unknown, or ``supernodes`` is given with
            ``deployment``.
        FedsiloError: the deployment, or the data of a simulation, cannot be read.
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

    Args:
        source: the name of an option that the caller knows to be given, such as ``--deployment``.
        others: name of another option -> its value. None or an empty value means that it is not
            given.

    Raises:
        SettingError: an option in ``others`` is given. The message names the first one.
    """
    for option, value in others.items():
        if value != "" and several(value):
            raise SettingError(f"{option} has no effect with {source}: remove one of the two")
