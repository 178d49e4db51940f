"""Checks a server over the network from a hospital: its certificate, its clock, registration."""

import os
import socket
import ssl
from contextlib import closing
from datetime import datetime
from pathlib import Path

from fedsilo.core.one_line import one_line
from fedsilo.deployment.doctor.findings import Refused, Skipped

_PATIENCE = 3.0  # seconds in which the server must answer
# Environment variables that gRPC takes a proxy from, the first one that is set, and those that name
# hosts without a proxy
_PROXIES, _DIRECT = ("grpc_proxy", "https_proxy", "http_proxy"), ("no_grpc_proxy", "no_proxy")


def handshake(address: str, authority: Path) -> None:
    """Check that a server answers with a valid certificate; without one, Flower retries for ever.

    ``address`` is the address of the Fleet API, host:port. ``authority`` is the file of the
    authority's certificate, which must have signed the server's.

    Raises:
        Refused: the server does not answer or has no TLS, or its certificate has expired or belongs
            to another host or authority.
    """
    host, port = parts(address)
    context = ssl.create_default_context(cafile=str(authority))
    context.set_alpn_protocols(["h2"])  # gRPC's HTTP/2; without it the server may refuse the call
    try:
        with (
            socket.create_connection((host, port), timeout=_PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return
    # All four are OSErrors, so the most special error comes first
    except ssl.SSLCertVerificationError as error:
        fault = f"cannot be trusted by {authority}: {error.verify_message}"
        fix = "send nothing, and ask the server's operator"
    except ssl.SSLEOFError:
        fault = "does not answer (it closes connections)"
        fix = "wait: it is starting or ending"
    except ssl.SSLError as error:
        fault = f"does not speak TLS ({error.reason})"
        fix = "name the port of its Fleet API"
    except OSError as error:
        fault = f"does not answer ({error.strerror or error})"
        fix = "ask the operator whether it runs, and whether a firewall blocks this machine"
    raise Refused(f"server {address} {fault}", fix)


def parts(address: str) -> tuple[str, int]:
    """Split an address such as ``[::1]:9092`` into host and port; Refused if it is no address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise Refused(f"the server's address is '{address}'", "give host:port")
    return host.strip("[]"), int(port)


def same_clock(address: str, authority: Path, key: Path, now: datetime) -> str:
    """Check that the server accepts this machine's time, by a signed call that it must refuse.

    Flower admits a hospital only if the signed time is at most some minutes off. The call is a
    heartbeat of node 0, which does not exist. So a server that accepts the time refuses the node,
    and its words tell which of the two it refused.

    Raises:
        Refused: the clocks differ too much, or gRPC does not reach the server.
        Skipped: the server asks for no keys, or gives another answer.
    """
    from flwr.common.constant import TIMESTAMP_TOLERANCE
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

    with closing(_Fleet(address, authority, key, now)) as fleet:
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
    if said != "Invalid node ID":
        raise Skipped(f"the server answered '{said}', which does not reveal its time")
    return f"{now:%Y-%m-%d %H:%M} UTC, close to the server's time"


def is_online(address: str, authority: Path, key: Path, node: int, now: datetime) -> bool:
    """Tell whether the hospital's node is connected to the server now.

    A heartbeat with an impossible interval shows whether the key is registered for the node, and
    does not keep a killed node online. Then the node is activated and at once deactivated; the
    server refuses the activation of a node that is already connected.

    Raises:
        Refused: the SuperLink has no registration of the key for this node, or gRPC does not
            reach the server.
    """
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.node_pb2 import Node

    with closing(_Fleet(address, authority, key, now)) as fleet:
        # The server refuses interval 0 only after it has found the key registered for this node
        beat = SendNodeHeartbeatRequest(node=Node(node_id=node), heartbeat_interval=0)
        if "Invalid heartbeat interval" not in fleet.refusal("SendNodeHeartbeat", beat):
            raise Refused(
                f"the SuperLink of server {address} has no registration of this key: it was never "
                "registered, or the hospital was revoked or has a newer key",
                "ask the server's operator for the newest kit",
            )
        activate = ActivateNodeRequest(public_key=fleet.public_key, heartbeat_interval=30)
        if fleet.refusal("ActivateNode", activate):
            return True
        # Otherwise the server would take this check for a connected hospital for half a minute
        fleet.refusal("DeactivateNode", DeactivateNodeRequest(node_id=node))
        return False


def _unreachable(address: str, details: str) -> Refused:
    """Build the error for a server that gRPC does not reach, which may be the fault of a proxy.

    ``handshake`` opens a plain connection, so it passes where a proxy stops gRPC.
    """
    host, _ = parts(address)
    proxy = next((name for name in _PROXIES if os.environ.get(name)), "")
    direct = next((os.environ[name] for name in _DIRECT if os.environ.get(name)), "")
    for entry in direct.split(","):
        domain = entry.strip().lstrip(".")
        # A domain also stands for the hosts below it
        if domain == "*" or (domain and f".{host}".endswith(f".{domain}")):
            proxy = ""
    fault, fix = "", "ask the server's operator whether it runs"
    if proxy:
        fault = f", through the proxy that ${proxy} names"
        fix = f"add {host} to $no_proxy, or have the proxy let gRPC (HTTP/2) through"
    return Refused(f"gRPC does not reach server {address}{fault} ({one_line(details, 200)})", fix)


class _Fleet:
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
            raise Refused(f"secret {key} is no EC key", "ask the server's operator for a new kit")
        self.public_key = public_key_to_bytes(private.public_key())
        self._address = address
        stamp = now.isoformat()
        self._signed = (
            (PUBLIC_KEY_HEADER, self.public_key),
            (TIMESTAMP_HEADER, stamp),
            (SIGNATURE_HEADER, sign_message(private, stamp.encode("ascii"))),
        )
        credentials = grpc.ssl_channel_credentials(authority.read_bytes())
        channel = grpc.secure_channel(address, credentials)
        self._stub, self.close = FleetStub(channel), channel.close

    def refusal(self, name: str, request: object) -> str:
        """Make a call and return the server's text of its refusal; empty if it accepts the call.

        Raises:
            Refused: the server has not answered, so that nothing is known of the key.
        """
        import grpc

        try:
            getattr(self._stub, name)(request, timeout=_PATIENCE, metadata=self._signed)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise _unreachable(self._address, str(error.details())) from None
            return str(error.details())
        return ""
