"""Members that are killed, halted, misnamed or full: the run goes on, or stops and resumes."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from fedsilo.cli.main import main
from fedsilo.client_app.site.node import OWN
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import SERVER, Deployment, read_deployment
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.deployed import kill

SITES = 3
HALT = 30.0  # seconds; after 60 without a heartbeat Flower gives a site's message up
_LIMIT = 600.0
Tiny = Callable[..., dict[str, Value]]
InlineRun = Callable[..., RunDirectory]
Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def values(tiny: Tiny) -> dict[str, Value]:
    """Training alone: what a site has learned is in its private state and nowhere else."""
    return tiny("local", silos=SITES, rounds=4, reply_timeout=30.0)  # a phase takes a second


def _training(
    begin: Begin, values: Mapping[str, Value], name: str, site: str, times: int, folder: Path
) -> subprocess.Popen[str]:
    """Start a run and wait until a site has been asked to train so often; return the command."""
    log = read_deployment(folder).log(site)
    since = len(log.read_text())
    process = begin(values, name)
    limit = time.monotonic() + _LIMIT
    while log.read_text()[since:].count("Receiving: train") < times:
        assert time.monotonic() < limit, log.read_text()[since:]
        time.sleep(0.1)
    return process


def _ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    printed, _ = process.communicate(timeout=_LIMIT)
    return process.returncode, printed


def _same(deployment: Deployment, name: str, simulated: RunDirectory) -> None:
    """Hold a deployed run against the simulation, which nothing disturbed."""
    found = RunDirectory(deployment.runs / name)
    assert found.read_json("summary.json")["sites"] == simulated.read_json("summary.json")["sites"]
    assert (found.path / "metrics.csv").read_bytes() == (
        simulated.path / "metrics.csv"
    ).read_bytes()


def test_a_killed_hospital_stops_the_run_by_name_and_comes_back_to_it(
    folder: Path, begin: Begin, values: dict[str, Value], inline_run: InlineRun
) -> None:
    deployment = read_deployment(folder)
    site = deployment.sites[0]
    process = _training(begin, values, "killed", site, 2, folder)
    kill(deployment, site)
    code, printed = _ended(process)
    assert code == 1, printed
    assert f"site {site}, round 2" in printed
    assert "no answer in time" in printed
    assert "--name killed --set run.resume=true" in printed
    assert not (deployment.runs / "killed" / "summary.json").exists()
    assert main(["deploy", "up", "--deployment", str(folder)]) == 0
    code, printed = _ended(begin(values, "killed", "--set", "run.resume=true"))
    assert code == 0, printed
    _same(deployment, "killed", inline_run(values, SITES))


def test_a_run_goes_on_without_a_killed_hospital_if_enough_answer(
    folder: Path, begin: Begin, values: dict[str, Value]
) -> None:
    deployment = read_deployment(folder)
    gone, *stay = deployment.sites
    enough = values | {"run.min-sites": SITES - 1}
    process = _training(begin, enough, "without", gone, 1, folder)
    kill(deployment, gone)
    code, printed = _ended(process)
    assert code == 0, printed
    assert f"continuing without site {gone}: no answer in time" in printed
    assert sorted(RunDirectory(deployment.runs / "without").read_json("summary.json")["sites"]) == (
        stay
    )


def test_a_killed_server_comes_back_with_its_database_and_the_run_resumes(
    folder: Path, begin: Begin, values: dict[str, Value], inline_run: InlineRun
) -> None:
    deployment = read_deployment(folder)
    site = deployment.sites[0]
    process = _training(begin, values, "headless", site, 2, folder)
    kill(deployment, SERVER)
    code, printed = _ended(process)
    assert code == 1, printed
    before = read_deployment(folder)
    assert all(before.process(member) for member in before.sites), "hospitals wait for the server"
    assert main(["deploy", "up", "--deployment", str(folder)]) == 0
    after = read_deployment(folder)
    assert after.nodes == before.nodes, "nobody is registered again"
    assert all(after.started[name] == before.started[name] for name in after.sites)
    code, printed = _ended(begin(values, "headless", "--set", "run.resume=true"))
    assert code == 0, printed
    _same(deployment, "headless", inline_run(values, SITES))


def test_a_hospital_that_is_paused_for_half_a_minute_is_waited_for(
    folder: Path, begin: Begin, values: dict[str, Value], inline_run: InlineRun
) -> None:
    deployment = read_deployment(folder)
    site = deployment.sites[1]
    patient = values | {"run.reply-timeout": 600.0}
    process = _training(begin, patient, "halted", site, 1, folder)
    node = deployment.process(site)
    assert node
    tree = [node, *node.children(recursive=True)]
    for one in tree:
        with suppress(psutil.NoSuchProcess):  # of the message before, at its end
            one.suspend()
    time.sleep(HALT)
    assert process.poll() is None
    for one in tree:
        with suppress(psutil.NoSuchProcess):
            one.resume()
    code, printed = _ended(process)
    assert code == 0, printed
    _same(deployment, "halted", inline_run(patient, SITES))


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Lay a small empty disk over a folder, without a file in the way of its removal."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only who may mount can lay a small disk over a folder")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(path: Path) -> None:
    with path.open("wb", 0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * 65536)


def test_a_full_disk_at_a_hospital_is_named_and_the_run_resumes(
    folder: Path, begin: Begin, values: dict[str, Value], inline_run: InlineRun
) -> None:
    deployment = read_deployment(folder)
    site = deployment.sites[-1]
    state = Path(str(deployment.node_config[site]["state-dir"]))
    seed = (state / OWN / site / "seed").read_text()
    with _small_disk(state):
        (state / OWN / site).mkdir(parents=True)
        (state / OWN / site / "seed").write_text(seed)
        process = begin(values, "full")
        limit = time.monotonic() + _LIMIT
        while not (kept := list(state.rglob("*.safetensors"))):
            assert time.monotonic() < limit
            time.sleep(0.05)
        _fill(state / "filling")
        code, printed = _ended(process)
        assert code == 1, printed
        told = "(private state of site .*|the hospital's run book runs.json) cannot be written"
        assert re.search(f"site {site}.* {told}", printed), printed
        assert "No space left on device" in printed
        assert re.search(told, deployment.log(site).read_text())
        (state / "filling").unlink()
        assert list(state.rglob("*.safetensors")) == kept, "half-written"
        code, printed = _ended(begin(values, "full", "--set", "run.resume=true"))
        assert code == 0, printed
    _same(deployment, "full", inline_run(values, SITES))


def test_two_hospitals_with_one_name_are_refused(
    folder: Path, begin: Begin, values: dict[str, Value]
) -> None:
    deployment = read_deployment(folder)
    first, second, *_ = deployment.sites
    kill(deployment, second)
    configs = {**deployment.node_config, second: deployment.node_config[first]}
    wrong = Deployment(
        deployment.folder, deployment.ports, configs, deployment.started, deployment.nodes
    )
    try:
        wrong.write()
        assert main(["deploy", "up", "--deployment", str(folder)]) == 0
        code, printed = _ended(begin(values, "twice"))
        assert code == 1
        assert f"is registered as '{second}', but says that it is '{first}'" in printed
    finally:
        now = read_deployment(folder)
        kill(now, second)
        Deployment(now.folder, now.ports, deployment.node_config, now.started, now.nodes).write()
