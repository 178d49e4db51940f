"""What a hospital can check of the server over the network: its certificate and its clock."""

import socket
import ssl
from datetime import datetime
from pathlib import Path

from fedsilo.server_app.doctor.findings import Refused, Skipped


class Silent(Refused):
    """A server that does not answer; a container waits for it."""

    def __init__(self, address: str, why: str, fix: str) -> None:
        super().__init__(f"server {address} does not answer ({why})", fix)
        self.why = why


def handshake(address: str, authority: Path, patience: float = 10.0) -> None:
    """Refuse a server whose certificate is not valid, which Flower would retry for ever.

    ``address`` is that of the Fleet API, host:port, and ``authority`` the certificate that must
    have signed the server's. ``patience`` is in seconds.

    Raises:
        Silent: it does not answer.
        Refused: its certificate ended, belongs to another host or authority, or it has no TLS.
    """
    host, port = parts(address)
    context = ssl.create_default_context(cafile=str(authority))
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), timeout=patience) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return
    except ssl.SSLCertVerificationError as error:
        fault = f"server {address} is not to be trusted with {authority}: {error.verify_message}"
        raise Refused(fault, "ask the server's operator, send nothing") from error
    except ssl.SSLEOFError:
        raise Silent(address, "it closes connections", "wait: it is starting or ending") from None
    except ssl.SSLError as error:
        fault = f"server {address} does not speak TLS ({error.reason})"
        raise Refused(fault, "name the port of its Fleet API") from error
    except OSError as error:
        raise Silent(
            address,
            error.strerror or str(error),
            "ask whether it runs and whether a firewall lets this machine reach it",
        ) from error


def parts(address: str) -> tuple[str, int]:
    """Return host and port of an address such as ``[::1]:9092``, or raise ``Refused``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise Refused(f"the server's address is '{address}'", "give host:port")
    return host.strip("[]"), int(port)


def same_clock(address: str, authority: Path, key: Path, now: datetime) -> str:
    """Ask the server, by a signed call that it refuses, whether it accepts this machine's time.

    Flower admits a hospital only if the time that it signs is at most some minutes off. The call
    is a heartbeat of node 0, which does not exist: a server that accepts the time refuses the node.

    Raises:
        Refused: the clocks differ.
        Skipped: the server does not ask for keys, or answers something else.
    """
    import grpc  # type: ignore[import-untyped]  # its stubs are another package
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.common.constant import (
        PUBLIC_KEY_HEADER,
        SIGNATURE_HEADER,
        TIMESTAMP_HEADER,
        TIMESTAMP_TOLERANCE,
    )
    from flwr.proto.fleet_pb2_grpc import FleetStub
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    private = load_ssh_private_key(key.read_bytes(), None)
    if not isinstance(private, EllipticCurvePrivateKey):
        raise Refused(f"secret {key} is no EC key", "make one with make-secrets.sh --add-hospital")
    stamp = now.isoformat()
    signed = (
        (PUBLIC_KEY_HEADER, public_key_to_bytes(private.public_key())),
        (TIMESTAMP_HEADER, stamp),
        (SIGNATURE_HEADER, sign_message(private, stamp.encode("ascii"))),
    )
    credentials = grpc.ssl_channel_credentials(authority.read_bytes())
    with grpc.secure_channel(address, credentials) as channel:
        try:
            FleetStub(channel).SendNodeHeartbeat(
                SendNodeHeartbeatRequest(), timeout=3, metadata=signed
            )
        except grpc.RpcError as error:
            said = str(error.details())
        else:
            raise Skipped("the server asks for no keys, and accepts any time")
    if said == "Invalid timestamp":
        raise Refused(
            f"here it is {now:%Y-%m-%d %H:%M} UTC, more than {TIMESTAMP_TOLERANCE // 60} minutes "
            "from the server's time, so that the server admits nobody",
            "set this machine's clock (or the server's), by NTP",
        )
    if said != "Invalid node ID":
        raise Skipped(f"the server said '{said}', which does not reveal its time")
    return f"{now:%Y-%m-%d %H:%M} UTC, near the server's time"
