"""Who must not get in does not, and is named in a log."""

import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from fedsilo.cli.main import main
from fedsilo.core.processes import RUN_MARK, end_trees, free_ports, tool
from fedsilo.deployment.certificates import make_authority, make_hospital_key
from fedsilo.deployment.commands import up
from fedsilo.deployment.deployment import (
    FEDERATION,
    SERVER,
    DeploymentError,
    read_deployment,
)
from fedsilo.deployment.flower_commands import flwr

SITES = 2
_LIMIT = 60.0  # seconds until a refusal is in a log
_UNKNOWN = "No SuperNode found with the given public key"


def _secrets(folder: Path) -> Path:
    """Make the secrets of another federation: another authority, keys that nobody registered."""
    other = folder / "other"
    make_authority(other)
    private, _ = make_hospital_key()
    (other / "stranger.key").touch(mode=0o600)
    (other / "stranger.key").write_bytes(private)
    return other


def _there(folder: Path) -> int:
    """Return how many SuperNodes the server sees, whoever they are."""
    nodes = flwr(read_deployment(folder), "supernode", "list", FEDERATION)["nodes"]
    return sum(node["status"] == "online" for node in nodes)


def _tried(folder: Path, scratch: Path, options: Sequence[str], refused: str) -> str:
    """Start a SuperNode with ``options``, wait for ``refused`` in its log; return the log."""
    deployment = read_deployment(folder)
    port = str(free_ports(1)[0])
    command = [
        *(tool("flower-supernode"), "--superlink", f"127.0.0.1:{deployment.ports['fleet']}"),
        *("--port", port, "--node-config", 'site="stranger"', *options),
    ]
    log = scratch / "stranger.log"
    home = folder / "strangers" / scratch.name  # in the folder whose processes end with the tests
    environment = deployment.environment(SERVER) | {RUN_MARK: str(home)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        limit = time.monotonic() + _LIMIT
        while not re.search(refused, log.read_text()) and time.monotonic() < limit:
            time.sleep(0.2)
        assert _there(folder) == SITES, "nobody came in, and nobody was driven out"
        return log.read_text()
    finally:
        if process.poll() is None:
            end_trees([psutil.Process(process.pid)])
        process.wait()


@pytest.mark.parametrize(
    ("stranger", "refused", "named"),
    [
        ("plain text", "Connection attempt failed", ""),
        ("no authority", "CERTIFICATE_VERIFY_FAILED", ""),
        ("other authority", "CERTIFICATE_VERIFY_FAILED", ""),
        ("no key", "must be registered via the CLI", "Attempted to register SuperNode"),
        ("unregistered key", "Failed to activate SuperNode", _UNKNOWN),
    ],
)
def test_a_stranger_is_refused(
    stranger: str, refused: str, named: str, folder: Path, tmp_path: Path
) -> None:
    deployment = read_deployment(folder)
    other, own = _secrets(tmp_path), deployment.secrets
    key = ("--auth-supernode-private-key", str(other / "stranger.key"))
    options = {
        "plain text": ("--insecure",),
        "no authority": key,
        "other authority": ("--root-certificates", str(other / "ca.crt"), *key),
        "no key": ("--root-certificates", str(own / "ca.crt")),
        "unregistered key": ("--root-certificates", str(own / "ca.crt"), *key),
    }[stranger]
    since = len(deployment.log(SERVER).read_text())
    log = _tried(folder, tmp_path, options, refused)
    assert re.search(refused, log), log
    assert named in deployment.log(SERVER).read_text()[since:]


def test_the_logs_show_no_secret(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secrets = [path.read_text() for path in (folder / "secrets").glob("*.key")]
    lines = {line for text in secrets for line in text.splitlines() if "-----" not in line}
    assert main(["deploy", "logs", "--lines", "100000", "--deployment", str(folder)]) == 0
    printed = capsys.readouterr().out + (folder / "deployment.json").read_text()
    assert "Flower" in printed
    assert not [line for line in lines if len(line) > 20 and line in printed]
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder / "secrets").glob("*.key"))


def test_a_site_that_is_revoked_while_it_is_connected_is_shut_out(folder: Path) -> None:
    deployment = read_deployment(folder)
    site = deployment.sites[-1]
    since = len(deployment.log(site).read_text())
    flwr(deployment, "supernode", "unregister", deployment.nodes[site], FEDERATION)
    assert _there(folder) == SITES - 1
    limit = time.monotonic() + _LIMIT
    while deployment.process(site) and time.monotonic() < limit:
        time.sleep(0.5)
    assert deployment.process(site) is None, deployment.log(site).read_text()[since:]
    with pytest.raises(DeploymentError, match="ended at its start"):
        up(folder, None, {}, print)
    assert _UNKNOWN in deployment.log(SERVER).read_text()
