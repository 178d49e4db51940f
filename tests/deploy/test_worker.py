"""A hospital's worker: what is killed is started again or given up, and nothing piles up."""

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from fedsilo.cli.main import main
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import Deployment, read_deployment
from fedsilo.server_app.records.run_directory import RunDirectory

SITES = 2
NODE_CONFIG: Mapping[str, Value] = {"max-messages": 200}
_LIMIT = 900.0  # seconds
Tiny = Callable[..., dict[str, Value]]
InlineRun = Callable[..., RunDirectory]
Same = Callable[[RunDirectory, RunDirectory], None]
Begin = Callable[..., subprocess.Popen[str]]


def _part(deployment: Deployment, site: str, module: str) -> psutil.Process:
    """Return a hospital's process that runs a module of the worker's."""
    hospital = deployment.process(site)
    assert hospital
    (found,) = [one for one in hospital.children() if module in " ".join(one.cmdline())]
    return found


def _task(deployment: Deployment, site: str, since: float) -> psutil.Process:
    """Wait for the process that answers a message that came after ``since``; return it."""
    limit = time.monotonic() + _LIMIT
    while time.monotonic() < limit:
        worker = _part(deployment, site, "fedsilo.deployment.worker.parent")
        young = [one for one in worker.children() if one.create_time() > since]
        if young:
            return young[0]
        time.sleep(0.005)
    raise AssertionError("no message came")


def _training(deployment: Deployment, site: str, start: int, times: int = 1) -> None:
    """Wait until a hospital has been asked to train so often."""
    limit = time.monotonic() + _LIMIT
    while deployment.log(site).read_text()[start:].count("Receiving: train") < times:
        assert time.monotonic() < limit
        time.sleep(0.005)


def _ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    printed, _ = process.communicate(timeout=_LIMIT)
    return process.returncode, printed


def test_a_killed_worker_comes_back_and_what_it_had_begun_is_answered(
    folder: Path, begin: Begin, tiny: Tiny, inline_run: InlineRun, same: Same
) -> None:
    deployment = read_deployment(folder)
    site = deployment.sites[0]
    values = tiny("fedavg", silos=SITES, rounds=3)
    start, now = len(deployment.log(site).read_text()), time.time()
    process = begin(values, "worker-killed")
    _training(deployment, site, start)
    _task(deployment, site, now)
    worker = _part(deployment, site, "fedsilo.deployment.worker.parent")
    worker.kill()
    code, printed = _ended(process)
    assert code == 0, printed
    same(RunDirectory(deployment.runs / "worker-killed"), inline_run(values, SITES))
    assert "the worker ended (by SIGKILL) and is started again" in deployment.log(site).read_text()
    assert _part(deployment, site, "fedsilo.deployment.worker.parent").pid != worker.pid


def test_a_killed_task_is_named_at_its_site_and_the_run_resumes_to_the_same_bytes(
    folder: Path, begin: Begin, tiny: Tiny, inline_run: InlineRun, same: Same
) -> None:
    deployment = read_deployment(folder)
    site = deployment.sites[0]
    values = tiny("local", silos=SITES, rounds=3, reply_timeout=100.0)
    start = len(deployment.log(site).read_text())
    process = begin(values, "task-killed")
    _training(deployment, site, start, times=2)  # a run that stops before has nothing to resume
    _task(deployment, site, time.time() - 0.5).kill()
    code, printed = _ended(process)
    log = deployment.log(site).read_text()[start:]
    assert "that answered a message was ended by SIGKILL" in log
    if code:  # Flower has given the message up: the run stops by the site's name
        assert f"site {site}" in printed
        code, printed = _ended(begin(values, "task-killed", "--set", "run.resume=true"))
    assert code == 0, printed
    same(RunDirectory(deployment.runs / "task-killed"), inline_run(values, SITES))


def test_a_hundred_messages_leave_no_process_memory_or_file_behind(
    folder: Path, begin: Begin, tiny: Tiny
) -> None:
    deployment = read_deployment(folder)
    site = deployment.sites[0]
    values = tiny("fedavg", silos=SITES, evaluate_every=0)
    code, printed = _ended(begin(values | {"rounds": 5}, "warm"))
    assert code == 0, printed
    worker = _part(deployment, site, "fedsilo.deployment.worker.parent")
    memory, files = worker.memory_info().rss, worker.num_fds()
    code, printed = _ended(begin(values | {"rounds": 50}, "many"))  # at both hospitals
    assert code == 0, printed
    assert _part(deployment, site, "fedsilo.deployment.worker.parent").pid == worker.pid
    assert worker.memory_info().rss < memory + 8 * 2**20
    assert worker.num_fds() <= files + 2
    assert worker.num_threads() == 1
    assert worker.children() == [], "no zombie"


def test_a_hospital_whose_own_process_is_killed_leaves_nothing_running(folder: Path) -> None:
    deployment = read_deployment(folder)
    site = deployment.sites[1]
    hospital = deployment.process(site)
    assert hospital
    parts = hospital.children(recursive=True)
    assert len(parts) == 2
    hospital.kill()
    _, alive = psutil.wait_procs(parts, timeout=20)
    assert not alive
    assert main(["deploy", "up", "--deployment", str(folder)]) == 0
    assert read_deployment(folder).process(site)
