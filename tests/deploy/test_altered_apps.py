"""A server ships another app: hospitals run nothing of it, say so, and the honest run goes on."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedsilo.core.processes import app_folder
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import FEDERATION, Deployment, read_deployment
from fedsilo.deployment.flower_commands import flwr
from fedsilo.deployment.worker.installed import ROOMS
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory

SITES = 2
SITE_FILE = """
methods: ["*"]
datasets: ["*"]
records: ["config/*", "metrics/*", "arrays/*"]
"""
_LIMIT = 180.0
_MARK = "altered-app-was-here"
Tiny = Callable[..., dict[str, Value]]
Deployed = Callable[..., tuple[int, RunDirectory]]
InlineRun = Callable[..., RunDirectory]
Same = Callable[[RunDirectory, RunDirectory], None]

# Whoever imports it leaves a mark in its folder, and would answer with whatever is in the silo
THEFT = f'''
import pathlib
pathlib.Path("{_MARK}").touch()
'''


def _theft(app: Path) -> None:
    module = app / "client_app" / "app.py"
    module.write_text(module.read_text() + THEFT)


def _other_pyproject(app: Path) -> None:
    project = app / "pyproject.toml"
    project.write_text(project.read_text().replace("\nrounds = 30 ", "\nrounds = 29 ", 1))


def _extra_module(app: Path) -> None:
    (app / "client_app" / "methods" / "theft.py").write_text(THEFT)


def _other_core(app: Path) -> None:
    module = app / "fedsilo" / "core" / "seeding.py"
    module.write_text(module.read_text() + THEFT)


def _reworded_page(app: Path) -> None:
    for name in ("reports/clinic.py", "pages/templates/clinic.html"):
        page = app / "fedsilo" / name
        page.write_text(f"{page.read_text()}\n")


@pytest.fixture
def altered(tmp_path: Path) -> Callable[[Callable[[Path], None]], Path]:
    """Return a function that makes an altered copy of the app."""

    def make(change: Callable[[Path], None]) -> Path:
        app = tmp_path / "app"
        ignored = shutil.ignore_patterns("__pycache__")
        # In a checkout 'core' lies in fedsilo/, beside the reports and commands
        beside = [room for room in ROOMS if (app_folder() / room).is_dir()]
        assert len(beside) == len(ROOMS) - 1
        for room in (*beside, "fedsilo"):
            shutil.copytree(app_folder() / room, app / room, ignore=ignored)
        for name in ("pyproject.toml", "simulation.yaml", "README.md", "LICENSE"):
            shutil.copy(app_folder() / name, app)
        before = {path: path.read_bytes() for path in app.rglob("*") if path.is_file()}
        change(app)
        assert before != {path: path.read_bytes() for path in app.rglob("*") if path.is_file()}
        return app

    return make


def _ship(deployment: Deployment, app: Path, values: Mapping[str, Value], name: str) -> str:
    """Start a run of an app; return its number."""
    config = deployment.folder / f"{name}.toml"
    settings = resolve({**values, "run.name": name, "run.out": str(deployment.runs)})
    config.write_text(tomli_w.dumps(settings.run_config()))
    answer = flwr(deployment, "run", str(app), FEDERATION, "--run-config", str(config))
    return str(answer["run-id"])


def _status(deployment: Deployment, number: str) -> str:
    """Wait for a run's end; return how it ended, with why."""
    limit = time.monotonic() + _LIMIT
    while time.monotonic() < limit:
        (run,) = flwr(deployment, "list", FEDERATION, "--run-id", number)["runs"]
        if str(run["status"]).startswith("finished"):
            return f"{run['status']} {run['status-details']}"
        time.sleep(1.0)
    raise AssertionError("the run did not end")


def _audit(folder: Path, site: str) -> list[dict[str, Any]]:
    log = folder / "sites" / site / "state" / ".own" / site / "audit.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _marks(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"sites/*/{_MARK}"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_theft, "client_app/app.py"),
        (_other_pyproject, "pyproject.toml"),
        (_extra_module, "client_app/methods/theft.py"),
        (_other_core, "core/seeding.py"),
    ],
)
def test_an_altered_app_is_refused_before_a_line_of_it_runs_and_the_honest_run_goes_on(
    change: Callable[[Path], None],
    named: str,
    altered: Callable[[Callable[[Path], None]], Path],
    folder: Path,
    deployed: Deployed,
    tiny: Tiny,
    inline_run: InlineRun,
    same: Same,
) -> None:
    deployment = read_deployment(folder)
    before = {site: len(_audit(folder, site)) for site in deployment.sites}
    values = tiny("fedavg", silos=SITES)
    name = f"altered-{Path(named).stem}"
    number = _ship(deployment, altered(change), values, name)
    code, honest = deployed(values, f"beside-{name}")  # while the other is refused
    assert code == 0
    same(honest, inline_run(values, SITES))
    ended = _status(deployment, number)
    assert ended.startswith("finished:failed"), ended
    assert f"{named} differ" in " ".join(ended.split())
    for site in deployment.sites:
        lines = _audit(folder, site)[before[site] :]
        refused = [line for line in lines if line["outcome"] == "refused"]
        assert refused
        assert all(f"{named} differ" in line["why"] for line in refused)
        assert {line["run-id"] for line in refused}.isdisjoint(
            line["run-id"] for line in lines if line["outcome"] == "answered"
        )
        assert f"{named} differ" in " ".join(deployment.log(site).read_text().split())
    assert _marks(folder) == []


def test_a_reworded_report_page_locks_no_hospital_out(
    altered: Callable[[Callable[[Path], None]], Path],
    folder: Path,
    tiny: Tiny,
    inline_run: InlineRun,
    same: Same,
) -> None:
    deployment = read_deployment(folder)
    values = tiny("fedavg", silos=SITES)
    before = {site: len(_audit(folder, site)) for site in deployment.sites}
    number = _ship(deployment, altered(_reworded_page), values, "reworded")
    ended = _status(deployment, number)
    assert ended.startswith("finished:completed"), ended
    same(RunDirectory(deployment.runs / "reworded"), inline_run(values, SITES))
    for site in deployment.sites:
        outcomes = {line["outcome"] for line in _audit(folder, site)[before[site] :]}
        assert outcomes == {"answered"}


@contextmanager
def _any_app(site_file: Path) -> Iterator[None]:
    rules = site_file.read_text()
    site_file.write_text(f"{rules}app: any\n")
    try:
        yield
    finally:
        site_file.write_text(rules)


def test_a_hospital_that_says_any_runs_it(
    altered: Callable[[Callable[[Path], None]], Path], folder: Path, tiny: Tiny
) -> None:
    deployment = read_deployment(folder)
    with _any_app(folder / "site.yaml"):
        number = _ship(deployment, altered(_theft), tiny("fedavg", silos=SITES), "any")
        assert _status(deployment, number).startswith("finished:completed")
    assert len(_marks(folder)) == SITES, "what the tests above look for can be seen"
