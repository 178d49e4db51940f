"""The secrets of a deployment: its authority, the server's certificate, and a key per hospital.

All keys are EC P-384. A hospital's key is in OpenSSH's format, because Flower reads that format.
Only the owner can read the files. The module is imported only when keys are made, because importing
cryptography takes time.
"""

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP384R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.deployment.deployment import DeploymentError

_AUTHORITY_DAYS, _SERVER_DAYS = 3650, 365
_LOCAL = ("localhost", "127.0.0.1")  # names that the server's own processes use to reach it


def make_hospital_key() -> tuple[bytes, bytes]:
    """Make a key pair with which a hospital's node proves its identity to the server.

    Both keys are EC P-384 keys in OpenSSH's text format, as bytes. The private key is not
    encrypted.

    Returns:
        The private key and the public key.
    """
    key = generate_private_key(SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return private, public + b"\n"


def make_authority(secrets: Path) -> None:
    """Make a new certificate authority and a new key for the server, and write their files.

    The files are ``ca.crt``, ``ca.key`` and ``server.key``. The authority's certificate is
    self-signed and is valid for ten years. The server's certificate is not made here.

    Args:
        secrets: an existing folder. Existing files of these names are replaced.
    """
    key = generate_private_key(SECP384R1())
    signing = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    made = (
        _builder("fedsilo certificate authority", key, _AUTHORITY_DAYS)
        .issuer_name(_name("fedsilo certificate authority"))
        # With path length 0, it may sign members' certificates, but no further authority
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signing, critical=True)
        .sign(key, hashes.SHA384())
    )
    _write_key(secrets / "ca.key", key)
    _write_certificate(secrets / "ca.crt", made)
    _write_key(secrets / "server.key", generate_private_key(SECP384R1()))


def sign_server(secrets: Path, hosts: Sequence[str] = ()) -> datetime:
    """Make a new certificate for the server's key, and return the time at which it expires.

    The authority in ``secrets`` signs the certificate, which is written to ``server.crt`` and is
    valid for one year. The server's key does not change.

    Args:
        secrets: the folder of ``ca.crt``, ``ca.key`` and ``server.key``.
        hosts: names or IP addresses by which hospitals reach the server. The certificate is valid
            for these, localhost and 127.0.0.1. If empty, its names are those of the existing
            ``server.crt``.

    Raises:
        DeploymentError: a file that is needed is missing or damaged, or the authority would
            expire before the new certificate. Nothing was written.
    """
    try:
        authority = x509.load_pem_x509_certificate((secrets / "ca.crt").read_bytes())
        signer, key = _read_key(secrets / "ca.key"), _read_key(secrets / "server.key")
        names = _names(hosts) if hosts else _names_of(secrets / "server.crt")
    except (OSError, ValueError, TypeError) as error:
        raise DeploymentError(
            f"cannot make a certificate, because a file in {secrets} cannot be read ({error}): "
            "put ca.crt, ca.key, server.crt and server.key there"
        ) from None
    # A certificate for a TLS server only: whoever steals its key can sign no further certificate
    builder = _builder("fedsilo server", key, _SERVER_DAYS).issuer_name(authority.subject)
    made = (
        builder.add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(True, *(False,) * 8), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.OID_SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA384())
    )
    # Hospitals check the authority's certificate too, so the server's must not outlive it
    if made.not_valid_after_utc > authority.not_valid_after_utc:
        raise DeploymentError(
            f"{secrets / 'ca.crt'} expires on {authority.not_valid_after_utc:%Y-%m-%d}, before the "
            "new certificate would: make a new deployment"
        )
    _write_certificate(secrets / "server.crt", made)
    return made.not_valid_after_utc


def _read_key(path: Path) -> EllipticCurvePrivateKey:
    key = load_pem_private_key(path.read_bytes(), None)
    if not isinstance(key, EllipticCurvePrivateKey):
        raise TypeError(f"{path} is not an EC key")
    return key


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _builder(name: str, key: EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    begin = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _names(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    """Build the list of names for which the server's certificate is valid.

    The list has localhost, 127.0.0.1 and ``hosts``, each a name or an IP address. Duplicates are
    left out.
    """
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys((*_LOCAL, *hosts)):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return x509.SubjectAlternativeName(names)


def _names_of(certificate: Path) -> x509.SubjectAlternativeName:
    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    return found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def _write_key(path: Path, key: EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomically(path, pem, mode=0o600)


def _write_certificate(path: Path, certificate: x509.Certificate) -> None:
    write_atomically(path, certificate.public_bytes(Encoding.PEM), mode=0o600)
