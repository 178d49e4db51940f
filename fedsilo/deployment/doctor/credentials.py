"""Checks certificates and keys, and whether a server accepts them; containers use the checks too.

A check of a file returns its path, or raises ``Refused`` with a one-line fault and its fix.
Flower's code is imported only when a server is called, because a container starts with this module.
"""

from __future__ import annotations

import os
import socket
import ssl
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fedsilo.core.files.text_files import file_fault
from fedsilo.core.one_line import one_line, reason_of
from fedsilo.deployment.doctor.findings import Refused, Skipped

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

CERTIFICATE, PRIVATE_KEY = "BEGIN CERTIFICATE", "PRIVATE KEY"
OPENSSH_KEY = "BEGIN OPENSSH PRIVATE KEY"
_RENEW = "renew it ('fedsilo deploy renew server')"
_CLOCK = "set this machine's clock"
_PATIENCE = 3.0  # seconds that the server has to answer
_UNKNOWN = "Invalid node ID"  # Flower's answer about a node that is not registered with the key
# OpenSSL's codes for a certificate that another authority signed, as a firewall's that inspects TLS
_OTHER_AUTHORITY = (18, 19, 20, 21)
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # variables that gRPC obeys, in this order


def check_secret(path: Path, marker: str, private: bool) -> Path:
    """Check that the file of a certificate or a key can be used, and return its path.

    The file must be a regular file of at most 1 GiB that contains ``marker``. Its content is not
    checked further.

    Args:
        path: the file, which may be a link.
        marker: a text that such a file contains, such as "BEGIN CERTIFICATE".
        private: whether the file must be closed to all users except its owner (no mode bits in
            0o077).

    Raises:
        Refused: the file breaks one of these rules, is missing, or is not readable by this user.
    """
    # Before the file is read, because reading a pipe would wait for ever
    fault = file_fault(path)
    fix = "name a file, or mount one there"
    if not fault:
        fault, fix = _secret_fault(path, marker, private)
    if fault:
        raise Refused(f"secret {path} {fault}", fix)
    return path


def _secret_fault(path: Path, marker: str, private: bool) -> tuple[str, str]:
    """Describe why the file of a certificate or key cannot be used, and how to correct it.

    Args:
        path: the file. It must not be a pipe, because reading a pipe may never end.
        marker: a text that the file must contain.
        private: whether only the file's owner may have access.

    Returns:
        The fault and the fix. The fault is a phrase such as "is missing", which the caller puts
        after the path. Both texts are empty if the file can be used.
    """
    try:
        text = path.read_text(encoding="ascii", errors="replace")
        mode = path.stat().st_mode & 0o777
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return "is missing", "copy the file there, or mount it"
    except PermissionError:
        return f"is not readable by user {os.getuid()}", "chown it to that user"
    # A wrong file, such as the key in place of the certificate, is the commonest mistake
    if marker not in text:
        return f"does not contain '{marker}'", "mount the right file there"
    if private and mode & 0o077:
        fault = f"has mode {mode:o}, so other users may read it"
        return fault, "chmod 600 it, on the host where it is mounted"
    return "", ""


def read_certificate(path: Path) -> Certificate:
    """Read a certificate in PEM format, without checking its dates or its signature.

    Raises:
        Refused: the file is missing or not readable, or is not a certificate.
    """
    from cryptography.x509 import load_pem_x509_certificate

    check_secret(path, CERTIFICATE, private=False)
    try:
        return load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise Refused(f"certificate {path} cannot be read", "make a new one") from error


def check_certificate(path: Path, now: datetime | None = None) -> Path:
    """Check that a certificate is valid at a point in time, and return its path.

    Only its dates are checked, not its signature. ``now`` is in UTC, and None means the current
    time.

    Raises:
        Refused: the certificate is missing, damaged, expired or not valid yet.
    """
    found, today = read_certificate(path), now or datetime.now(UTC)
    begin, end = found.not_valid_before_utc, found.not_valid_after_utc
    fault, fix = "", ""
    if today > end:
        fault, fix = f"ended on {end:%Y-%m-%d %H:%M} UTC", _RENEW
    # Nobody makes a certificate for later, so it is the clock that is behind
    elif today < begin:
        fault, fix = f"begins on {begin:%Y-%m-%d %H:%M} UTC", _CLOCK
    if fault:
        raise Refused(f"certificate {path} {fault}", fix)
    return path


def check_lasting_certificate(path: Path, now: datetime, days: int) -> str:
    """Check that a certificate is valid now and for ``days`` more days, and describe its validity.

    Days are counted from ``now`` to the certificate's end, and rounded down. The result is a text
    such as "PATH is valid until 2027-03-01, 94 days".

    Raises:
        Refused: the certificate ends sooner, or is missing, damaged or not valid yet.
    """
    end = read_certificate(check_certificate(path, now)).not_valid_after_utc
    left = (end - now).days
    if left < days:
        raise Refused(f"certificate {path} ends on {end:%Y-%m-%d}, in {left} days", _RENEW)
    return f"{path} is valid until {end:%Y-%m-%d}, {left} days"


def check_matching_key(path: Path, certificate_path: Path) -> Path:
    """Check that a private key belongs to a certificate, and return the key's path.

    The key must be an unencrypted PEM file, because the server starts without a person who could
    type a password. Only its owner may have access to the file.

    Raises:
        Refused: the key belongs to another certificate, is encrypted, or is open to other users.
            Also raised if a file is missing or damaged.
    """
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    check_secret(path, PRIVATE_KEY, private=True)
    certified = read_certificate(certificate_path).public_key()
    fault, fix = "", ""
    # The server starts by itself, so nobody is there to type a password
    try:
        if load_pem_private_key(path.read_bytes(), None).public_key() != certified:
            fault, fix = f"the key of {certificate_path}", "mount a key with its certificate"
    except (TypeError, ValueError):
        fault, fix = "an unencrypted PEM key", "mount such a key"
    if fault:
        raise Refused(f"secret {path} is not {fault}", fix)
    return path


def check_signature(path: Path, authority: Path) -> None:
    """Check that the certificate in ``path`` was signed by the given authority.

    ``authority`` is the file of the authority's own certificate. A hospital trusts only
    certificates that its authority has signed. The dates are not checked.

    Raises:
        Refused: the certificate was not signed by the authority, or a file is missing or damaged.
    """
    from cryptography.exceptions import InvalidSignature

    try:
        read_certificate(path).verify_directly_issued_by(read_certificate(authority))
    except (ValueError, TypeError, InvalidSignature) as error:
        fault = f"certificate {path} was not signed by {authority}"
        raise Refused(fault, "use the pair of one deployment") from error


def check_handshake(address: str, authority: Path) -> None:
    """Check that a server answers a TLS connection with a certificate that the authority signed.

    The connection is closed after the handshake, without sending anything else. Each wait for an
    answer takes at most 3 seconds. Flower would repeat a failed connection without an end, so this
    check is made before it starts.

    Args:
        address: the address of the Fleet API, host:port. The server's certificate must be valid for
            the host.
        authority: the file of the authority's certificate.

    Raises:
        Refused: the address is malformed, the server does not answer or does not use TLS, or the
            authority's file cannot be used. Also raised if the server's certificate has expired,
            is for another host, or was signed by another authority.
    """
    host, port = split_address(address)
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except OSError as error:  # also ssl.SSLError, for a file that holds no certificate
        fault = f"the authority's certificate {authority} cannot be used ({reason_of(error)})"
        raise Refused(fault, "copy the deployment's ca.crt there again") from None
    context.set_alpn_protocols(["h2"])  # gRPC's HTTP/2; without it the server may refuse the call
    is_connected = False
    try:
        with socket.create_connection((host, port), timeout=_PATIENCE) as plain:
            is_connected = True
            with context.wrap_socket(plain, server_hostname=host):
                return
    except OSError as error:
        raise _explain_failed_connection(error, address, authority, is_connected) from None


def _explain_failed_connection(
    error: OSError, address: str, authority: Path, is_connected: bool
) -> Refused:
    """Build the error that explains a failed TLS connection to a server, with cause and remedy.

    The type of ``error`` decides on the cause:

    - a host name that cannot be resolved
    - a TLS handshake without an answer
    - a certificate that cannot be trusted
    - a server that closes the connection
    - a port without TLS
    - for every other error, a server that does not answer

    Args:
        error: the error that the attempt to connect raised.
        address: the server's address, host:port.
        authority: the file of the authority's certificate.
        is_connected: whether the TCP connection was made. Only then does a timeout mean a handshake
            without an answer.

    Returns:
        The error, which the caller raises.
    """
    # The most general cause first; the classes below are all OSErrors
    fault = f"does not answer ({error.strerror or error})"
    fix = "ask the operator whether it runs, and whether a firewall blocks this machine"
    if isinstance(error, socket.gaierror):
        fault = f"has a name that this machine cannot resolve ({error.strerror})"
        fix = "correct this machine's DNS, or add the name to /etc/hosts"
    elif isinstance(error, TimeoutError) and is_connected:
        fault = "accepts connections, but does not answer the TLS handshake"
        fix = (
            "ask your network's operator whether a firewall holds TLS back, or a tunnel is too "
            "narrow for the packets (MTU)"
        )
    elif isinstance(error, ssl.SSLCertVerificationError):
        fault = f"cannot be trusted by {authority}: {error.verify_message}"
        fix = "send nothing, and ask the server's operator"
        if error.verify_code in _OTHER_AUTHORITY:
            fix = (
                "send nothing; if your network inspects TLS, let it leave out "
                f"{address}, otherwise ask the server's operator"
            )
    elif isinstance(error, ssl.SSLEOFError | ConnectionResetError):
        fault = "does not answer (it closes connections)"
        fix = "wait: it is starting or ending; or ask whether a firewall closes TLS connections"
    elif isinstance(error, ssl.SSLError):
        fault = f"does not speak TLS ({error.reason})"
        fix = "name the port of its Fleet API"
    return Refused(f"server {address} {fault}", fix)


def split_address(address: str) -> tuple[str, int]:
    """Split an address such as ``[::1]:9092`` into its host, without brackets, and its port.

    The host itself is not checked.

    Raises:
        Refused: the text is not host:port with a port from 1 to 65535.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise Refused(f"the server's address is '{address}'", "give host:port")
    return host.strip("[]"), int(port)


def check_clock(address: str, authority: Path, key: Path, now: datetime) -> str:
    """Check that the server accepts this machine's time, and return the time as text.

    Flower refuses a call whose time is some minutes off. This check sends a heartbeat for node 0,
    which does not exist. The server checks the time before the node, so the answer that the node is
    unknown means that the time is right.

    Args:
        address: the server's Fleet API, host:port.
        authority: the file of the authority's certificate.
        key: the file of the hospital's private key, which signs the call.
        now: the time to send, in UTC.

    Returns:
        A text such as "2026-03-03 09:41 UTC, close to the server's time".

    Raises:
        Refused: the server refuses the time, the call does not reach the server, or the key is not
            an EC key.
        Skipped: the server accepts unregistered keys, so it does not check the time. Also raised
            for any other answer.
        OSError, ValueError: a file cannot be read.
    """
    from flwr.common.constant import TIMESTAMP_TOLERANCE
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

    with closing(Fleet(address, authority, key, now)) as fleet:
        said = fleet.refusal("SendNodeHeartbeat", SendNodeHeartbeatRequest())
    # The server checks the time first and the node second, so a refused node had the right time
    if not said:
        raise Skipped("the server asks for no keys, so it accepts any time")
    if said == "Invalid timestamp":
        raise Refused(
            f"this machine's clock says {now:%Y-%m-%d %H:%M} UTC, more than "
            f"{TIMESTAMP_TOLERANCE // 60} minutes from the server's time, so the server admits "
            "nobody from here",
            "set this machine's clock, or the server's, by NTP",
        )
    if said != _UNKNOWN:
        raise Skipped(f"the server answered '{said}', which does not reveal its time")
    return f"{now:%Y-%m-%d %H:%M} UTC, close to the server's time"


def is_online(address: str, authority: Path, key: Path, node: int, now: datetime) -> bool:
    """Return whether a hospital's node is connected to the server now.

    The first call is a heartbeat with the interval 0, which the server always refuses. Its error
    text shows whether the key is registered for the node. The second call asks the server to
    connect the node. The server refuses this only if the node is already connected. Otherwise the
    node is disconnected again.

    Args:
        address: the server's Fleet API, host:port.
        authority: the file of the authority's certificate.
        key: the file of the hospital's private key.
        node: the hospital's node id at the server.
        now: the time with which the calls are signed, in UTC.

    Raises:
        Refused: the key is not registered for this node or is not an EC key, the server gives an
            unclear answer, or a call does not reach it.
        OSError, ValueError: a file cannot be read.
    """
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.node_pb2 import Node

    with closing(Fleet(address, authority, key, now)) as fleet:
        # The server refuses interval 0 only after it has found the key registered for this node
        beat = SendNodeHeartbeatRequest(node=Node(node_id=node), heartbeat_interval=0)
        said = fleet.refusal("SendNodeHeartbeat", beat)
        if "Invalid heartbeat interval" not in said:
            fault = f"server {address} answered '{said}', not whether this hospital is registered"
            fix = "ask the server's operator whether it runs Flower's SuperLink with keys"
            if said == _UNKNOWN:
                fault = (
                    f"the SuperLink of server {address} has no registration of this key: it was "
                    "never registered, or the hospital was revoked or has a newer key"
                )
                fix = "ask the server's operator for the newest kit"
            raise Refused(fault, fix)
        activate = ActivateNodeRequest(public_key=fleet.public_key, heartbeat_interval=30)
        if fleet.refusal("ActivateNode", activate):
            return True
        # Otherwise the server would take this check for a connected hospital for half a minute
        fleet.refusal("DeactivateNode", DeactivateNodeRequest(node_id=node))
        return False


class Fleet:
    """Calls to a server's Fleet API, signed by a hospital's key with a given time."""

    def __init__(self, address: str, authority: Path, key: Path, now: datetime) -> None:
        import grpc  # type: ignore[import-untyped]  # its stubs are another package
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
        from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
        from flwr.proto.fleet_pb2_grpc import FleetStub
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

        private = load_ssh_private_key(key.read_bytes(), None)
        if not isinstance(private, EllipticCurvePrivateKey):
            fault = f"secret {key} is not an EC key"
            raise Refused(fault, "ask the server's operator for a new kit")
        self.public_key = public_key_to_bytes(private.public_key())
        stamp = now.isoformat()
        self._signed = (
            (PUBLIC_KEY_HEADER, self.public_key),
            (TIMESTAMP_HEADER, stamp),
            (SIGNATURE_HEADER, sign_message(private, stamp.encode("ascii"))),
        )
        credentials = grpc.ssl_channel_credentials(authority.read_bytes())
        channel = grpc.secure_channel(address, credentials)
        self._address = address
        self._stub, self.close = FleetStub(channel), channel.close

    def refusal(self, name: str, request: object) -> str:
        """Call a method of the server's Fleet API, and return the error text if the server refuses.

        Args:
            name: the name of the method, such as "ActivateNode".
            request: the request message of that method.

        Returns:
            The server's error text, or an empty string if the server accepts the call.

        Raises:
            Refused: the server cannot be reached, for example because of a proxy, or does not
                answer within 3 seconds.
        """
        import grpc

        unreached = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        try:
            getattr(self._stub, name)(request, timeout=_PATIENCE, metadata=self._signed)
        except grpc.RpcError as error:
            said = str(error.details())
            if error.code() in unreached:
                fault = f"a call does not reach server {self._address} ({one_line(said, 200)})"
                raise Refused(fault, _unreached_fix(split_address(self._address)[0])) from None
            return said
        return ""


def _unreached_fix(host: str) -> str:
    """Suggest a fix if a server can be reached by TLS, but not by Flower's calls (gRPC).

    If grpc_proxy, https_proxy or http_proxy is set, the text names the first of them that is
    set, and asks to add ``host`` to $no_proxy. Otherwise the text says that the server may be
    starting or ending, or that a firewall may be in between.
    """
    for name in _PROXIES:
        if os.environ.get(name):
            return f"${name} sends such calls to a proxy: add {host} to $no_proxy"
    return "wait: it is starting or ending; or ask the operator whether a firewall is in between"
