"""A hospital looks at the server's certificate before Flower starts, and says what is wrong."""

import socket
import ssl
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedsilo.deployment.doctor import credentials
from fedsilo.deployment.doctor.credentials import check_clock, check_handshake, is_online
from fedsilo.deployment.doctor.findings import Refused
from tests.fedsilo.deployment.doctor.conftest import listening


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
    host: str, year: int, said: str, secrets: Path, tmp_path: Path
) -> None:
    authority = secrets / "ca.crt"
    end = datetime(year, 1, 1, tzinfo=UTC)
    _signed(authority, secrets / "ca.key", tmp_path, host, end)
    with listening(_context(tmp_path)) as address:
        if said:
            with pytest.raises(Refused, match=said) as told:
                check_handshake(address, authority)
            assert str(told.value).startswith(f"server {address} cannot be trusted")
        else:
            check_handshake(address, authority)


def test_the_server_of_another_authority_is_refused(secrets: Path, other_secrets: Path) -> None:
    with (
        listening(_context(other_secrets)) as address,
        pytest.raises(Refused, match="certificate"),
    ):
        check_handshake(address, secrets / "ca.crt")


def test_a_port_without_tls_is_refused(secrets: Path) -> None:
    with listening(None) as address, pytest.raises(Refused, match="does not speak TLS"):
        check_handshake(address, secrets / "ca.crt")


def test_a_call_that_a_proxy_stops_is_no_missing_registration(
    secrets: Path, fleet: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"localhost:{fleet}"
    now = datetime.now(UTC)
    asked = (address, secrets / "ca.crt", secrets / "north.key")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    check_handshake(address, secrets / "ca.crt")  # as before: the plain connection uses no proxy
    for ask in (lambda: is_online(*asked, 7, now), lambda: check_clock(*asked, now)):
        with pytest.raises(Refused, match="a call does not reach server") as told:
            ask()
        assert (
            told.value.fix == "$https_proxy sends such calls to a proxy: add localhost to $no_proxy"
        )
    monkeypatch.setenv("no_proxy", "localhost")
    assert not is_online(*asked, 7, now)


def test_a_proxy_that_drops_the_connection_is_named(
    secrets: Path, fleet: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(None) as proxy:  # it accepts, and hangs up after some bytes
        monkeypatch.setenv("https_proxy", f"http://{proxy}")
        monkeypatch.setenv("no_proxy", "")
        with pytest.raises(Refused) as told:
            check_clock(
                f"localhost:{fleet}", secrets / "ca.crt", secrets / "north.key", datetime.now(UTC)
            )
    assert "no_proxy" in told.value.fix
    assert "\n" not in str(told.value)


def test_a_clock_that_is_wrong_is_no_missing_registration(secrets: Path, fleet: int) -> None:
    asked = (f"localhost:{fleet}", secrets / "ca.crt", secrets / "north.key")
    with pytest.raises(Refused, match="answered 'Invalid timestamp'"):
        is_online(*asked, 7, datetime(2020, 1, 1, tzinfo=UTC))


def test_a_server_that_does_not_answer_is_silent(secrets: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(Refused, match="does not answer"):
        check_handshake(f"127.0.0.1:{port}", secrets / "ca.crt")


def test_the_causes_in_a_network_are_told_apart(
    secrets: Path, other_secrets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixes = set()
    monkeypatch.setattr(credentials, "_PATIENCE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent, listening(None) as plain:
        held_back = f"127.0.0.1:{silent.getsockname()[1]}"  # accepts, and answers no handshake
        for address in ("no-such-host.invalid:9092", held_back, plain, "127.0.0.1:1"):
            with pytest.raises(Refused) as told:
                check_handshake(address, secrets / "ca.crt")
            fixes.add(told.value.fix)
    with listening(_context(other_secrets)) as address, pytest.raises(Refused) as told:
        check_handshake(address, secrets / "ca.crt")
    fixes.add(told.value.fix)
    assert len(fixes) == 5, "DNS, MTU, no TLS, no answer and an inspecting firewall"


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_an_authority_s_file_that_is_none_is_refused(text: str | None, tmp_path: Path) -> None:
    authority = tmp_path / "ca.crt"
    if text is not None:
        authority.write_text(text)
    with pytest.raises(Refused, match="cannot be used"):
        check_handshake("127.0.0.1:9", authority)
