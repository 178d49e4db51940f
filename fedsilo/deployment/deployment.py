"""A deployment: its folder, its processes, and the Flower commands that start them.

``<folder>/deployment.json`` names sites, ports and processes. ``secrets/`` has certificates and
keys, ``kits/`` the kits for hospitals on other machines, ``server/`` the files of the server, and
``sites/<site>/`` the files of each site on this machine.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import tomli_w
from pydantic import TypeAdapter

from fedsilo.core.errors import FedsiloError, SettingError, SiteError, unknown_name
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.files.site_names import folder_name, site_name_fault
from fedsilo.core.one_line import one_line
from fedsilo.core.processes import app_folder, process_of, tool
from fedsilo.core.settings_schema import Value
from fedsilo.core.versions import git_revision
from fedsilo.deployment.worker.hospital import direct_loopback
from fedsilo.server_app.config.operator_files import REGISTRY
from fedsilo.server_app.config.trusted_plugins import refuse_unknown_files, remember_files

SERVER = "server"
FEDERATION = "fedsilo"  # the name of the connection in Flower's configuration
FILE = "deployment.json"
_REGISTRY, _LOCK = "registry.json", "deployment.lock"
_FORMER = ("signing-key", "site-registry")  # node config keys of versions with server-made keys
_LARGEST_PORT = 65_535
_TAKEN = {SERVER, "ca", "http", "fleet"}  # names of files and ports


class DeploymentError(FedsiloError):
    """A deployment does not exist, already exists, or does not start.

    Fix: ``fedsilo deploy status`` shows which members run, ``fedsilo deploy logs MEMBER`` shows why
    one has ended, and ``fedsilo doctor server`` finds what prevents a start.
    """

    code = "deployment"


@dataclass(frozen=True)
class Started:
    """A started process: its id, and its start in seconds since 1970.

    The start identifies the process, because the system reuses ids.
    """

    pid: int
    at: float


@dataclass(frozen=True)
class Deployment:
    """A deployment's plan and its processes."""

    folder: Path  # absolute
    ports: dict[str, int]  # http (Control and Runtime API), fleet, and each site's Runtime API
    node_config: dict[str, dict[str, Value]]  # each site's, for its SuperNode
    started: dict[str, Started] = field(default_factory=dict)  # member (server or site) -> process
    nodes: dict[str, str] = field(default_factory=dict)  # site -> its node id at the server
    address: str = ""  # the server's address for hospitals on other machines; empty without any

    @property
    def sites(self) -> list[str]:
        """The sites whose processes run on this machine, in alphabetical order."""
        return sorted(self.node_config)

    @property
    def hospitals(self) -> list[str]:
        """The sites that have a kit and their own machine, in alphabetical order."""
        return sorted(self.nodes.keys() - self.node_config.keys())

    @property
    def fleet(self) -> str:
        """The address, host:port, that hospitals use to reach the server."""
        return self.address or f"127.0.0.1:{self.ports['fleet']}"

    @property
    def members(self) -> list[str]:
        """The server, then the sites on this machine."""
        return [SERVER, *self.sites]

    @property
    def secrets(self) -> Path:
        """The folder of certificates and keys."""
        return self.folder / "secrets"

    @property
    def runs(self) -> Path:
        """The folder of run directories, at the server."""
        return self.folder / SERVER / "runs"

    @property
    def registry(self) -> Path:
        """The server's file that binds each site's name to its node and key."""
        return self.folder / SERVER / _REGISTRY

    @property
    def interface(self) -> str:
        """The address that the server listens on: 0.0.0.0 if hospitals are on other machines."""
        host = self.fleet.rpartition(":")[0]
        if host in ("127.0.0.1", "localhost"):
            return "127.0.0.1"
        return "0.0.0.0"

    def home(self, member: str) -> Path:
        """Return the folder of a member: the server, or a site on this machine.

        The server's folder is ``server``, and a site's is ``sites/NAME``, both below the
        deployment's folder. NAME is the site's name, in which ``folder_name`` encodes unusual
        characters. Neither the name nor the folder's existence is checked.
        """
        if member == SERVER:
            return self.folder / SERVER
        return self.folder / "sites" / folder_name(member)

    def private_key(self, site: str) -> Path:
        """Return the path of a site's private key in OpenSSH's format, ``secrets/<site>.key``.

        The file exists only for sites on this machine.
        """
        return self.secrets / f"{folder_name(site)}.key"

    def public_key(self, site: str) -> Path:
        """Return the path of a site's public key, in OpenSSH's format; it may not exist yet."""
        return self.secrets / f"{folder_name(site)}.pub"

    def log(self, member: str) -> Path:
        """Return the path of the log of the server or of a site on this machine.

        The file is ``<member>.log`` in the member's own folder. It does not exist before the
        member's first start.

        Raises:
            DeploymentError: the member is a hospital on another machine, which keeps its own log.
            SettingError: the deployment has no such member.
        """
        if member in self.hospitals:
            raise DeploymentError(f"{member} runs on another machine: read its log on that machine")
        if member not in self.members:
            raise unknown_name("member of the deployment", member, self.members)
        return self.home(member) / f"{folder_name(member)}.log"

    def choose_sites(self, names: Sequence[str]) -> list[str]:
        """Return the requested sites, after checking that all of them are on this machine.

        The order and any duplicates in ``names`` are kept. If ``names`` is empty, all sites on this
        machine are returned, in alphabetical order.

        Raises:
            SettingError: a name is not a site on this machine.
        """
        for name in names:
            if name not in self.sites:
                raise unknown_name("site of the deployment", name, self.sites)
        return list(names) or self.sites

    def process(self, member: str) -> psutil.Process | None:
        """Return the running process of the server or of a site on this machine.

        A process is recognised by the id and the start time in deployment.json, because the
        system reuses ids. The result is None if the member was never started or has ended.
        """
        known = self.started.get(member)
        if known is None:
            return None
        return process_of(known.pid, known.at)

    def running(self) -> list[str]:
        """Return the members on this machine whose process runs, with the server first."""
        return [member for member in self.members if self.process(member)]

    def with_started(self, member: str, pid: int) -> Deployment:
        """Record a member's process in deployment.json, and return the changed deployment.

        The start time of the process is recorded with its id, because the system reuses ids. This
        object itself does not change.

        Raises:
            psutil.NoSuchProcess: no process has the id ``pid``.
        """
        started = Started(pid, psutil.Process(pid).create_time())
        return replace(self, started=self.started | {member: started}).write()

    def with_node(self, site: str, node: str) -> Deployment:
        """Record a site's node id in deployment.json, and return the changed deployment.

        This object itself does not change.
        """
        return replace(self, nodes=self.nodes | {site: node}).write()

    def without(self, site: str) -> Deployment:
        """Remove ``site`` from deployment.json, and return the changed deployment.

        This object itself does not change. If the deployment does not have the site, nothing is
        removed. The site's own files remain, and its process is not ended.
        """
        rest: dict[str, Any] = {}
        for part in ("ports", "node_config", "started", "nodes"):
            rest[part] = dict(getattr(self, part))
            rest[part].pop(site, None)
        return replace(self, **rest).write()

    def write(self) -> Deployment:
        """Write deployment.json, which is replaced as a whole, and return this deployment."""
        content = TypeAdapter(Deployment).dump_json(self, indent=2).decode()
        write_atomically(self.folder / FILE, content + "\n")
        return self

    def write_registry(self) -> None:
        """Write the registry, a JSON file that tells the server which node belongs to which site.

        Each site with a node id has an entry with ``node-id`` and ``key``, the fingerprint of its
        public key. The server accepts a site's name only from the node with this id and key. An
        existing registry is replaced.

        Raises:
            DeploymentError: a site's public key cannot be read. Nothing is written then.
        """
        entries = {}
        for site, node in sorted(self.nodes.items()):
            key = key_fingerprint(self.public_key(site))
            entries[site] = {"node-id": node, "key": key}
        write_atomically(self.registry, json.dumps(entries, indent=2) + "\n")

    def superlink_command(self) -> list[str]:
        """Build the command that starts the server, Flower's SuperLink, as a list of words.

        The server uses the TLS files in ``secrets``, admits only registered keys, and keeps its
        state in superlink.db. Its Fleet API, which hospitals reach, listens at the host
        ``interface``. Its Control API, which starts runs, listens only on this machine. The server
        never installs packages that a run's code requires.

        Raises:
            ProcessError: ``flower-superlink`` is not installed.
        """
        secrets = self.secrets
        return [
            tool("flower-superlink"),
            *("--ssl-ca-certfile", str(secrets / "ca.crt")),
            *("--ssl-certfile", str(secrets / "server.crt")),
            *("--ssl-keyfile", str(secrets / "server.key")),
            "--enable-supernode-auth",
            *("--database", str(self.home(SERVER) / "superlink.db")),
            *("--fleet-api-address", f"{self.interface}:{self.ports['fleet']}"),
            # Whoever reaches the Control API may start runs, so it stays on this machine
            *("--host", "127.0.0.1", "--port", str(self.ports["http"])),
            "--disable-runtime-dependency-installation",
        ]

    def supernode_command(self, site: str) -> list[str]:
        """Build the command that starts a site on this machine, as a list of arguments.

        The command starts one process, which starts two others. The SuperNode is Flower's process
        that receives messages. fedsilo's worker answers them. The command contains the site's node
        config, and the address of the server on this machine.

        Raises:
            SettingError: the node config's 'plugin' names a Python file that this user has not
                approved, or that has changed since the approval.
        """
        # Somebody else may have put a plugin's name into deployment.json
        named = str(self.node_config[site].get("plugin", ""))
        refuse_unknown_files(named, str(self.folder / FILE))
        superlink, own = f"127.0.0.1:{self.ports['fleet']}", ("127.0.0.1", self.ports[site])
        files = self.secrets / "ca.crt", self.private_key(site)
        return node_command(superlink, *files, *own, self.node_config[site])

    def command(self, member: str) -> list[str]:
        """Build the command that starts the server or a site on this machine, as a list of words.

        Raises:
            ProcessError: the server's program is not installed.
            SettingError: a site's plugin file is not approved by this user.
        """
        if member == SERVER:
            return self.superlink_command()
        return self.supernode_command(member)

    def environment(self, member: str) -> dict[str, str]:
        """Build the environment variables with which a member's process is started.

        The variables are those of this process, with these changes:

        - All FLWR_ and FEDSILO_ variables of this process are removed.
        - FLWR_HOME is ``flwr`` in the member's own folder.
        - Flower's telemetry and its search for updates are off, and Python's output is not
          buffered.
        - PATH begins with the folder of this Python.
        - no_proxy and NO_PROXY make calls to this machine bypass a proxy.
        - The server gets FEDSILO_RUNS, FEDSILO_SITE_REGISTRY and FEDSILO_REVISION. A site gets
          fedsilo's checkout as PYTHONPATH.

        Raises:
            ProcessError: the member is a site, but fedsilo was not installed from a checkout.
        """
        # The variables of whoever starts the members must not decide how the members work
        variables = {}
        for name, value in os.environ.items():
            if not name.startswith(("FLWR_", "FEDSILO_")):
                variables[name] = value
        variables |= direct_loopback(os.environ)
        variables |= {
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
            variables["PYTHONPATH"] = str(app_folder())  # a site runs its own installed app
        return variables

    def write_connection(self) -> None:
        """Write the file that tells the command ``flwr`` how to reach this deployment's server.

        The file is ``config.toml`` in the server's FLWR_HOME, and an existing one is replaced. It
        has the address of the Control API on this machine and the path of the authority's
        certificate, ca.crt.
        """
        connection = {
            "address": f"127.0.0.1:{self.ports['http']}",
            "root-certificates": str(self.secrets / "ca.crt"),
        }
        content = {"superlink": {"default": FEDERATION, FEDERATION: connection}}
        write_atomically(self.home(SERVER) / "flwr" / "config.toml", tomli_w.dumps(content))


def node_command(
    superlink: str,
    authority: Path,
    key: Path,
    host: str,
    port: int,
    node_config: Mapping[str, Value],
) -> list[str]:
    """Build the command that starts a hospital's node, as a list of words.

    The command runs ``fedsilo.deployment.worker.hospital`` with this Python. That module starts
    Flower's SuperNode, which receives messages, and fedsilo's worker, which answers them.

    Args:
        superlink: the server's address for hospitals, host:port.
        authority: the file of the authority's certificate.
        key: the file of the hospital's private key.
        host: the host of the SuperNode's Runtime API, from which the worker takes messages.
        port: the port of that API.
        node_config: the node config. It becomes one argument of entries key=value, separated by
            spaces, with each value as JSON.
    """
    config = " ".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in node_config.items()
    )
    return [
        *(sys.executable, "-m", "fedsilo.deployment.worker.hospital"),
        *("--superlink", superlink),
        *("--root-certificates", str(authority)),
        *("--auth-supernode-private-key", str(key)),
        *("--host", host, "--port", str(port)),
        *("--node-config", config),
    ]


def key_fingerprint(public_key: Path) -> str:
    """Return the fingerprint of an OpenSSH public key, as ``ssh-keygen -l`` prints it.

    Raises:
        DeploymentError: the file cannot be read, or is not an OpenSSH public key.
    """
    from fedsilo.strategies.wire.signatures import fingerprint

    try:
        return fingerprint(public_key.read_bytes())
    except (OSError, SiteError):
        raise DeploymentError(
            f"{public_key} cannot be read, or is not a public key in OpenSSH's format: restore "
            "it from the machine that made the keys"
        ) from None


def find_name_fault(sites: Sequence[str]) -> str:
    """Describe the first site name that is not allowed or occurs twice, and say how to correct it.

    "all", "ca", "fleet", "http" and "server" are reserved, so a site may not have such a name.
    ``site_name_fault`` decides about the characters. If all names are valid, the result is an
    empty string.
    """
    for site in sites:
        fault = site_name_fault(site)
        if fault:
            return f"{fault}; choose another name"
        if site in _TAKEN:
            reserved = ", ".join(sorted({"all", *_TAKEN}))
            return f"'{site}' cannot be a site's name: {reserved} are reserved"
        if sites.count(site) > 1:
            return f"site '{site}' is named twice: give each hospital its own name"
    return ""


def plan(
    folder: Path,
    sites: Sequence[str],
    ports: Sequence[int],
    shared: Mapping[str, Value],
    address: str = "",
) -> Deployment:
    """Plan a new deployment: the ports and the settings (node config) of its sites.

    No file of the deployment is written. If the key 'plugin' of ``shared`` names Python files, they
    are recorded as trusted by this user, so that the sites may load them when they start.

    Args:
        folder: the absolute path of the deployment's folder.
        sites: names of the sites on this machine. The plan sorts them.
        ports: two ports for the server (Control API, Fleet API), then one for each site in the
            order of the sorted names.
        shared: node config entries that every site gets, besides its name and state folder.
        address: the server's address for hospitals on other machines. It is empty if there are
            none.

    Raises:
        SettingError: ``sites`` and ``address`` are both empty, two sites have the same name, a name
            is not allowed, or ``shared`` has one of the keys 'site' and 'state-dir', whose value
            each site needs for itself.
        ValueError: the number of ``ports`` is not two more than the number of sites.
    """
    if not sites and not address:
        raise SettingError("a deployment needs at least one site, but none is named")
    for key in ("site", "state-dir"):
        if key in shared:
            raise SettingError(
                f"node config '{key}' differs between sites, so it cannot be shared: remove it"
            )
    name_fault = find_name_fault(sites)
    if name_fault:
        raise SettingError(name_fault)
    names = sorted(sites)  # a site's port must not depend on the order of the names
    # The sites start later in processes of this user, which load only files that the user trusts
    remember_files(str(shared.get("plugin", "")))
    node_config: dict[str, dict[str, Value]] = {}
    for site in names:
        state = str(folder / "sites" / folder_name(site) / "state")
        node_config[site] = {"site": site, "state-dir": state, **shared}
    port_of = dict(zip(["http", "fleet", *names], ports, strict=True))
    return Deployment(folder, port_of, node_config, address=address)


def is_deployment(folder: Path) -> bool:
    """Tell whether ``folder`` contains a deployment, damaged or not."""
    return (folder / FILE).is_file()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a deployment's folder against other commands that change it, while the block runs.

    The folder is made if it does not exist. Processes that the block starts do not keep the lock.
    The call does not wait for a lock that is taken. Commands that only read need no lock, because
    deployment.json is replaced as a whole.

    Raises:
        DeploymentError: another command has locked the folder.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Not the folder itself, which ``build_folder`` locks for a moment to make secrets/
    handle = os.open(folder / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w"):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DeploymentError(
                f"another 'fedsilo deploy' is changing {folder}: wait until it ends, and repeat"
            ) from None
        yield


def read_deployment(folder: Path) -> Deployment:
    """Read the deployment in a folder, which may be relative or begin with ``~``.

    The result's ``folder`` is the absolute path of this folder, even if deployment.json names
    another. Node config keys of older versions are removed from the result, but not from the file.
    Whether members run is not checked.

    Raises:
        DeploymentError: the folder does not contain a deployment, or deployment.json is damaged or
            has an invalid site name or port.
    """
    folder = folder.expanduser().resolve()
    path = folder / FILE
    if not path.is_file():
        raise DeploymentError(f"there is no deployment in {folder}: 'fedsilo deploy up' makes one")
    try:
        found = TypeAdapter(Deployment).validate_json(path.read_bytes())
    except ValueError as error:
        raise DeploymentError(
            f"{path} is damaged ({type(error).__name__}): end its processes by hand, "
            f"and remove {folder}"
        ) from error
    fault = _find_altered(found)
    if fault:
        raise DeploymentError(f"{path} was altered: {fault}")
    # The doctor and a site's start refuse a node config with keys that no longer exist
    for config in found.node_config.values():
        for key in _FORMER:
            config.pop(key, None)
    return replace(found, folder=folder)


@contextmanager
def open_locked(folder: Path) -> Iterator[Deployment]:
    """Lock the existing deployment in ``folder`` while the block runs, and yield the deployment.

    The lock is needed because each command writes the whole deployment.json: without the lock, one
    command would undo the changes of another.

    Raises:
        DeploymentError: the folder does not contain a usable deployment, or another command has
            locked it.
    """
    # Read first, because locking makes the folder
    folder = read_deployment(folder).folder
    with locked(folder):
        yield read_deployment(folder)


def _find_altered(deployment: Deployment) -> str:
    """Describe the first invalid site name or port in a deployment that was read from its file.

    A file could have been altered: the name ``../x``, for example, would lead out of the folder.
    A name must obey the rules for new site names. A port must be present and be between 1 and
    65535. Names are checked first. Without a fault, the result is an empty string.
    """
    fault = find_name_fault([*deployment.node_config.keys() | deployment.nodes.keys()])
    for member in ("http", "fleet", *deployment.node_config):
        if not fault and not 0 < deployment.ports.get(member, 0) <= _LARGEST_PORT:
            fault = f"it has no valid port for '{member}'"
    return one_line(fault)
