"""Entry point of the server's image: check secrets and volume, then become ``flower-superlink``.

The Control and Runtime API stay on the container's loopback: only those who may run a command in
this container may start a run or register a hospital. Hospitals reach the Fleet API alone.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import checks
import hospitals
from health import HEALTH_ADDRESS

from fedsilo.server_app.doctor.secrets import certificate, matching_key, writable_folder

_CONNECTION = """[superlink]
default = "federation"

[superlink.federation]
address = "127.0.0.1:8000"
root-certificates = "{authority}"
"""


def superlink_command(secrets: Path, state: Path) -> list[str]:
    """Return the command that starts the SuperLink, and write how ``flwr`` reaches it."""
    authority, own = certificate(secrets / "ca.crt"), certificate(secrets / "server.crt")
    key = matching_key(secrets / "server.key", own)
    home = writable_folder(state, "state directory") / "flwr"
    hospitals.write_registry(state)  # the server reads one, also before the first hospital
    home.mkdir(mode=0o700, exist_ok=True)
    (home / "config.toml").write_text(_CONNECTION.format(authority=authority), encoding="utf-8")
    return [
        "flower-superlink",
        *("--ssl-ca-certfile", str(authority)),
        *("--ssl-certfile", str(own)),
        *("--ssl-keyfile", str(key)),
        *("--host", "127.0.0.1", "--port", "8000"),
        *("--fleet-api-address", "0.0.0.0:9092"),
        *("--database", str(state / "superlink.db")),
        *("--health-server-address", HEALTH_ADDRESS),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the server, or print its command with ``--print``."""
    parser = argparse.ArgumentParser(prog="start_server.py", description=__doc__)
    parser.add_argument("--secrets", type=Path, default=Path("/run/secrets"))
    parser.add_argument("--state-dir", type=Path, default=Path("/state"))
    parser.add_argument("--print", action="store_true", help="print the command, start nothing")
    given = parser.parse_args(arguments)
    return checks.start(
        "server", lambda: superlink_command(given.secrets, given.state_dir), given.print
    )


if __name__ == "__main__":
    sys.exit(main())
