"""An upgrade, a hospital's move, a dead server and its restoration, in one run of three hospitals.

The commands are those of docs/operations.md, in the same order. Server and hospitals run by the
commands of their units and are restarted as systemd would do it.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from fedsilo.cli.main import main
from fedsilo.client_app.site.node import OWN
from fedsilo.core.processes import app_folder, end_trees, free_ports
from fedsilo.core.settings_schema import Value
from fedsilo.core.versions import FEDSILO
from fedsilo.deployment.deployment import SERVER, DeploymentError, read_deployment
from fedsilo.deployment.flower_commands import list_online_sites
from fedsilo.deployment.options import ServiceOptions
from fedsilo.deployment.service.units import build_hospital_unit, build_server_unit
from fedsilo.deployment.worker.installed import ROOMS
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.deploy.conftest import LOW, _give_seed
from tests.support.deployed import ended_with_tests, kill, run_options
from tests.support.releases import write_release

pytestmark = pytest.mark.skipif(
    os.environ.get("FEDSILO_DEPLOY") != "1", reason="takes minutes: make test-deploy"
)
SITES = ("s1a", "s2a", "s3a")  # silos of the digits
PATCH = f"{FEDSILO.rpartition('.')[0]}.99"
ROUNDS = 14
_LIMIT = 900.0  # seconds; on two busy cores a command takes half a minute
_CONFIG = [f"{key}={json.dumps(value)}" for key, value in LOW.items()]


@dataclass
class Machine:
    """A machine that runs one unit: its folder, and the checkout that is installed there."""

    folder: Path
    code: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None
    command: Sequence[str] = ()  # that of the last start

    def start(self, command: Sequence[str]) -> None:
        """Start the unit's command with the machine's checkout."""
        self.folder.mkdir(exist_ok=True)
        self.command = command
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=_environment(self.code), stdout=log, stderr=log
            )

    def stop(self) -> None:
        """End the unit and what it started, as ``systemctl stop`` does."""
        if self.process:
            if self.process.poll() is None:
                end_trees([psutil.Process(self.process.pid)])
            self.process.wait()
        self.process = None

    def ended(self) -> bool:
        """Return whether the unit has ended by itself, so that systemd would start it again."""
        return self.process is not None and self.process.poll() is not None


def _environment(code: Path) -> Mapping[str, str]:
    own = {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1", "NO_COLOR": "1"}
    return os.environ | own


def _fedsilo(code: Path, *words: str) -> subprocess.Popen[str]:
    """Start a command of the fedsilo in a checkout."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedsilo.cli", *words],
        cwd=code,
        env=_environment(code),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _done(code: Path, *words: str) -> str:
    """Return what a command printed that must succeed."""
    process = _fedsilo(code, *words)
    printed, _ = process.communicate(timeout=_LIMIT)
    assert process.returncode == 0, printed
    return printed


def _wait(condition: Callable[[], bool], *logs: Path) -> None:
    limit = time.monotonic() + _LIMIT
    while not condition():
        assert time.monotonic() < limit, [log.read_text()[-4000:] for log in logs]
        time.sleep(0.2)


@pytest.fixture
def patch(tmp_path: Path) -> Path:
    """Return a checkout of the next patch release, which changes no compared file."""
    app = tmp_path / "patch"
    for room in (*ROOMS, "fedsilo"):
        if (app_folder() / room).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(app_folder() / room, app / room, ignore=ignored)
    for name in ("pyproject.toml", "simulation.yaml", "README.md", "LICENSE"):
        shutil.copy(app_folder() / name, app)
    write_release(PATCH, app)
    page = app / "fedsilo" / "reports" / "clinic.py"
    page.write_text(f"{page.read_text()}\n# Reworded\n")
    return app


@pytest.fixture
def hospitals(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    """Return the machines of the three hospitals; what runs there is ended."""
    machines = {}
    for site in SITES:
        log = tmp_path / f"{site}.log"
        machines[site] = Machine(tmp_path / f"at-{site}", app_folder(), log)
    with ended_with_tests(tmp_path):
        try:
            yield machines
        finally:
            for machine in machines.values():
                machine.stop()


def _unit_command(machine: Machine) -> Sequence[str]:
    options: ServiceOptions = {"device": "cpu", "node_config": _CONFIG}
    return build_hospital_unit(machine.folder, options).command


def _restarted(
    hospitals: Mapping[str, Machine], condition: Callable[[], bool]
) -> Callable[[], bool]:
    """Return a condition before which units that ended by themselves are started again.

    A hospital that ended while the server was down is online for the server for a minute more, and
    its next start is refused until then.
    """

    def kept() -> bool:
        for machine in hospitals.values():
            if machine.ended():
                time.sleep(1.0)
                machine.start(machine.command)
        return condition()

    return kept


def _all_online(folder: Path, hospitals: Mapping[str, Machine]) -> Callable[[], bool]:
    """Return a condition: all hospitals are online."""

    def online() -> bool:
        try:
            return list_online_sites(read_deployment(folder)) == list(SITES)
        except DeploymentError:  # the server has just been started
            return False

    return online


def _verify(words: Sequence[str], folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Let systemd verify the unit that a command prints."""
    analyze = shutil.which("systemd-analyze")
    capfd.readouterr()
    assert main([*words, "--user", "fedsilo"]) == 0
    path = folder / "fedsilo-one.service"
    path.write_text(capfd.readouterr().out)
    if analyze:
        command = [analyze, "verify", "--recursive-errors=no", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_an_upgrade_a_move_a_dead_server_and_its_restoration_change_no_bit(
    patch: Path,
    hospitals: dict[str, Machine],
    tiny: Callable[..., dict[str, Value]],
    inline_run: Callable[..., RunDirectory],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    old, folder, new = app_folder(), tmp_path / "server" / "hearts", tmp_path / "spare" / "hearts"
    logs = [machine.log for machine in hospitals.values()]
    server = Machine(folder, patch, tmp_path / "server.log")
    folder.parent.mkdir()
    values = tiny("fedavg", silos=3, rounds=ROUNDS)
    run = RunDirectory(folder / "server" / "runs" / "hearts")

    def reached(of: RunDirectory, round_: int) -> Callable[[], bool]:
        return lambda: any(of.checkpoints.glob(f"round-{round_:06d}*"))

    with ended_with_tests(folder), ended_with_tests(new):
        try:
            # A server, three kits, three hospitals, each started by hand once
            host = f"localhost:{free_ports(1)[0]}"
            _done(old, "deploy", "up", "--host", host, "--deployment", str(folder))
            _done(old, "deploy", "add", *SITES, "--deployment", str(folder))
            for site, machine in hospitals.items():
                kit = shutil.copy(folder / "kits" / f"{site}.zip", tmp_path)
                words = ["hospital", "start", str(kit), "--folder", str(machine.folder)]
                words += ["--trust", "server", "--yes", "--device", "cpu"]
                for entry in _CONFIG:
                    words += ["--node-config", entry]
                machine.start([sys.executable, "-m", "fedsilo.cli", *words])
            _wait(_all_online(folder, hospitals), *logs)
            for site, machine in hospitals.items():
                _give_seed(machine.folder / "state" / OWN / site)
            # The units of server and hospital are such as systemd takes
            _verify(["deploy", "service", "--deployment", str(folder)], tmp_path, capfd)
            _verify(["hospital", "service", str(hospitals["s1a"].folder)], tmp_path, capfd)

            options = run_options(folder, values, "hearts")
            process = _fedsilo(old, *options)
            _wait(reached(run, 2), *logs)

            # Upgrade: the server and s1a take the patch release, s3a is late; s2a moves its folder
            _done(old, "deploy", "down", "--deployment", str(folder))
            printed, _ = process.communicate(timeout=_LIMIT)
            assert process.returncode, printed
            server.start(build_server_unit(read_deployment(folder), {}).command)
            hospitals["s1a"].stop()
            hospitals["s1a"].code = patch
            hospitals["s1a"].start(_unit_command(hospitals["s1a"]))
            moved = hospitals["s2a"]
            moved.stop()
            before = moved.folder
            moved.folder = tmp_path / "moved-s2a"
            shutil.copytree(before, moved.folder, symlinks=True)
            shutil.rmtree(before)
            # By hand once, because whoever brings a folder brings its rules and keys
            start = ["hospital", "start", str(moved.folder), "--yes", "--device", "cpu"]
            for entry in _CONFIG:
                start += ["--node-config", entry]
            moved.start([sys.executable, "-m", "fedsilo.cli", *start])
            _wait(_restarted(hospitals, _all_online(folder, hospitals)), server.log, *logs)
            resumed = _fedsilo(patch, *options, "--set", "run.resume=true")
            _wait(_restarted(hospitals, reached(run, 6)), server.log, *logs)

            # A backup while the run goes on; then the server dies
            secret, backup = tmp_path / "passphrase", tmp_path / "monday.backup"
            secret.write_text("correct horse battery")
            secret.chmod(0o600)
            words = ("--passphrase-file", str(secret), "--deployment")
            _done(patch, "deploy", "backup", str(backup), *words, str(folder))
            assert resumed.poll() is None, "the backup was made after the run"
            kill(read_deployment(folder), SERVER)
            printed, _ = resumed.communicate(timeout=_LIMIT)
            assert resumed.returncode
            said = "".join(printed.split())
            assert f"fedsilo{FEDSILO}isnow{PATCH}" in said, printed
            assert f"othersoftwarethanbeforeats1a:fedsilo{FEDSILO}isnow{PATCH}" in said, printed
            server.stop()
            folder.rename(tmp_path / "dead")

            # Restored elsewhere, the run goes on to its end
            new.parent.mkdir()
            _done(patch, "deploy", "restore", str(backup), *words, str(new))
            _done(patch, "deploy", "up", "--deployment", str(new))
            _wait(_restarted(hospitals, _all_online(new, hospitals)), *logs)
            again = run_options(new, values, "hearts")
            _done(patch, *again, "--set", "run.resume=true")
            restored = RunDirectory(read_deployment(new).runs / "hearts")
        finally:
            server.stop()
            for where in (folder, new):
                if where.is_dir():
                    main(["deploy", "down", "--deployment", str(where)])
    simulated = inline_run(values, 3)
    for name in ("metrics.csv", "model.safetensors"):
        assert (restored.path / name).read_bytes() == (simulated.path / name).read_bytes()
    # Each hospital's audit log is whole, also that of the one that moved, and names the run
    for site, machine in hospitals.items():
        log = machine.folder / "state" / OWN / site / "audit.jsonl"
        capfd.readouterr()
        assert main(["audit", str(log), "--run", "hearts", "--json"]) == 0
        document = json.loads(capfd.readouterr().out)
        assert document["breaks"] == []
        assert json.loads(log.read_text().splitlines()[0])["run"] == "hearts"
