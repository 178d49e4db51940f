"""Entry point of a hospital's image: open its kit, check it, and become the hospital's node.

The kit is a secret of the container. Data and the hospital's own site file are mounted. Device and
trust come from the environment (``FEDSILO_DEVICE``, ``FEDSILO_TRUST``); if the site file has a
level of trust too, the stricter one holds. Whoever starts the container confirms the rules that its
log shows.

``FEDSILO_DATA_FROM`` is the host's folder of data. If it is empty, none was given, and the hospital
answers only runs whose data set needs no files.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import checks
from health import HEALTH_ADDRESS

from fedsilo.client_app.privacy.signing import own_code
from fedsilo.deployment.doctor.hospital_checks import (
    HospitalRequest,
    lock_and_build_command,
    prepare_node,
    refuse_failing,
)
from fedsilo.deployment.doctor.machine import (
    check_data_folder,
    check_writable_folder,
    has_site_file,
)
from fedsilo.deployment.doctor.site import SiteSetup
from fedsilo.deployment.options import HospitalOptions
from fedsilo.deployment.rules import SITE

_NO_DATA = (
    "no data folder is mounted (DATA_1 .. of compose): this hospital answers only runs whose data "
    "set needs no files, such as digits"
)


def supernode_command(given: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """Open and check the kit, and build the command that starts the node.

    Args:
        given: the arguments of the command line, as ``main`` parses them.
        environment: the variables of the container, such as FEDSILO_TRUST.

    Raises:
        FedsiloError: the kit, the rules, a folder or the server cannot be used.
    """
    trust = environment.get("FEDSILO_TRUST", "")
    node = {
        "device": environment.get("FEDSILO_DEVICE") or "auto",
        "state-dir": str(given.state_dir),
        "cache-dir": str(check_writable_folder(given.cache_dir, "cache directory")),
    }
    if _has_data(given.data_dir, environment):
        node["data-dir"] = str(given.data_dir)
    else:
        _show([_NO_DATA])
    own = None
    if has_site_file(given.site_file):
        own = given.site_file
    home = check_writable_folder(given.state_dir, "state directory") / "hospital"
    options: HospitalOptions = {"folder": home, "trust": trust}
    # An existing site file stays as it is. FEDSILO_TRUST then goes to the node config, and the
    # stricter of both levels holds
    if own is not None or (home / SITE).exists():
        options["trust"] = ""
        if trust:
            node["trust"] = trust
    options["node_config"] = [f"{key}={json.dumps(value)}" for key, value in node.items()]
    request = HospitalRequest(given.kit, options, own)
    check_setup = refuse_failing
    if given.print:
        check_setup = _check_data
    setup = prepare_node(request, _show, check_setup)
    _show([f"{setup.name}: signs secure sums with key {own_code(setup.own_folder)}"])
    # Flower's SuperNode becomes this process, and keeps the lock of the hospital's folder
    return lock_and_build_command(setup, HEALTH_ADDRESS, is_shown=given.print)


def _has_data(folder: Path, environment: Mapping[str, str]) -> bool:
    """Return whether the hospital has a data folder: one that was named, or one with content.

    A named folder may be empty, because Docker makes an empty one for a mistyped path. The doctor
    then refuses it. Without the variable, as in Kubernetes, a folder is always needed.
    """
    if environment.get("FEDSILO_DATA_FROM", "?"):
        return True
    return folder.is_dir() and next(folder.iterdir(), None) is not None


def _check_data(setup: SiteSetup) -> None:
    """Check the data folder only, because ``--print`` must work without a server."""
    folder = setup.folder("data-dir")
    if folder:
        check_data_folder(folder)


def _show(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        print(sentence, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the hospital's node, or print its command with ``--print``."""
    parser = argparse.ArgumentParser(prog="start_hospital.py", description=__doc__)
    parser.add_argument("--kit", type=Path, default=Path("/run/secrets/kit.zip"))
    parser.add_argument("--data-dir", type=Path, default=Path("/data"))
    parser.add_argument("--state-dir", type=Path, default=Path("/state"))
    parser.add_argument("--cache-dir", type=Path, default=Path("/cache"))
    parser.add_argument("--site-file", type=Path, default=Path("/etc/fedsilo/site.yaml"))
    parser.add_argument("--print", action="store_true", help="print the command, ask no server")
    parser.add_argument("--keep-trying", action="store_true", help="after a fault, try again")
    given = parser.parse_args(arguments)
    return checks.start(
        "hospital",
        lambda: supernode_command(given, os.environ),
        show=given.print,
        keep_trying=given.keep_trying,
    )


if __name__ == "__main__":
    sys.exit(main())
