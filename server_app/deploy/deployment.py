"""A deployment on one machine: its folder, its processes, and Flower's commands that start them.

``<folder>/deployment.json`` names sites, ports and processes; ``secrets/`` is what make-secrets.sh
writes; ``server/`` and ``sites/<site>/`` hold what a machine of their own would have.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.datasets.silo.site_names import LONGEST, site_name_fault
from fedsilo.models.contract.errors import FedsiloError, SettingError
from fedsilo.models.contract.settings_schema import Value, unknown_name
from fedsilo.models.contract.versions import git_revision
from fedsilo.server_app.config.operator_files import REGISTRY
from fedsilo.server_app.run.processes import app_folder, process_of, tool

SERVER = "server"
FEDERATION = "fedsilo"  # the name of the connection in Flower's configuration
_FILE = "deployment.json"
_TAKEN = {SERVER, "ca", "http", "fleet"}  # names of files and ports


class DeploymentError(FedsiloError):
    """A deployment that is not there, is there already, or does not start."""


@dataclass(frozen=True)
class Started:
    """A process that was started: its id, and when, since ids are used again."""

    pid: int
    at: float

    def process(self) -> psutil.Process | None:
        """Return it if it still runs."""
        return process_of(self.pid, self.at)


@dataclass(frozen=True)
class Deployment:
    """A deployment's plan and what runs of it.

    Attributes:
        folder: where all of it lies, absolute.
        ports: of the Control and Runtime API (``http``), the Fleet API (``fleet``), and each site's
            own Runtime API by site.
        node_config: of each site, what its SuperNode is told.
        started: process by ``server`` or site.
        nodes: the server's number of each registered site.
    """

    folder: Path
    ports: Mapping[str, int]
    node_config: Mapping[str, Mapping[str, Value]]
    started: Mapping[str, Started] = field(default_factory=dict)
    nodes: Mapping[str, str] = field(default_factory=dict)

    @property
    def sites(self) -> list[str]:
        """The sites, in order."""
        return sorted(self.node_config)

    @property
    def members(self) -> list[str]:
        """The server and the sites."""
        return [SERVER, *self.sites]

    @property
    def secrets(self) -> Path:
        """Certificates and keys."""
        return self.folder / "secrets"

    @property
    def runs(self) -> Path:
        """The run directories, at the server."""
        return self.folder / SERVER / "runs"

    @property
    def registry(self) -> Path:
        """Which site each registered key is, at the server."""
        return self.folder / SERVER / "registry.json"

    def home(self, member: str) -> Path:
        """Return the folder of the server or of a site."""
        return self.folder / SERVER if member == SERVER else self.folder / "sites" / member

    def log(self, member: str) -> Path:
        """Return the file that a member's process writes to.

        Raises:
            SettingError: there is no such member.
        """
        if member not in self.members:
            raise unknown_name("member of the deployment", member, self.members)
        return self.home(member) / f"{member}.log"

    def process(self, member: str) -> psutil.Process | None:
        """Return a member's process if it runs."""
        known = self.started.get(member)
        return known.process() if known else None

    def running(self) -> list[str]:
        """Return the members whose process runs."""
        return [member for member in self.members if self.process(member)]

    def with_started(self, member: str, pid: int) -> Deployment:
        """Return the deployment in which ``member`` is process ``pid``, and write it down."""
        at = psutil.Process(pid).create_time()
        changed = replace(self, started={**self.started, member: Started(pid, at)})
        changed.write()
        return changed

    def with_node(self, site: str, node: str) -> Deployment:
        """Return the deployment in which ``site`` is registered, and write it down."""
        changed = replace(self, nodes={**self.nodes, site: node})
        changed.write()
        return changed

    def write(self) -> None:
        """Write deployment.json."""
        content = asdict(self) | {"folder": str(self.folder)}
        write_atomically(self.folder / _FILE, json.dumps(content, indent=2) + "\n")

    def write_registry(self) -> None:
        """Write which site each registered key is: a hello of another name is refused.

        Raises:
            DeploymentError: a public key is missing or is none.
        """
        entries = {
            site: {"node-id": node, "key": key_fingerprint(self.secrets / f"{site}.pub")}
            for site, node in sorted(self.nodes.items())
        }
        write_atomically(self.registry, json.dumps(entries, indent=2) + "\n")

    def superlink_command(self) -> list[str]:
        """Return the command that starts the server."""
        secrets = self.secrets
        return [
            tool("flower-superlink"),
            *("--ssl-ca-certfile", str(secrets / "ca.crt")),
            *("--ssl-certfile", str(secrets / "server.crt")),
            *("--ssl-keyfile", str(secrets / "server.key")),
            "--enable-supernode-auth",
            *("--database", str(self.home(SERVER) / "superlink.db")),
            *("--fleet-api-address", f"127.0.0.1:{self.ports['fleet']}"),
            *("--host", "127.0.0.1", "--port", str(self.ports["http"])),
            "--disable-runtime-dependency-installation",
        ]

    def supernode_command(self, site: str) -> list[str]:
        """Return the command that starts a site."""
        config = " ".join(f"{k}={json.dumps(v)}" for k, v in self.node_config[site].items())
        return [
            *(sys.executable, "-m", "fedsilo.client_app.worker.hospital"),
            *("--superlink", f"127.0.0.1:{self.ports['fleet']}"),
            *("--root-certificates", str(self.secrets / "ca.crt")),
            *("--auth-supernode-private-key", str(self.secrets / f"{site}.key")),
            *("--host", "127.0.0.1", "--port", str(self.ports[site])),
            *("--node-config", config),
        ]

    def command(self, member: str) -> list[str]:
        """Return the command that starts the server or a site."""
        return self.superlink_command() if member == SERVER else self.supernode_command(member)

    def environment(self, member: str) -> dict[str, str]:
        """Return the environment of a member's process: a FLWR_HOME of its own, no telemetry."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FLWR_", "FEDSILO_"))}
        variables = {
            "FLWR_HOME": str(self.home(member) / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PYTHONUNBUFFERED": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        if member == SERVER:
            variables |= {
                "FEDSILO_RUNS": str(self.runs),
                REGISTRY: str(self.registry),
                "FEDSILO_REVISION": git_revision(),
            }
        else:
            variables["PYTHONPATH"] = str(app_folder())  # the app that the hospital has installed
        return inherited | variables

    def write_connection(self) -> None:
        """Write how ``flwr`` reaches the server, in the server's FLWR_HOME."""
        connection = {
            "address": f"127.0.0.1:{self.ports['http']}",
            "root-certificates": str(self.secrets / "ca.crt"),
        }
        content = {"superlink": {"default": FEDERATION, FEDERATION: connection}}
        write_atomically(self.home(SERVER) / "flwr" / "config.toml", tomli_w.dumps(content))


def key_fingerprint(public_key: Path) -> str:
    """Return the fingerprint of a public key of OpenSSH form, as ``ssh-keygen -l`` says it.

    Raises:
        DeploymentError: it cannot be read, or is none.
    """
    try:
        blob = base64.b64decode(public_key.read_text(encoding="ascii").split()[1], validate=True)
    except (OSError, ValueError, IndexError):
        raise DeploymentError(
            f"{public_key} is no public key of OpenSSH form, or cannot be read: bring it back from "
            "where the keys were made"
        ) from None
    return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


def plan(
    folder: Path, sites: Sequence[str], ports: Sequence[int], shared: Mapping[str, Value]
) -> Deployment:
    """Return a new deployment of ``sites``.

    Args:
        folder: an absolute path.
        sites: their names.
        ports: two of the server and one of each site.
        shared: what every SuperNode is told beside its name and its state's folder.

    Raises:
        SettingError: two sites have one name, there is none, one cannot be a name, or ``shared``
            says what is each site's alone.
    """
    for site in sites:
        if site_name_fault(site) or site in _TAKEN:
            raise SettingError(
                f"site '{site}' cannot be a name: at most {LONGEST} letters, digits, '.', '_' and "
                f"'-', the first no '.' or '-', and not {', '.join(sorted({'all', *_TAKEN}))}"
            )
    if alone := sorted({"site", "state-dir"} & shared.keys()):
        raise SettingError(f"node config '{alone[0]}' is each site's own: leave it out")
    twice = sorted({site for site in sites if list(sites).count(site) > 1})
    if twice or not sites:
        raise SettingError(
            f"site '{twice[0]}' is named twice: each hospital needs a name of its own"
            if twice
            else "no site is named: a deployment needs at least one"
        )
    names = sorted(sites)  # a site's port does not hang on the order in which they were named
    return Deployment(
        folder,
        dict(zip(["http", "fleet", *names], ports, strict=True)),
        {
            site: {"site": site, "state-dir": str(folder / "sites" / site / "state"), **shared}
            for site in names
        },
    )


def is_deployment(folder: Path) -> bool:
    """Tell whether a deployment was made in ``folder``."""
    return (folder / _FILE).is_file()


def read_deployment(folder: Path) -> Deployment:
    """Return the deployment of a folder, which may be relative or below ``~``.

    Raises:
        DeploymentError: there is none, or its file is damaged.
    """
    folder = folder.expanduser().resolve()
    path = folder / _FILE
    if not path.is_file():
        raise DeploymentError(f"there is no deployment in {folder}: 'fedsilo deploy up' makes one")
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        started = {name: Started(**known) for name, known in content["started"].items()}
        return Deployment(
            folder, content["ports"], content["node_config"], started, content["nodes"]
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DeploymentError(
            f"{path} is damaged ({type(error).__name__}): end its processes by hand, "
            f"and remove {folder}"
        ) from error
