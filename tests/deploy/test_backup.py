"""A server dies; a backup made while it ran is restored elsewhere, and the run ends alike."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from fedsilo.cli.main import main
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import SERVER, read_deployment
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.deployed import ended_with_tests, kill, run_deployed, run_options

SITES = 2
_LIMIT = 120.0  # seconds until two rounds are over


def test_a_run_of_a_dead_server_goes_on_elsewhere_to_the_same_bytes(
    folder: Path,
    begin: Callable[..., subprocess.Popen[str]],
    tiny: Callable[..., dict[str, Value]],
    inline_run: Callable[..., RunDirectory],
    tmp_path: Path,
) -> None:
    deployment = read_deployment(folder)
    # Its sites keep state, which must not be ahead of the server's checkpoint by two rounds
    values = tiny("fedevprompt", silos=SITES, rounds=6)
    process = begin(values, "hearts")
    run = RunDirectory(deployment.runs / "hearts")
    limit = time.monotonic() + _LIMIT
    while not list(run.checkpoints.glob("round-000002*")) and time.monotonic() < limit:
        time.sleep(0.05)
    secret, backup, new = tmp_path / "secret", tmp_path / "backup", tmp_path / "new"
    secret.write_text("correct horse battery")
    secret.chmod(0o600)
    words = ("--passphrase-file", str(secret), "--deployment")
    assert main(["deploy", "backup", str(backup), *words, str(folder)]) == 0
    assert process.poll() is None, "the backup was made after the run"
    for member in (SERVER, *deployment.sites):
        kill(deployment, member)
    process.communicate(timeout=_LIMIT)
    assert process.returncode
    assert main(["deploy", "restore", str(backup), *words, str(new)]) == 0
    restored = RunDirectory(read_deployment(new).runs / "hearts")
    before = len(list(restored.checkpoints.glob("*")))
    with ended_with_tests(new):
        try:
            assert main(["deploy", "up", "--deployment", str(new)]) == 0
            options = run_options(new, values, "hearts")
            assert main([*options, "--set", "run.resume=true"]) == 0
            # A new run of the same hospitals works too
            assert run_deployed(new, tiny("fedavg", silos=SITES, rounds=1), "again")[0] == 0
        finally:
            assert main(["deploy", "down", "--deployment", str(new)]) == 0
    assert before
    simulated = inline_run(values, SITES)
    for file in ("metrics.csv", "model.safetensors"):
        found, expected = restored.path / file, simulated.path / file
        assert found.is_file() == expected.is_file()
        if expected.is_file():
            assert found.read_bytes() == expected.read_bytes()
