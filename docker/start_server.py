"""Entry point of the server's image: make or check the volume's deployment, become the SuperLink.

The Control and Runtime API stay on the container's loopback: only those who may run a command in
this container may start a run or add a hospital. Hospitals reach only the Fleet API, by the
address in ``FEDSILO_HOST``.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import checks
from health import HEALTH_ADDRESS

from fedsilo.deployment.commands import hospital_address, make_secrets, prepare
from fedsilo.deployment.deployment import Deployment, is_deployment, plan, read_deployment
from fedsilo.deployment.doctor.credentials import check_certificate, check_matching_key
from fedsilo.deployment.doctor.findings import Refused
from fedsilo.deployment.doctor.machine import check_writable_folder

_CONTROL, _FLEET = 8000, 9092  # ports in the container


def superlink_command(state: Path, host: str) -> list[str]:
    """Make or check the deployment in the volume ``state``; build the command of its SuperLink.

    ``host`` is HOST or HOST:PORT, by which hospitals reach the server.

    Raises:
        FedsiloError: the volume, the host, or a certificate or key cannot be used.
    """
    deployment = _deployment(check_writable_folder(state, "state directory").resolve(), host)
    make_secrets(deployment)
    check_certificate(deployment.secrets / "ca.crt")
    own = check_certificate(deployment.secrets / "server.crt")
    check_matching_key(deployment.secrets / "server.key", own)
    deployment.write_connection()
    # A run reads a registry even before the first hospital has joined
    deployment.write_registry()
    return [*deployment.superlink_command(), "--health-server-address", HEALTH_ADDRESS]


def _deployment(state: Path, host: str) -> Deployment:
    """Return the deployment in the volume ``state``; the first start makes it.

    Raises:
        Refused: there is no host, or the deployment was made for another one.
    """
    if not host:
        raise Refused("FEDSILO_HOST is not set", "give the name by which hospitals reach it")
    address = hospital_address(host)
    if not is_deployment(state):
        made = plan(state, [], [_CONTROL, _FLEET], {}, address)
        prepare(made)
        return made
    found = read_deployment(state)
    # Its certificate and the kits name the old address, so hospitals would not reach the new one
    if found.address != address:
        fault = f"FEDSILO_HOST is {address}, but the deployment in {state} has {found.address}"
        raise Refused(fault, "its certificate and kits have that name: use it, or a new volume")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the server, or print its command with ``--print``."""
    parser = argparse.ArgumentParser(prog="start_server.py", description=__doc__)
    parser.add_argument("--state-dir", type=Path, default=Path("/state"))
    parser.add_argument("--print", action="store_true", help="print the command, start nothing")
    parser.add_argument("--keep-trying", action="store_true", help="after a fault, try again")
    given = parser.parse_args(arguments)
    host = os.environ.get("FEDSILO_HOST", "")
    return checks.start(
        "server",
        lambda: superlink_command(given.state_dir, host),
        show=given.print,
        keep_trying=given.keep_trying,
    )


if __name__ == "__main__":
    sys.exit(main())
