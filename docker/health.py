"""Ask Flower's health server in this container whether it serves; the images' HEALTHCHECK."""

import os
import sys
from pathlib import Path

HEALTH_ADDRESS = "127.0.0.1:8081"


def fault_file() -> Path:
    """Return the file with the line that says why this container's process has not started.

    It is in the container's memory, and does not exist while nothing is wrong.
    """
    return Path(os.environ.get("TMPDIR", "/tmp")) / "fedsilo-start-fault"


def main() -> int:
    """Return 0 if the SuperLink or SuperNode of this container serves, else 1 and a line."""
    if fault_file().is_file():
        print(fault_file().read_text(encoding="utf-8").strip())
        return 1
    import grpc  # type: ignore[import-untyped]  # its stubs are another package
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

    # Without TLS, because the health server listens only within the container
    with grpc.insecure_channel(HEALTH_ADDRESS) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.RpcError as error:
            print(f"{HEALTH_ADDRESS}: {error.code().name.lower()}")
            return 1
    state = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status).lower()
    print(state)
    if state == "serving":
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
