"""A hospital and a server that are set up well, for tests to break: secrets, a Fleet API, data."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL
from flwr.proto.fleet_pb2 import ActivateNodeResponse, DeactivateNodeResponse
from flwr.proto.fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import (
    NodeAuthServerInterceptor,
)
from PIL import Image

from fedsilo.core.processes import free_ports
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.certificates import make_authority, make_hospital_key, sign_server
from fedsilo.deployment.deployment import key_fingerprint
from fedsilo.deployment.doctor import server as server_checks
from fedsilo.deployment.doctor import site as site_checks
from fedsilo.deployment.doctor.findings import Finding, examine
from fedsilo.deployment.doctor.server import ServerSetup
from fedsilo.deployment.doctor.site import SiteSetup
from fedsilo.server_app.config.settings import resolve
from tests.support.keys import compare_keys
from tests.support.setting_keys import as_keys

SCHEMA = """
columns: [{name: age}, {name: chol, mean: 240.0, std: 50.0}]
label: {column: diagnosis, classes: {healthy: [0], disease: [1]}}
missing: [""]
sites: {north: north.csv}
"""
IMAGES = """
sites: {north: north/manifest.csv}
classes: [nevus, melanoma]
image-size: 32
"""
SITE_FILE: Mapping[str, Any] = {"methods": ["*"], "datasets": ["*"], "records": ["*"]}
RUN: Mapping[str, Value] = {
    "method": "fedavg",
    "dataset": "table",
    "network.name": "logistic",
    "rounds": 2,
    "train.mc-passes": 0,
    "machine.device": "cpu",
    "data.standardise": "pooled",
}


def make_secrets(folder: Path) -> None:
    """Write an authority, the server's certificate, and the keys of two hospitals' nodes."""
    make_authority(folder)
    sign_server(folder, ["localhost"])
    for name in ("north", "south"):
        private, public = make_hospital_key()
        (folder / f"{name}.key").touch(mode=0o600)
        (folder / f"{name}.key").write_bytes(private)
        (folder / f"{name}.pub").write_bytes(public)


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of secrets of two hospitals; tests change copies."""
    folder = tmp_path_factory.mktemp("doctor") / "secrets"
    make_secrets(folder)
    return folder


@pytest.fixture(scope="session")
def other_secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of secrets of another authority."""
    folder = tmp_path_factory.mktemp("doctor-others") / "secrets"
    make_secrets(folder)
    return folder


class _State:
    """Knows every key as node 7."""

    online = False
    beats = 0  # heartbeats that keep its node online
    interval = 0.0  # of the newest connection, in seconds

    def state(self) -> _State:
        return self

    def get_node_id_by_public_key(self, key: bytes) -> int:
        return 7


class _Servicer(FleetServicer):
    """Admits node 7 once at a time."""

    def ActivateNode(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        if _State.online:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "Failed to activate SuperNode.")
        _State.online, _State.interval = True, request.heartbeat_interval
        return ActivateNodeResponse(node_id=7)

    def DeactivateNode(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        _State.online = False
        return DeactivateNodeResponse()

    def SendNodeHeartbeat(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        if request.heartbeat_interval < HEARTBEAT_MIN_INTERVAL:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "Invalid heartbeat interval.")
        _State.beats += 1
        return SendNodeHeartbeatResponse(success=True)


@pytest.fixture
def online() -> Iterator[type[_State]]:
    """Let the server have admitted the hospital's node already."""
    _State.online, _State.beats = True, 0
    yield _State
    _State.online = False


@pytest.fixture
def connections() -> Iterator[type[_State]]:
    """Return what the server knows of connections, of which there was none yet."""
    _State.online, _State.interval = False, 0.0
    yield _State
    _State.online = False


@pytest.fixture(scope="session")
def fleet(secrets: Path) -> Iterator[int]:
    """Serve Flower's Fleet API with its own look at keys and clocks; yield the port."""
    pair = [(secrets / f"server.{end}").read_bytes() for end in ("key", "crt")]
    server = grpc.server(
        ThreadPoolExecutor(2),
        interceptors=[NodeAuthServerInterceptor(_State())],  # type: ignore[arg-type]  # all it asks
    )
    add_FleetServicer_to_server(_Servicer(), server)  # type: ignore[no-untyped-call]
    port = server.add_secure_port("0.0.0.0:0", grpc.ssl_server_credentials([tuple(pair)]))
    server.start()
    yield port
    server.stop(None)


@contextmanager
def listening(context: ssl.SSLContext | None) -> Iterator[str]:
    """Answer on a port of the loopback, with TLS or in plain words; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    one, _ = listener.accept()
                    with one, suppress(OSError):
                        if context:
                            context.wrap_socket(one, server_side=True).close()
                        else:
                            one.recv(1)
                            one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.fixture
def plain_port() -> Iterator[int]:
    """Answer in plain words on a port of the loopback; yield it."""
    with listening(None) as address:
        yield int(address.rpartition(":")[2])


def certificate(authority: Path, key: Path, out: Path, begin: datetime, end: datetime) -> None:
    """Write a certificate of the key in ``key``, signed by the authority's folder, to ``out``."""
    issuer = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    signer = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    own = serialization.load_pem_private_key(key.read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    assert isinstance(own, ec.EllipticCurvePrivateKey)
    made = x509.CertificateBuilder(
        issuer.subject, issuer.subject, own.public_key(), 7, begin.astimezone(UTC), end
    ).sign(signer, hashes.SHA384())
    out.write_bytes(made.public_bytes(serialization.Encoding.PEM))


@dataclass
class Hospital:
    """What a hospital's node is started with; a test breaks one thing of it.

    Attributes:
        folder: of all of it: secrets, data, state.
        node: its node config.
        run: the settings of the experiment; None: none is named.
        options: other fields of the set-up.
    """

    folder: Path
    node: dict[str, Value]
    options: dict[str, Any]
    run: dict[str, Value] | None = field(default_factory=lambda: dict(RUN))
    rules: dict[str, Any] = field(default_factory=lambda: dict(SITE_FILE))

    @property
    def secrets(self) -> Path:
        return self.folder / "secrets"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def site_file(self) -> Path:
        return self.folder / "site.yaml"

    def allow(self, **changes: Any) -> None:
        """Write a site file with these keys over those that allow everything."""
        self.rules |= {key.replace("_", "-"): value for key, value in changes.items()}
        self.site_file.write_text(json.dumps(self.rules))  # JSON is YAML too
        self.node["site-file"] = str(self.site_file)

    def found(self) -> list[Finding]:
        """Return what doctor finds."""
        settings = None if self.run is None else resolve(as_keys(self.run))
        setup = SiteSetup(dict(self.node), settings=settings, **self.options)
        return list(examine(site_checks.CHECKS, setup, setup.name))


def write_table(folder: Path, header: str = "age,chol,diagnosis", rows: int = 60) -> None:
    rng = np.random.default_rng(3)
    numbers = zip(rng.integers(30, 80, rows), rng.integers(150, 300, rows), strict=True)
    lines = [f"{age},{chol},{row % 2}" for row, (age, chol) in enumerate(numbers)]
    folder.mkdir(exist_ok=True)
    (folder / "schema.yaml").write_text(SCHEMA)
    (folder / "north.csv").write_text("\n".join([header, *lines, ""]))


def write_images(folder: Path) -> None:
    """Write 40 images of two classes, of which number 5 is cut short."""
    (folder / "north").mkdir(parents=True, exist_ok=True)
    (folder / "images.yaml").write_text(IMAGES)
    lines = ["path,label"]
    for number in range(40):
        path = folder / "north" / f"{number}.png"
        Image.new("RGB", (32, 32), (5 * number, 0, 0)).save(path)
        lines.append(f"{number}.png,{'nevus' if number % 2 else 'melanoma'}")
    whole = (folder / "north" / "5.png").read_bytes()
    (folder / "north" / "5.png").write_bytes(whole[: len(whole) // 2])
    (folder / "north" / "manifest.csv").write_text("\n".join([*lines, ""]))


@pytest.fixture
def hospital(tmp_path: Path, secrets: Path, fleet: int) -> Hospital:
    """Return a hospital that is set up well."""
    shutil.copytree(secrets, tmp_path / "secrets")
    write_table(tmp_path / "data")
    (tmp_path / "state").mkdir()
    node: dict[str, Value] = {
        "site": "north",
        "data-dir": str(tmp_path / "data"),
        "device": "cpu",
        "state-dir": str(tmp_path / "state"),
        "trust": "server",
    }
    compare_keys({"north": tmp_path / "state", "south": tmp_path / "south"})
    options = {
        "superlink": f"127.0.0.1:{fleet}",
        "authority": tmp_path / "secrets" / "ca.crt",
        "key": tmp_path / "secrets" / "north.key",
        "port": free_ports(1)[0],
        "node": 7,
    }
    made = Hospital(tmp_path, node, options)
    made.allow()
    return made


@dataclass
class Server:
    """What a SuperLink is started with; a test breaks one thing of it."""

    folder: Path
    options: dict[str, Any]

    @property
    def secrets(self) -> Path:
        return self.folder / "secrets"

    @property
    def registry(self) -> Path:
        return self.folder / "registry.json"

    def found(self) -> list[Finding]:
        """Return what doctor finds."""
        return list(examine(server_checks.CHECKS, ServerSetup(**self.options)))


@pytest.fixture
def server(tmp_path: Path, secrets: Path) -> Server:
    """Return a server that is set up well and does not run."""
    shutil.copytree(secrets, tmp_path / "secrets")
    own = tmp_path / "secrets"
    keys = {name: own / f"{name}.pub" for name in ("north", "south")}
    entries = {
        name: {"node-id": str(number), "key": key_fingerprint(path)}
        for number, (name, path) in enumerate(keys.items(), start=7)
    }
    (tmp_path / "registry.json").write_text(json.dumps(entries))
    fleet, control = free_ports(2)
    options = {
        "authority": own / "ca.crt",
        "certificate": own / "server.crt",
        "key": own / "server.key",
        "database": tmp_path / "superlink.db",
        "fleet": f"0.0.0.0:{fleet}",
        "control": f"127.0.0.1:{control}",
        "runs": tmp_path / "runs",
        "registry": tmp_path / "registry.json",
        "hospitals": tuple(keys.items()),
    }
    return Server(tmp_path, options)


@pytest.fixture
def line_of() -> Callable[[list[Finding], str], Finding]:
    """Return a function that gives the one finding of a check."""

    def one(found: list[Finding], check: str) -> Finding:
        (finding,) = (each for each in found if each.check == check)
        return finding

    return one
