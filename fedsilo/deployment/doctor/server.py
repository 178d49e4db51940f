"""``fedsilo doctor server``: checks a server by the arguments that start it."""

from __future__ import annotations

import sqlite3
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fedsilo.core.files.atomic_files import scratch_folder
from fedsilo.deployment.deployment import FEDERATION, SERVER, Deployment, key_fingerprint
from fedsilo.deployment.doctor import credentials, machine
from fedsilo.deployment.doctor.findings import Check, Failed, Passed, Refused, Verdict, require
from fedsilo.deployment.flower_commands import (
    is_healthy,
    list_missing_sites,
    node_states,
    unknown_nodes,
)
from fedsilo.server_app.config.operator_files import REGISTRY, registered_keys

_DAYS = 14  # a certificate must stay valid for this many days
_DISK, _MEMORY = 2.0, 1.0  # gigabytes that must be free
_COMMITS = 20
_SLOW = 0.25  # seconds of a commit; Flower gives up if its database stays locked for 5 seconds
_SQLITE = b"SQLite format 3\0"


@dataclass(frozen=True)
class ServerSetup:
    """The arguments that start a SuperLink, and the hospitals that it must know."""

    authority: Path | None = None  # this and the next two are TLS files; None if not named
    certificate: Path | None = None
    key: Path | None = None
    database: Path | None = None  # None if the SuperLink keeps everything in memory
    fleet: str = "0.0.0.0:9092"  # address of the Fleet API, for hospitals
    control: str = "127.0.0.1:8000"  # address of the Control and Runtime API, on the loopback
    runs: Path | None = None  # the folder of run directories, or None if not named
    registry: Path | None = None  # the file that binds names to keys, or None without a registry
    # Name of each hospital that must be registered, and its public key's file, None if elsewhere
    hospitals: tuple[tuple[str, Path | None], ...] = ()
    deployment: Deployment | None = None  # the server's deployment; None if it belongs to none
    now: Callable[[], datetime] = machine.utc_now

    @classmethod
    def of(cls, deployment: Deployment) -> ServerSetup:
        """Build the description of a deployment's server that the doctor's checks read.

        It has the TLS files in the deployment's secrets, the database ``superlink.db``, the
        folder of runs, the registry, and the two addresses of the server. The Control API is on
        127.0.0.1, and the Fleet API on the deployment's ``interface``. Sites on this and on
        other machines are listed as hospitals, with the files of their public keys. Whether the
        files exist is not checked.
        """
        secrets = deployment.secrets
        hospitals: list[tuple[str, Path | None]] = []
        for site in (*deployment.sites, *deployment.hospitals):
            hospitals.append((site, deployment.public_key(site)))
        return cls(
            authority=secrets / "ca.crt",
            certificate=secrets / "server.crt",
            key=secrets / "server.key",
            database=deployment.home(SERVER) / "superlink.db",
            fleet=f"{deployment.interface}:{deployment.ports['fleet']}",
            control=f"127.0.0.1:{deployment.ports['http']}",
            runs=deployment.runs,
            registry=deployment.registry,
            hospitals=tuple(hospitals),
            deployment=deployment,
        )

    @property
    def mark(self) -> str:
        """Return the path of the server's key as text, to recognise the server's process by it.

        The command line of Flower's SuperLink contains this path. The text is empty if no key is
        named.
        """
        return str(self.key or "")


def _authority(setup: ServerSetup) -> str:
    authority = require(setup.authority, "no --ssl-ca-certfile is named")
    return credentials.check_lasting_certificate(authority, setup.now(), _DAYS)


def _certificate(setup: ServerSetup) -> str:
    certificate = require(setup.certificate, "no --ssl-certfile is named")
    said = credentials.check_lasting_certificate(certificate, setup.now(), _DAYS)
    if setup.authority:
        credentials.check_signature(certificate, setup.authority)
    return said


def _key(setup: ServerSetup) -> str:
    key = require(setup.key, "no --ssl-keyfile is named")
    assert setup.certificate is not None, "this check runs only after 'certificate' has passed"
    credentials.check_matching_key(key, setup.certificate)
    return f"{key} is the certificate's"


def _fleet(setup: ServerSetup) -> str:
    return machine.check_port(*credentials.split_address(setup.fleet), "the Fleet API", setup.mark)


def _control(setup: ServerSetup) -> Verdict:
    host, port = credentials.split_address(setup.control)
    # Whoever reaches the Control API needs no key, only a connection
    if host not in ("127.0.0.1", "::1", "localhost"):
        fault = f"the Control API would listen on {host}, where anyone could start runs and "
        return Failed(f"{fault}admit hospitals", "--host 127.0.0.1")
    return machine.check_port(host, port, "the Control API", setup.mark)


def _answer(setup: ServerSetup) -> str:
    host, port = credentials.split_address(setup.fleet)
    if host == "0.0.0.0":  # all interfaces, including the loopback of this machine
        host = "127.0.0.1"
    address = f"{host}:{port}"
    authority = require(setup.authority, "no --ssl-ca-certfile is named")
    require(machine.runs_on(port, setup.mark), "the SuperLink does not run yet")
    credentials.check_handshake(address, authority)
    return f"{address} answers with a certificate of {authority}"


def _database(setup: ServerSetup) -> Verdict:
    reason = "no --database is named: runs and hospitals are forgotten at each restart"
    database = require(setup.database, reason)
    _refuse_damaged(database)
    seconds = commit_seconds(
        machine.check_writable_folder(database.parent, "the database's folder")
    )
    # The median: one slow commit may be another program's fault
    median, slowest = statistics.median(seconds), 1000 * max(seconds)
    if median > _SLOW:
        return Failed(
            f"a commit next to {database} takes {1000 * median:.0f} ms, which is so slow that "
            "Flower's database would lock",
            "put the database on a local disk, not on a network drive",
        )
    said = f"commits next to {database} take {1000 * median:.1f} ms"
    return f"{said}, the slowest of {len(seconds)} {slowest:.1f} ms"


def _refuse_damaged(database: Path) -> None:
    """Check that the server's database is an SQLite file, is empty, or does not exist yet.

    Every SQLite file begins with the same 16 bytes. Only these bytes are read, so other damage is
    not noticed.

    Raises:
        Refused: the path is not a regular file, or the file is neither empty nor SQLite.
        OSError: the file cannot be read.
    """
    if not database.exists():
        return
    fault, fix = "", ""
    if database.is_file():
        with database.open("rb") as file:
            head = file.read(len(_SQLITE))
        if head and head != _SQLITE:
            fault, fix = "is not an SQLite database", "name another file, or restore a copy"
    else:  # a pipe would be waited for
        fault, fix = "is not a file", "name another one"
    if fault:
        raise Refused(f"{database} {fault}", fix)


def commit_seconds(folder: Path) -> list[float]:
    """Measure how long SQLite needs for a commit in a folder.

    On a network drive, commits may be too slow for Flower. Each of 20 commits inserts one row into
    a scratch database, which is removed afterwards. ``folder`` must exist.

    Returns:
        The 20 durations in seconds, in the order of the commits.
    """
    seconds = []
    with (
        scratch_folder(folder, "doctor") as scratch,
        closing(sqlite3.connect(scratch / "scratch.db")) as connection,
    ):
        # This commit makes the file, so its time would say nothing about later ones
        connection.execute("create table rows (content text)")
        connection.commit()
        for _ in range(_COMMITS):
            began = time.perf_counter()
            connection.execute("insert into rows values ('x')")
            connection.commit()
            seconds.append(time.perf_counter() - began)
    return seconds


def _disk(setup: ServerSetup) -> str:
    folders: list[Path] = []
    if setup.runs:
        folders.append(machine.find_existing_folder(setup.runs))
    if setup.database:
        folders.append(machine.find_existing_folder(setup.database.parent))
    require(folders, "neither --database nor --out is named")
    # Both may be one folder, which is described once
    return machine.check_disk_space(dict.fromkeys(folders), _DISK)


def _registry(setup: ServerSetup) -> Verdict:
    """Check that the server's registry has each hospital of the setup, with the right key.

    The registry is a file that binds each hospital's name to its node and key. For a hospital
    without a public key in the setup, only the name is looked up. If the setup has hospitals,
    further names in the registry are listed as a detail.

    Returns:
        ``Failed`` for the first hospital that is missing or has another key. Otherwise ``Passed``.

    Raises:
        Skipped: no registry is named.
        FedsiloError: the registry or a public key cannot be read.
    """
    registry = require(setup.registry, f"${REGISTRY} names no registry: a node may use any name")
    keys = registered_keys(registry)
    others = dict(keys)
    for name, public in setup.hospitals:
        fault = ""
        if name not in keys:
            fault = (
                f"hospital {name} has no line in the registry {registry}, so runs would leave it "
                "out"
            )
        elif public and key_fingerprint(public) != keys[name]:
            fault = f"the key of {name} in {registry} is not that of {public}"
        if fault:
            return Failed(fault, _BOTH.format(name=name))
        others.pop(name, None)
    # Without named hospitals, the expected names are unknown
    details = []
    if setup.hospitals and others:
        details.append(f"registered, but not named: {', '.join(sorted(others))}")
    return Passed(f"{registry} knows {', '.join(sorted(keys)) or 'nobody'}", tuple(details))


_BOTH = "write both registrations and a new kit by 'fedsilo deploy renew {name}'"


def _nodes(setup: ServerSetup) -> Verdict:
    """Compare the nodes that the SuperLink has registered with the deployment's sites.

    Returns:
        ``Failed`` for the first of these faults: a site is not registered, a registered node
        belongs to no site, or a site on this machine is not online. Otherwise ``Passed``, with the
        status of each site.

    Raises:
        Skipped: no deployment is named, or its server does not answer.
    """
    reason = f"no deployment is named; by hand: flwr supernode list {FEDERATION}"
    deployment = require(setup.deployment, reason)
    require(is_healthy(deployment), "the server does not answer; start it by 'fedsilo deploy up'")
    states = node_states(deployment)
    # A site needs two registrations: the SuperLink admits its key, and the registry its name
    gone = [site for site, state in states.items() if state == "unregistered"]
    if gone:
        return Failed(
            f"the registry has {', '.join(gone)}, but the SuperLink has no such registration",
            _BOTH.format(name=gone[0]),
        )
    strangers = unknown_nodes(deployment)
    if strangers:
        return Failed(
            f"the SuperLink has registered node {', '.join(strangers)}, but the registry has no "
            "line for it, so runs would leave it out",
            f"remove it by 'flwr supernode unregister NODE {FEDERATION}', and register the "
            "hospital by 'fedsilo deploy add NAME'",
        )
    away = [f"{site} is {states[site]}" for site in list_missing_sites(deployment)]
    if away:
        return Failed(
            f"not all sites are online: {', '.join(away)}",
            "start them by 'fedsilo deploy up'; for the reason, read 'fedsilo deploy logs SITE'",
        )
    said = [f"{site} ({state})" for site, state in states.items()]
    return Passed(f"both registrations: {', '.join(said) or 'nobody yet'}")


CHECKS: tuple[Check[ServerSetup], ...] = (
    Check("software", lambda _: machine.check_software()),
    Check("authority", _authority),
    Check("certificate", _certificate),
    Check("key", _key, ("certificate",)),
    Check("fleet port", _fleet),
    Check("control port", _control),
    Check("answer", _answer, ("authority",)),
    Check("database", _database),
    Check("disk", _disk),
    Check("memory", lambda _: machine.check_memory(_MEMORY)),
    Check("registry", _registry),
    Check("nodes", _nodes),
)
