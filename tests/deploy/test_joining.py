"""Three hospitals join a server that runs, one is revoked and one gets a new key, by commands."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedsilo.cli.main import main
from fedsilo.core.processes import app_folder, free_ports
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import FEDERATION, read_deployment
from fedsilo.deployment.flower_commands import flwr, list_online_sites
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.deploy.conftest import LOW
from tests.support.deployed import ended_with_tests

pytestmark = pytest.mark.skipif(
    os.environ.get("FEDSILO_DEPLOY") != "1", reason="takes minutes: make test-deploy"
)
SITES = ("s1a", "s2a", "s3a")  # silos of the digits
_LIMIT = 240.0  # seconds until a hospital is online, or gone


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start a server for hospitals of other machines, without any."""
    where = tmp_path_factory.mktemp("joining") / "deployment"
    host = f"localhost:{free_ports(1)[0]}"
    with ended_with_tests(where):
        try:
            assert main(["deploy", "up", "--host", host, "--deployment", str(where)]) == 0
            yield where
        finally:
            assert main(["deploy", "down", "--deployment", str(where)]) == 0


@pytest.fixture
def deploy(folder: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command on the deployment, and returns what it printed."""

    def run(*words: str, code: int = 0) -> str:
        assert main(["deploy", *words, "--deployment", str(folder)]) == code
        said = capfd.readouterr()
        return said.err if code else said.out

    return run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts a hospital by its kit; what still runs is ended."""
    started: list[subprocess.Popen[str]] = []
    command = [sys.executable, "-m", "fedsilo.cli", "hospital", "start"]

    def run(kit: Path) -> subprocess.Popen[str]:
        words = ["--trust", "server", "--yes", "--device", "cpu"]
        words += ["--node-config", "allow-folds=true"]
        for key, value in LOW.items():
            words += ["--node-config", f"{key}={json.dumps(value)}"]
        log = (tmp_path / "hospitals.log").open("a")
        process = subprocess.Popen(
            [*command, str(kit), *words], cwd=app_folder(), stdout=log, stderr=subprocess.STDOUT
        )
        started.append(process)
        return process

    with ended_with_tests(tmp_path):
        yield run
    for process in started:
        process.wait()


def _wait(condition: Callable[[], bool], log: Path) -> None:
    limit = time.monotonic() + _LIMIT
    while not condition():
        assert time.monotonic() < limit, log.read_text()
        time.sleep(0.5)


def test_three_join_one_is_revoked_and_one_renewed_by_commands_alone(
    folder: Path,
    deploy: Callable[..., str],
    start: Callable[..., subprocess.Popen[str]],
    tiny: Callable[..., dict[str, Value]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    log = tmp_path / "hospitals.log"
    assert "code " in deploy("add", *SITES)
    kits = {}
    for site in SITES:
        kits[site] = Path(shutil.copy(folder / "kits" / f"{site}.zip", tmp_path))
    hospitals = {site: start(kit) for site, kit in kits.items()}
    _wait(lambda: list_online_sites(read_deployment(folder)) == list(SITES), log)

    def run(name: str) -> RunDirectory:
        config = tmp_path / f"{name}.toml"
        values = tiny("fedavg", silos=3, rounds=1) | {"run.min-sites": 2}
        config.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items()))
        deploy("run", "fedavg-digits", "--config", str(config), "--name", name)
        return RunDirectory(read_deployment(folder).runs / name)

    def sites(of: RunDirectory) -> list[str]:
        return sorted(of.read_json("silos.json"))

    assert sites(run("three")) == list(SITES)

    # A second start, at once refused, here and from another folder
    assert main(["hospital", "start", str(kits["s1a"]), "--trust", "server"]) == 1
    assert "s1a already runs from" in capfd.readouterr().err
    elsewhere = ("--folder", str(tmp_path / "elsewhere"))
    assert main(["hospital", "start", str(kits["s1a"]), "--trust", "server", *elsewhere]) == 1
    assert "s1a is already connected to localhost:" in capfd.readouterr().err
    assert not (tmp_path / "elsewhere").exists()

    assert deploy("revoke", "s3a").endswith("s3a is revoked\n")
    hospitals["s3a"].wait(timeout=_LIMIT)
    assert main(["hospital", "start", str(kits["s3a"]), "--trust", "server"]) == 1
    assert "has no registration of this key" in capfd.readouterr().err

    deploy("renew", "s2a")
    hospitals["s2a"].wait(timeout=_LIMIT)
    shutil.copy(folder / "kits" / "s2a.zip", kits["s2a"])
    start(kits["s2a"])
    _wait(lambda: list_online_sites(read_deployment(folder)) == ["s1a", "s2a"], log)
    assert sites(run("two")) == ["s1a", "s2a"]

    # Registered at the SuperLink alone: doctor names the other registration, which is missing
    made = read_deployment(folder)
    public = made.secrets / "stray.pub"
    subprocess.run(
        [*("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", ""), "-f", str(public)[:-4]],
        check=True,
    )
    stray = str(flwr(made, "supernode", "register", str(public), FEDERATION)["node-id"])
    with pytest.raises(SystemExit):
        main(["doctor", "server", "--deployment", str(folder)])
    said = capfd.readouterr().out
    assert f"the SuperLink has registered node {stray}, but the registry has no line for it" in said
