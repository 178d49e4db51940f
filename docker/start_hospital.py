"""Entry point of a hospital's image: check what was mounted, then become the hospital's node.

The node is Flower's SuperNode and a worker, which executes the image's own fedsilo only. The site's
name, the server's address and the device come from the environment (``FEDSILO_SITE``,
``FEDSILO_SERVER``, ``FEDSILO_DEVICE``, ``FEDSILO_TRUST``), secrets only from files.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import checks
from health import HEALTH_ADDRESS

from fedsilo.server_app.doctor.findings import Refused
from fedsilo.server_app.doctor.secrets import (
    OPENSSH_KEY,
    certificate,
    data_folder,
    secret,
    site_file,
    writable_folder,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}")
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")
_TRUST = re.compile(r"server|sums|nobody")


def supernode_command(given: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """Return the command that starts the SuperNode and its worker, or raise ``Refused``."""
    site = _variable(environment, "FEDSILO_SITE", "", _NAME, "this hospital's name")
    server = _variable(environment, "FEDSILO_SERVER", "server:9092", _ADDRESS, "host:port")
    device = _variable(environment, "FEDSILO_DEVICE", "auto", _DEVICE, "auto, cpu or cuda")
    key = secret(given.secrets / "node.key", OPENSSH_KEY, private=True)
    node = {
        "site": site,
        "data-dir": data_folder(given.data_dir),
        "state-dir": writable_folder(given.state_dir, "state directory"),
        "cache-dir": writable_folder(given.cache_dir, "cache directory"),
        "device": device,
    }
    if (registry := given.secrets / "registry.json").is_file():
        node |= {"signing-key": str(key), "site-registry": str(registry)}
    if environment.get("FEDSILO_TRUST"):
        node["trust"] = _variable(environment, "FEDSILO_TRUST", "", _TRUST, _TRUST.pattern)
    if site_file(given.site_file):
        node["site-file"] = given.site_file
    authority = certificate(given.secrets / "ca.crt")
    if not given.print:
        checks.refuse_untrusted(server, authority)
    return [
        *("python", "-m", "fedsilo.client_app.worker.hospital"),
        *("--superlink", server),
        *("--root-certificates", str(authority)),
        *("--auth-supernode-private-key", str(key)),
        *("--node-config", " ".join(f'{name}="{value}"' for name, value in node.items())),
        *("--health-server-address", HEALTH_ADDRESS),
    ]


def _variable(
    environment: Mapping[str, str], key: str, default: str, form: re.Pattern[str], what: str
) -> str:
    value = environment.get(key, "") or default
    if not value:
        raise Refused(f"{key} is not set: give {what}")
    if not form.fullmatch(value):
        raise Refused(f"{key} is '{value}': give {what}")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the hospital's node, or print its command with ``--print``."""
    parser = argparse.ArgumentParser(prog="start_hospital.py", description=__doc__)
    parser.add_argument("--secrets", type=Path, default=Path("/run/secrets"))
    parser.add_argument("--data-dir", type=Path, default=Path("/data"))
    parser.add_argument("--state-dir", type=Path, default=Path("/state"))
    parser.add_argument("--cache-dir", type=Path, default=Path("/cache"))
    parser.add_argument("--site-file", type=Path, default=Path("/etc/fedsilo/site.yaml"))
    parser.add_argument("--print", action="store_true", help="print the command, start nothing")
    given = parser.parse_args(arguments)
    return checks.start("hospital", lambda: supernode_command(given, os.environ), given.print)


if __name__ == "__main__":
    sys.exit(main())
