"""The doctor: what prevents a run, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

from fedsilo.api import options
from fedsilo.core.arguments import path_of, several
from fedsilo.core.errors import SettingError
from fedsilo.core.settings_schema import unknown_name

if TYPE_CHECKING:
    from fedsilo.deployment.doctor.findings import Finding


@options.command
def site(
    experiment: Annotated[str | None, "also check the site for this experiment"] = None,
    *,
    deployment: options.OptionalDeployment = None,
    site: Annotated[Sequence[str], "a site of the deployment (default: all)"] = (),
    kit: Annotated[
        options.MaybePath,
        "a kit, or the folder into which it was opened, instead of the options below",
    ] = None,
    superlink: Annotated[str, "the server's host:port"] = "",
    root_certificates: Annotated[options.MaybePath, "the authority's certificate"] = None,
    key: Annotated[
        options.MaybePath, options.Option("the hospital's key", name="--auth-supernode-private-key")
    ] = None,
    node_config: options.NodeConfig = (),
    host: Annotated[str, "address to listen on"] = "127.0.0.1",
    port: Annotated[int, "port of the SuperNode"] = 9094,
    **sources: Unpack[options.Changes],
) -> Iterator[Finding]:
    """Check a hospital's node, by the arguments that start it."""
    from fedsilo.deployment.deployment import read_deployment
    from fedsilo.deployment.doctor.findings import examine
    from fedsilo.deployment.doctor.hospital_checks import open_temporarily, setup_of
    from fedsilo.deployment.doctor.site import CHECKS, SiteSetup
    from fedsilo.deployment.kit import read_kit
    from fedsilo.deployment.worker.hospital import parse_node_config
    from fedsilo.engines.planning import planned_settings

    if experiment is None and (sources.get("settings") or sources.get("config")):
        raise SettingError("--set and --config change an experiment, but none is named: name one")
    settings = planned_settings(experiment, options.run_sources(sources)) if experiment else None
    node_config, site = several(node_config), several(site)
    by_hand = parse_node_config(node_config)
    if deployment:
        _refuse_both({"--superlink": superlink, "--node-config": node_config})
        members = read_deployment(Path(deployment))
        for name in site:
            if name not in members.sites:
                raise unknown_name("site of the deployment", name, members.sites)
        made = [SiteSetup.of(members, name, settings) for name in site or members.sites]
    elif kit:
        _refuse_both({"--superlink": superlink}, "kit")
        own_kit = read_kit(Path(kit))
        is_open = own_kit.path.is_dir()
        with nullcontext(own_kit.path.resolve()) if is_open else open_temporarily(own_kit) as home:
            setup = setup_of(own_kit, home, node_config, settings)
            yield from examine(CHECKS, setup, setup.name)
        return
    elif site:
        raise SettingError(
            "--site needs --deployment: name the deployment, or give 'site' in --node-config"
        )
    else:
        certificates, own_key = path_of(root_certificates), path_of(key)
        made = [SiteSetup(by_hand, superlink, certificates, own_key, host, port, settings)]
    for setup in made:
        yield from examine(CHECKS, setup, setup.name)


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
        str,
        options.Option("address by which hospitals reach the server", name="--fleet-api-address"),
    ] = "0.0.0.0:9092",
    host: Annotated[str, "address to listen on"] = "127.0.0.1",
    port: Annotated[int, "port of the Control API"] = 8000,
    hospital: Annotated[Sequence[str], "a hospital that the registry must know"] = (),
) -> Iterator[Finding]:
    """Check the server, by the arguments of flower-superlink."""
    from fedsilo.deployment.deployment import read_deployment
    from fedsilo.deployment.doctor.findings import examine
    from fedsilo.deployment.doctor.server import CHECKS, ServerSetup
    from fedsilo.server_app.config.operator_files import REGISTRY

    if deployment:
        _refuse_both({"--database": database, "--hospital": hospital})
        setup = ServerSetup.of(read_deployment(Path(deployment)))
    else:
        setup = ServerSetup(
            authority=path_of(authority),
            certificate=path_of(certificate),
            key=path_of(certificate_key),
            database=path_of(database),
            fleet=fleet,
            control=f"{host}:{port}",
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
    """Ask the sites of a run for their facts, but train nothing."""
    from fedsilo.deployment.deployment import read_deployment
    from fedsilo.deployment.doctor.findings import examine
    from fedsilo.deployment.doctor.run_checks import CHECKS, RunSetup

    where = read_deployment(Path(deployment)) if deployment else None
    setup = RunSetup(experiment, options.run_sources(sources), seed, supernodes, where)
    setup.plan  # noqa: B018  # an unknown experiment is an error, not a finding
    yield from examine(CHECKS, setup)


def _refuse_both(given: dict[str, object], by: str = "deployment") -> None:
    """Refuse options whose values come from the deployment or the kit."""
    for option, value in given.items():
        if value:
            raise SettingError(f"{option} comes from the {by}: remove it, or remove --{by}")
