"""Set-ups to look at: those of a deployment, of its own commands' arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings_schema import Value, unknown_name
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.deploy.deployment import SERVER, Deployment
from fedsilo.server_app.doctor.server import ServerSetup
from fedsilo.server_app.doctor.site import SiteSetup


def node_config(texts: Sequence[str]) -> dict[str, Value]:
    """Return a node config as Flower reads it, of one text or several.

    Raises:
        SettingError: it cannot be read.
    """
    from flwr.common.config import parse_config_args

    try:
        return dict(parse_config_args(list(texts)))
    except Exception as error:  # it is Typer's or TOML's, and ends the SuperNode too
        raise SettingError(
            f"--node-config cannot be read: {' '.join(str(error).split())}"
        ) from None


def sites_of(
    deployment: Deployment, names: Sequence[str], settings: RunSettings | None
) -> list[SiteSetup]:
    """Return the set-ups of a deployment's sites, of all where none is named.

    Raises:
        SettingError: there is no such site.
    """
    for name in names:
        if name not in deployment.sites:
            raise unknown_name("site of the deployment", name, deployment.sites)
    return [_site_of(deployment, name, settings) for name in names or deployment.sites]


def _site_of(deployment: Deployment, name: str, settings: RunSettings | None) -> SiteSetup:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--superlink", "--host", "--node-config"):
        parser.add_argument(option)
    for option in ("--root-certificates", "--auth-supernode-private-key"):
        parser.add_argument(option, type=Path)
    parser.add_argument("--port", type=int)
    told = parser.parse_known_args(deployment.supernode_command(name))[0]
    return SiteSetup(
        node_config([told.node_config]),
        told.superlink,
        told.root_certificates,
        told.auth_supernode_private_key,
        told.host,
        told.port,
        settings,
    )


def server_of(deployment: Deployment) -> ServerSetup:
    """Return the set-up of a deployment's server."""
    secrets = deployment.secrets
    return ServerSetup(
        authority=secrets / "ca.crt",
        certificate=secrets / "server.crt",
        key=secrets / "server.key",
        database=deployment.home(SERVER) / "superlink.db",
        fleet=f"127.0.0.1:{deployment.ports['fleet']}",
        control=f"127.0.0.1:{deployment.ports['http']}",
        runs=deployment.runs,
        registry=deployment.registry,
        hospitals=tuple((site, secrets / f"{site}.pub") for site in deployment.sites),
        deployment=deployment,
    )
