"""What doctor checks by target, and the setups: a node config by hand, those of a deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings_schema import Value, unknown_name
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.deploy.deployment import SERVER, Deployment
from fedsilo.server_app.doctor import run, server, site
from fedsilo.server_app.doctor.findings import Check
from fedsilo.server_app.doctor.server import ServerSetup
from fedsilo.server_app.doctor.site import SiteSetup

TARGETS: Mapping[str, Sequence[Check[Any]]] = {
    "site": site.CHECKS,
    "server": server.CHECKS,
    "run": run.CHECKS,
}


def node_config(texts: Sequence[str]) -> dict[str, Value]:
    """Return a node config as Flower parses it, or raise a SettingError."""
    from flwr.common.config import parse_config_args

    try:
        return dict(parse_config_args(list(texts)))
    except Exception as error:  # Typer's or TOML's, which would end the SuperNode too
        raise SettingError(
            f"--node-config cannot be read: {' '.join(str(error).split())}"
        ) from None


def sites_of(
    deployment: Deployment, names: Sequence[str], settings: RunSettings | None
) -> list[SiteSetup]:
    """Return the setups of the named sites of a deployment, or of all if none is named.

    Raises:
        SettingError: there is no such site.
    """
    for name in names:
        if name not in deployment.sites:
            raise unknown_name("site of the deployment", name, deployment.sites)
    secrets, ports = deployment.secrets, deployment.ports
    return [
        SiteSetup(
            deployment.node_config[site],
            superlink=f"127.0.0.1:{ports['fleet']}",
            authority=secrets / "ca.crt",
            key=secrets / f"{site}.key",
            port=ports[site],
            settings=settings,
        )
        for site in names or deployment.sites
    ]


def server_of(deployment: Deployment) -> ServerSetup:
    """Return the setup of a deployment's server."""
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
