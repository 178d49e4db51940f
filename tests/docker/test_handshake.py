"""A hospital looks at the server's certificate before Flower starts, and says what is wrong."""

import importlib.util
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Runner = Callable[..., Any]


@pytest.fixture(scope="module")
def checks(docker_folder: Path) -> ModuleType:
    """Return the entry points' checks as a module."""
    spec = importlib.util.spec_from_file_location("checks", docker_folder / "checks.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _signed(authority: Path, authority_key: Path, folder: Path, host: str, end: datetime) -> None:
    """Write server.crt and server.key: a certificate of ``authority`` for one address."""
    issuer = x509.load_pem_x509_certificate(authority.read_bytes())
    signer = serialization.load_pem_private_key(authority_key.read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
    begin = datetime(2020, 1, 1, tzinfo=UTC)
    made = x509.CertificateBuilder(issuer.subject, name, key.public_key(), 7, begin, end)
    known = x509.SubjectAlternativeName([x509.IPAddress(ip_address(host))])
    signed = made.add_extension(known, critical=False).sign(signer, hashes.SHA384())
    pem = serialization.Encoding.PEM
    (folder / "server.crt").write_bytes(signed.public_bytes(pem))
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "server.key").write_bytes(key.private_bytes(pem, form, plain))


@contextmanager
def _listening(context: ssl.SSLContext | None) -> Iterator[str]:
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


def _context(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    return context


@pytest.mark.parametrize(
    ("host", "year", "said"),
    [
        ("127.0.0.1", 2120, ""),
        ("127.0.0.1", 2021, "certificate has expired"),
        ("10.0.0.1", 2120, "IP address mismatch"),
    ],
)
def test_a_certificate_must_hold_today_and_for_this_host(
    host: str, year: int, said: str, checks: ModuleType, made_secrets: Path, tmp_path: Path
) -> None:
    authority = made_secrets / "ca.crt"
    end = datetime(year, 1, 1, tzinfo=UTC)
    _signed(authority, made_secrets / "ca.key", tmp_path, host, end)
    with _listening(_context(tmp_path)) as address:
        if said:
            with pytest.raises(checks.Refused, match=said) as told:
                checks.refuse_untrusted(address, authority)
            assert str(told.value).startswith(f"server {address} is not to be trusted")
        else:
            checks.refuse_untrusted(address, authority)


def test_the_server_of_another_authority_is_refused(
    checks: ModuleType, made_secrets: Path, tmp_path: Path, script: Runner
) -> None:
    names = ("--out", tmp_path / "other", "--host", "server", "--hospital", "north")
    assert script("make-secrets.sh", *names).returncode == 0
    with (
        _listening(_context(tmp_path / "other")) as address,
        pytest.raises(checks.Refused, match="certificate"),
    ):
        checks.refuse_untrusted(address, made_secrets / "ca.crt")


def test_a_port_without_tls_is_refused(checks: ModuleType, made_secrets: Path) -> None:
    with _listening(None) as address, pytest.raises(checks.Refused, match="does not speak TLS"):
        checks.refuse_untrusted(address, made_secrets / "ca.crt")


def test_a_server_that_does_not_answer_yet_is_waited_for(
    checks: ModuleType, made_secrets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    checks.refuse_untrusted(f"127.0.0.1:{port}", made_secrets / "ca.crt")
    assert "does not answer yet" in capsys.readouterr().err


def test_the_entry_point_ends_with_one_line(
    made_secrets: Path, tmp_path: Path, script: Runner
) -> None:
    end = datetime(2021, 1, 1, tzinfo=UTC)
    _signed(made_secrets / "ca.crt", made_secrets / "ca.key", tmp_path, "127.0.0.1", end)
    (tmp_path / "node.key").write_bytes((made_secrets / "north.key").read_bytes())
    (tmp_path / "node.key").chmod(0o600)
    (tmp_path / "ca.crt").write_bytes((made_secrets / "ca.crt").read_bytes())
    folders = [f"--{name}-dir={tmp_path}" for name in ("data", "state", "cache")]
    with _listening(_context(tmp_path)) as address:
        given = {"FEDSILO_SITE": "north", "FEDSILO_SERVER": address}
        done = script("start_hospital.py", f"--secrets={tmp_path}", *folders, **given)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"hospital: server {address} is not to be trusted")
    assert "certificate has expired" in line
