"""``fedsilo doctor server``: a server, by the arguments that start it."""

from __future__ import annotations

import sqlite3
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedsilo.datasets.io.atomic_files import scratch_folder
from fedsilo.server_app.config.operator_files import REGISTRY, registered_keys
from fedsilo.server_app.deploy.deployment import FEDERATION, Deployment, key_fingerprint
from fedsilo.server_app.deploy.flower import flwr
from fedsilo.server_app.doctor import machine
from fedsilo.server_app.doctor.findings import Check, Passed, Refused, Skipped
from fedsilo.server_app.doctor.secrets import (
    lasting_certificate,
    matching_key,
    signed_by,
    writable_folder,
)
from fedsilo.server_app.doctor.wire import handshake, parts

_DAYS = 14  # that a certificate must hold at least
_DISK, _MEMORY = 2.0, 1.0  # gigabytes
_COMMITS, _SLOW = 20, 0.25  # seconds of one commit: Flower gives a locked database up after 5
_PATIENCE = 3.0  # seconds
_SQLITE = b"SQLite format 3\0"


def _today() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class ServerSetup:
    """What a SuperLink is started with, and whom it is to know.

    Attributes:
        authority, certificate, key: its TLS files; None: not named.
        database: its file; None: it keeps everything in memory.
        fleet: address of the Fleet API, which hospitals reach.
        control: address of the Control and Runtime API, on the loopback.
        runs: folder of run directories; None: not named.
        registry: the file that binds names to keys; None: there is none.
        hospitals: those that are to take part, with their public keys where these are here.
        deployment: the one that all of it is of, if it is one.
        now: tells the time.
    """

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    database: Path | None = None
    fleet: str = "0.0.0.0:9092"
    control: str = "127.0.0.1:8000"
    runs: Path | None = None
    registry: Path | None = None
    hospitals: tuple[tuple[str, Path | None], ...] = ()
    deployment: Deployment | None = None
    now: Callable[[], datetime] = _today

    @property
    def mark(self) -> str:
        """The word by which a SuperLink of this set-up is known among processes."""
        return str(self.key or "")


def _software(setup: ServerSetup) -> Passed:
    return machine.software()


def _authority(setup: ServerSetup) -> str:
    if setup.authority is None:
        raise Skipped("no --ssl-ca-certfile is named")
    return lasting_certificate(setup.authority, setup.now(), _DAYS)


def _certificate(setup: ServerSetup) -> str:
    if setup.certificate is None:
        raise Skipped("no --ssl-certfile is named")
    said = lasting_certificate(setup.certificate, setup.now(), _DAYS)
    if setup.authority:
        signed_by(setup.certificate, setup.authority)
    return said


def _key(setup: ServerSetup) -> str:
    if setup.key is None or setup.certificate is None:
        raise Skipped("no --ssl-keyfile is named")
    return f"{matching_key(setup.key, setup.certificate)} is the certificate's"


def _fleet(setup: ServerSetup) -> str:
    return machine.own_port(*parts(setup.fleet), "the Fleet API", setup.mark)


def _control(setup: ServerSetup) -> str:
    host, port = parts(setup.control)
    if host not in ("127.0.0.1", "::1", "localhost"):
        raise Refused(
            f"the Control API is to listen on {host}, and whoever reaches it starts runs and "
            "admits hospitals",
            "--host 127.0.0.1",
        )
    return machine.own_port(host, port, "the Control API", setup.mark)


def _answer(setup: ServerSetup) -> str:
    host, port = parts(setup.fleet)
    address = f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    if not setup.authority or not machine.runs_on(port, setup.mark):
        raise Skipped("the SuperLink does not run yet")
    handshake(address, setup.authority, _PATIENCE)
    return f"{address} answers by a certificate of {setup.authority}"


def _database(setup: ServerSetup) -> str:
    if setup.database is None:
        raise Skipped("no --database is named: runs and hospitals are forgotten at each restart")
    _refuse_damaged(setup.database)
    folder = writable_folder(setup.database.parent, "the database's folder")
    seconds = commit_seconds(folder)
    slowest = 1000 * max(seconds)
    if statistics.median(seconds) > _SLOW:
        raise Refused(
            f"a commit beside {setup.database} takes {slowest:.0f} ms, and Flower's database locks",
            "give the server a disk of its own, and no network's",
        )
    said = f"commits beside {setup.database} take {1000 * statistics.median(seconds):.1f} ms"
    return f"{said}, the slowest of {len(seconds)} {slowest:.1f} ms"


def _refuse_damaged(database: Path) -> None:
    """Refuse a file that is there and is no database of SQLite's; an empty one is a new one."""
    if not database.exists():
        return
    with database.open("rb") as file:
        head = file.read(len(_SQLITE))
    if head and head != _SQLITE:
        raise Refused(
            f"{database} is no database of SQLite's", "name another file, or bring back its copy"
        )


def commit_seconds(folder: Path) -> list[float]:
    """Return the seconds of single commits to a scratch database in ``folder``."""
    seconds = []
    with (
        scratch_folder(folder, "doctor") as scratch,
        closing(sqlite3.connect(scratch / "scratch.db")) as connection,
    ):
        connection.execute("create table rows (content text)")
        connection.commit()
        for _ in range(_COMMITS):
            began = time.perf_counter()
            connection.execute("insert into rows values ('x')")
            connection.commit()
            seconds.append(time.perf_counter() - began)
    return seconds


def _disk(setup: ServerSetup) -> str:
    folders = [setup.runs, setup.database and setup.database.parent]
    there = [machine.nearest(folder) for folder in folders if folder]
    if not there:
        raise Skipped("neither --database nor --out is named")
    return machine.room(dict.fromkeys(there), _DISK)


def _memory(setup: ServerSetup) -> str:
    return machine.memory(_MEMORY)


def _registry(setup: ServerSetup) -> Passed:
    """Hold the registry against the hospitals named, and each key against its file."""
    if not setup.registry:
        raise Skipped(f"${REGISTRY} names no registry: a node may say any name")
    keys = registered_keys(setup.registry)
    register = f"flwr supernode register NAME.pub {FEDERATION} --name NAME, and enter it there"
    for name, public in setup.hospitals:
        if name not in keys:
            raise Refused(f"hospital {name} is not in {setup.registry}", register)
        if public and key_fingerprint(public) != keys[name]:
            raise Refused(
                f"{setup.registry} has another key of {name} than {public}",
                "bring the right file, or revoke that node and register this key",
            )
    named = {name for name, _ in setup.hospitals}
    others = sorted(keys.keys() - named) if named else []
    told = (f"registered and not named: {', '.join(others)}",) if others else ()
    return Passed(f"{setup.registry} knows {', '.join(sorted(keys)) or 'nobody'}", told)


def _nodes(setup: ServerSetup) -> Passed:
    """Ask Flower which of the deployment's hospitals it knows, and which are online."""
    deployment = setup.deployment
    if deployment is None:
        raise Skipped(f"no deployment is named; by hand: flwr supernode list {FEDERATION}")
    if not deployment.process("server"):
        raise Skipped("the server does not run: 'fedsilo deploy up' starts it")
    listed = flwr(deployment, "supernode", "list", FEDERATION)["nodes"]
    states = {str(node["node-id"]): str(node["status"]) for node in listed}
    by_site = {
        site: states.get(deployment.nodes.get(site, ""), "unregistered")
        for site in deployment.sites
    }
    if gone := [site for site, state in by_site.items() if state == "unregistered"]:
        raise Refused(
            f"the server does not know the key of {', '.join(gone)}",
            "make other keys (make-secrets.sh --add-hospital) and 'fedsilo deploy up'",
        )
    away = [f"{site} is {state}" for site, state in by_site.items() if state != "online"]
    if away:
        raise Refused(
            f"not everybody is there: {', '.join(away)}",
            "'fedsilo deploy up' starts what has ended, 'fedsilo deploy logs SITE' says why",
        )
    return Passed(f"online: {', '.join(by_site)}")


CHECKS: tuple[Check[ServerSetup], ...] = (
    Check("software", "versions that this fedsilo was made for", _software),
    Check("authority", "the certificate by which hospitals know the server", _authority),
    Check("certificate", "the server's own", _certificate),
    Check("key", "the certificate's, readable by its owner alone", _key, ("certificate",)),
    Check("fleet port", "where hospitals reach the server", _fleet),
    Check("control port", "where runs are started, on the loopback", _control),
    Check("answer", "hospitals are answered by a certificate that holds", _answer, ("authority",)),
    Check("database", "Flower's, how long a commit takes", _database),
    Check("disk", "room for runs and database", _disk),
    Check("memory", "room for one model a hospital", _memory),
    Check("registry", "names bound to the keys of the hospitals named", _registry),
    Check("nodes", "which hospitals Flower knows and sees", _nodes),
)
