"""Who must not get in does not, and is named in a log."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from server_app.cli import main
from server_app.deploy import online
from server_app.deployment import SERVER, read_deployment
from server_app.processes import app_folder, end_trees, free_ports, tool

SITES = 2
_LIMIT = 60.0  # seconds until a refusal is in a log
_PLAIN = ("--insecure",)


def _secrets(folder: Path) -> Path:
    """Make the secrets of another federation: another authority, keys that nobody registered."""
    script = str(app_folder() / "docker" / "make-secrets.sh")
    names = ("--host", "localhost", "--hospital", "stranger")
    subprocess.run(
        ["bash", script, "--out", str(folder / "other"), *names], check=True, capture_output=True
    )
    return folder / "other"


def _tried(folder: Path, scratch: Path, options: Sequence[str], refused: str) -> str:
    """Start a SuperNode with ``options``, wait for ``refused`` in its log; return the log."""
    deployment = read_deployment(folder)
    port = str(free_ports(1)[0])
    command = [
        *(tool("flower-supernode"), "--superlink", f"127.0.0.1:{deployment.ports['fleet']}"),
        *("--port", port, "--node-config", 'site="stranger"', *options),
    ]
    log = scratch / "stranger.log"
    environment = deployment.environment(SERVER) | {"FLWR_HOME": str(scratch / "flwr")}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        limit = time.monotonic() + _LIMIT
        while not re.search(refused, log.read_text()) and time.monotonic() < limit:
            time.sleep(0.2)
        assert online(deployment) == deployment.sites, "the sites stay"
        return log.read_text()
    finally:
        if process.poll() is None:
            end_trees([psutil.Process(process.pid)])
        process.wait()


@pytest.mark.parametrize(
    ("stranger", "refused"),
    [
        ("plain text", r"onnection|UNAVAILABLE|closed"),
        ("no authority", r"CERTIFICATE_VERIFY_FAILED|UNAVAILABLE|onnection"),
        ("other authority", r"CERTIFICATE_VERIFY_FAILED|UNAVAILABLE|onnection"),
        ("no key", r"UNAUTHENTICATED|PERMISSION_DENIED|[Aa]uth"),
        ("unregistered key", r"UNAUTHENTICATED|PERMISSION_DENIED|[Aa]uth"),
    ],
)
def test_a_stranger_is_refused(stranger: str, refused: str, folder: Path, tmp_path: Path) -> None:
    other, own = _secrets(tmp_path), read_deployment(folder).secrets
    key = ("--auth-supernode-private-key", str(other / "stranger.key"))
    options = {
        "plain text": (*_PLAIN, *key),
        "no authority": key,
        "other authority": ("--root-certificates", str(other / "ca.crt"), *key),
        "no key": ("--root-certificates", str(own / "ca.crt")),
        "unregistered key": ("--root-certificates", str(own / "ca.crt"), *key),
    }[stranger]
    log = _tried(folder, tmp_path, options, refused)
    assert re.search(refused, log), log


def test_a_revoked_key_no_longer_opens(folder: Path, tmp_path: Path) -> None:
    deployment = read_deployment(folder)
    other, federation = _secrets(tmp_path), "fedsilo"
    environment = deployment.environment(SERVER)

    def flwr(*arguments: str) -> str:
        done = subprocess.run(
            [tool("flwr"), "supernode", *arguments, "--format", "json"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    told = flwr("register", str(other / "stranger.pub"), federation)
    node = re.search(r'"node-id": "?(\d+)', told)
    assert node, told
    assert '"success": true' in flwr("unregister", node[1], federation)
    key = ("--auth-supernode-private-key", str(other / "stranger.key"))
    refused = r"UNAUTHENTICATED|PERMISSION_DENIED|[Aa]uth"
    log = _tried(
        folder, tmp_path, ("--root-certificates", str(deployment.secrets / "ca.crt"), *key), refused
    )
    assert re.search(refused, log), log


def test_the_logs_show_no_secret(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secrets = [path.read_text() for path in (folder / "secrets").glob("*.key")]
    lines = {line for text in secrets for line in text.splitlines() if "-----" not in line}
    assert main(["deploy", "logs", "--lines", "100000", "--dir", str(folder)]) == 0
    printed = capsys.readouterr().out + (folder / "deployment.json").read_text()
    assert "Flower" in printed
    assert not [line for line in lines if len(line) > 20 and line in printed]
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder / "secrets").glob("*.key"))
