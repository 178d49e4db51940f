"""Register, revoke and list hospitals, inside the server's container.

``register NAME`` reads the hospital's public key from standard input. Flower's own list has node
numbers only, so the state volume keeps a file per hospital with its node number and key, and for
all of them ``registry.json``, with which the server refuses a hospital that uses another's name.
"""

import argparse
import base64
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsilo.server_app.doctor.findings import Refused

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # as datasets/silo/declared_silos.py has it


def register(folder: Path, name: str, public_key: str) -> str:
    """Register a hospital's key at the SuperLink, and return a line that says so."""
    card = folder / f"{name}.json"
    if not public_key.startswith("ecdsa-sha2-nistp384 "):
        raise Refused(f"{name}: standard input holds no EC P-384 public key of OpenSSH form")
    key = " ".join(public_key.split()[:2])
    _fingerprint(key)
    if card.exists():
        if _known(folder, name)["key"] != key:
            raise Refused(f"{name} is registered with another key: revoke it first")
        return f"{name} is registered already"
    for other in _cards(folder):
        if _known(folder, other)["key"] == key:
            raise Refused(f"{name}: its key is {other}'s: each hospital needs its own")
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / f"{name}.pub"
    file.write_text(key + "\n", encoding="ascii")
    try:
        node = _flwr("register", str(file), "--name", name)["node-id"]
    except Refused as error:
        if "in use" not in str(error):
            raise
        hint = "an earlier registration of it was cut short: give the hospital another key"
        raise Refused(f"{error}; {hint} (make-secrets.sh --add-hospital)") from None
    finally:
        file.unlink()
    draft = folder / f"{name}.draft"
    draft.write_text(json.dumps({"node": str(node), "key": key}), encoding="ascii")
    draft.rename(card)
    return f"{name} is registered as node {node}"


def revoke(folder: Path, name: str) -> str:
    """Exclude a hospital for good, and return a line that says so."""
    node = _known(folder, name)["node"]
    _flwr("unregister", node)
    (folder / f"{name}.json").unlink()
    return f"{name} is revoked, node {node}"


def listing(folder: Path) -> str:
    """Return a line for each registered hospital: its name, node number and state."""
    said = _flwr("list")
    found = {node["node-id"]: node["status"] for node in said["nodes"]}
    states = {node: status for node, status in found.items() if status != "unregistered"}
    nodes = {name: _known(folder, name)["node"] for name in _cards(folder)}
    nodes |= {f"(no name, {node})": node for node in states.keys() - set(nodes.values())}
    lines = (f"{name} {nodes[name]} {states.get(nodes[name], 'unknown')}" for name in sorted(nodes))
    return "\n".join(lines)


def write_registry(state: Path) -> None:
    """Write which key belongs to which site, where the server's runs read it."""
    folder = state / "hospitals"
    cards = {name: _known(folder, name) for name in sorted(_cards(folder))}
    entries = {
        name: {"node-id": card["node"], "key": _fingerprint(card["key"])}
        for name, card in cards.items()
    }
    draft = state / "registry.draft"
    draft.write_text(json.dumps(entries, indent=2) + "\n", encoding="ascii")
    draft.rename(state / "registry.json")


def _cards(folder: Path) -> list[str]:
    return [card.stem for card in folder.glob("*.json")]


def _fingerprint(key: str) -> str:
    """Return a public key's fingerprint, as ``ssh-keygen -l`` says it."""
    try:
        blob = base64.b64decode(key.split()[1], validate=True)
    except (ValueError, IndexError) as error:
        raise Refused("a public key is damaged: it is no base64") from error
    return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


def _known(folder: Path, name: str) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads((folder / f"{name}.json").read_text(encoding="ascii"))
    except FileNotFoundError as error:
        raise Refused(f"{name} is not registered") from error
    except ValueError as error:
        message = f"{folder / name}.json is damaged: remove it, and revoke its node by 'flwr'"
        raise Refused(message) from error
    return found


def _flwr(*arguments: str) -> dict[str, Any]:
    """Return what a ``flwr supernode`` command answers in JSON."""
    command = ["flwr", "supernode", *arguments, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        said: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        said = {"error-message": (done.stdout + done.stderr)[-300:]}
    if not said.get("success"):
        message = " ".join(str(said.get("error-message", said)).split())
        raise Refused(f"flwr supernode {arguments[0]}: {message}")
    return said


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; return 2 after a line on standard error if it is refused."""
    parser = argparse.ArgumentParser(prog="hospitals.py", description=__doc__)
    parser.add_argument("action", choices=["register", "revoke", "list"])
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--state-dir", type=Path, default=Path("/state"))
    given = parser.parse_args(arguments)
    folder = given.state_dir / "hospitals"
    try:
        if given.action == "list":
            print(listing(folder))
            return 0
        if not _NAME.fullmatch(given.name):
            raise Refused(f"'{given.name}' is no hospital's name")
        if given.action == "register":
            print(register(folder, given.name, sys.stdin.read()))
        else:
            print(revoke(folder, given.name))
        write_registry(given.state_dir)
    except Refused as error:
        print(f"hospitals: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
