"""A deployment for a module's tests; all but the smallest take minutes: ``make test-deploy``."""

import functools
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from fedsilo.cli.main import main
from fedsilo.client_app.site.node import OWN
from fedsilo.core.processes import app_folder, end_trees
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import Deployment, read_deployment
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.bound_command import COMMAND
from tests.support.deployed import ended_with_tests, run_deployed, run_options
from tests.support.tiny import TINY

Deployed = Callable[[Mapping[str, Value], str], tuple[int, RunDirectory]]
# A simulated site has no floors, and tiny silos are below a real one's
LOW: Mapping[str, Value] = {
    **dict.fromkeys(("minimum-batch", "minimum-measured", "minimum-steps-per-reply"), 1),
    "sums-min-count": 1,
    "max-runs-per-day": 1000,
}
_FOLDER_NAMES = 300  # bytes


@pytest.fixture(scope="module")
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Bring a server and its sites up, as many as the module's ``SITES`` says, and down again."""
    always = getattr(request.module, "ALWAYS", False)
    if os.environ.get("FEDSILO_DEPLOY") != "1" and not always:
        pytest.skip("takes minutes: make test-deploy")
    folder = tmp_path_factory.mktemp("deployment")
    with ended_with_tests(folder):
        yield from _brought_up(request.module, folder)


def _brought_up(module: ModuleType, folder: Path) -> Iterator[Deployment]:
    sites = str(module.SITES)
    told = {"allow-embeddings": True} | LOW | getattr(module, "NODE_CONFIG", {})
    if rules := getattr(module, "SITE_FILE", ""):
        told["site-file"] = str(folder / "site.yaml")
        (folder / "site.yaml").write_text(rules)
    own = [part for key, value in told.items() for part in ("--node-config", _toml(key, value))]
    try:
        assert main(["deploy", "up", "--sites", sites, "--deployment", str(folder), *own]) == 0
        made = read_deployment(folder)
        for site in made.sites:
            _give_seed(Path(str(made.node_config[site]["state-dir"])) / OWN / site)
        yield made
    finally:
        assert main(["deploy", "down", "--deployment", str(folder)]) == 0
        assert read_deployment(folder).running() == []


def _give_seed(folder: Path) -> None:
    """Make a hospital's secret seed that of the tests' simulations, so that bits can agree."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "seed").write_text(f"{TINY['seed']}\n")


def _toml(key: str, value: Value) -> str:
    return f"{key}={json.dumps(value)}"


@pytest.fixture
def folder(deployment: Deployment) -> Path:
    """Return the deployment's folder, with all of it running."""
    assert main(["deploy", "up", "--deployment", str(deployment.folder)]) == 0
    return deployment.folder


@pytest.fixture
def deployed(folder: Path) -> Deployed:
    """Return a function that runs settings on the deployment: its exit code, its run."""

    return functools.partial(run_deployed, folder)


@pytest.fixture
def begin(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts ``fedsilo deploy run``; what still runs is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(values: Mapping[str, Value], name: str, *more: str) -> subprocess.Popen[str]:
        options = (*run_options(folder, values, name), *more)
        process = subprocess.Popen(
            [*COMMAND, *options],
            cwd=app_folder(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    end_trees([psutil.Process(process.pid) for process in started if process.poll() is None])
    for process in started:
        process.wait()


@pytest.fixture
def same() -> Callable[[RunDirectory, RunDirectory], None]:
    """Return a function that holds a deployed run against the simulated one, to the last bit."""

    def hold(ours: RunDirectory, theirs: RunDirectory) -> None:
        for name in ("metrics.csv", "model.safetensors"):
            found, expected = (run.path / name for run in (ours, theirs))
            assert found.is_file() == expected.is_file()
            if found.is_file():
                assert found.read_bytes() == expected.read_bytes()
        one, other = (run.read_json("summary.json") for run in (ours, theirs))
        for key in ("sites", "distributions", "mean", "rounds"):
            assert one[key] == other[key]
        messages = len((ours.path / "traffic.csv").read_text().splitlines()) - 1
        for way in ("up", "down"):  # a message names folders, which differ here
            assert abs(one["bytes"][way] - other["bytes"][way]) < _FOLDER_NAMES * messages

    return hold
