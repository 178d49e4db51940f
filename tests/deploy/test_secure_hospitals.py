"""Three hospitals that trust sums alone: from nothing to a sum, by the commands of the page."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedsilo.cli.main import main
from fedsilo.core.processes import app_folder, free_ports
from fedsilo.deployment.deployment import read_deployment
from fedsilo.deployment.flower_commands import list_online_sites
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.deployed import ended_with_tests

pytestmark = pytest.mark.skipif(
    os.environ.get("FEDSILO_DEPLOY") != "1", reason="takes minutes: make test-deploy"
)
SITES = ("cleveland", "hungary", "va")
_LIMIT = 300.0  # seconds until all hospitals are online
_LONGEST = 240.0  # seconds from nothing to three hospitals that know each other's keys
RUN = {
    "dataset": '"heart-synthetic"',
    "network.name": '"logistic"',
    "data.standardise": '"declared"',
    "privacy.trust": '"sums"',
    "secure.aggregation": '"secagg"',
    "secure.clip-norm": "5.0",
    "rounds": "1",
    "train.mc-passes": "0",
    "run.min-sites": "3",
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return where a server's deployment will be; what runs is ended."""
    where = tmp_path / "server" / "deployment"
    with ended_with_tests(where), ended_with_tests(tmp_path):
        try:
            yield where
        finally:
            main(["deploy", "down", "--deployment", str(where)])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Return a function that starts a hospital in its own folder."""
    started: list[subprocess.Popen[bytes]] = []

    def run(site: str) -> None:
        command = [sys.executable, "-m", "fedsilo.cli", "hospital", "start"]
        command += [str(tmp_path / f"{site}.zip"), "--trust", "sums", "--yes", "--device", "cpu"]
        log = (tmp_path / f"{site}.log").open("ab")
        started.append(
            subprocess.Popen(command, cwd=app_folder(), stdout=log, stderr=subprocess.STDOUT)
        )

    with ended_with_tests(tmp_path):
        yield run
    for process in started:
        process.wait()


def test_three_hospitals_compare_their_keys_and_sum(
    folder: Path, start: Callable[[str], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    deployment = ("--deployment", str(folder))
    host = f"localhost:{free_ports(1)[0]}"
    assert main(["deploy", "up", "--host", host, *deployment]) == 0
    assert main(["deploy", "add", *SITES, *deployment]) == 0
    for site in SITES:
        shutil.copy(folder / "kits" / f"{site}.zip", tmp_path)
        start(site)
    limit = time.monotonic() + _LIMIT
    while list_online_sites(read_deployment(folder)) != list(SITES):
        assert time.monotonic() < limit, [(tmp_path / f"{s}.log").read_text() for s in SITES]
        time.sleep(0.5)

    def run(name: str) -> int:
        sets = [f"--set={key}={value}" for key, value in RUN.items()]
        return main(["deploy", "run", "fedavg-heart", "--name", name, *sets, *deployment])

    def keys(site: str, *words: str) -> str:
        capfd.readouterr()
        assert main(["hospital", "keys", str(tmp_path / site), *words]) == 0
        return capfd.readouterr().out

    codes = {}
    for site in SITES:
        (codes[site],) = re.findall(rf"^{site} +([0-9a-f-]{{39}})  this hospital", keys(site), re.M)
        assert codes[site] in (tmp_path / f"{site}.log").read_text(), "it was printed at the start"

    # Nobody has compared: no sum, and each hospital's own log says why
    joined = time.monotonic() - began
    assert run("strangers") == 1
    began_again = time.monotonic()
    for site in SITES:
        assert "have not been compared" in (tmp_path / f"{site}.log").read_text()
        others = [other for other in SITES if other != site]
        assert keys(site).count("NOT COMPARED") == len(others)
        # One key as it was read out, the other as it came
        marks = (f"{others[0]}={codes[others[0]]}", others[1])
        said = keys(site, "--compared", marks[0], "--compared", marks[1])
        assert said.count("  compared on ") == len(others)
    seconds = joined + time.monotonic() - began_again
    with capfd.disabled():
        print(f"from nothing to three hospitals with compared keys: {seconds:.0f} s")
    assert seconds < _LONGEST

    assert run("sums") == 0
    summary = RunDirectory(read_deployment(folder).runs / "sums").read_json("summary.json")
    assert summary["rounds"] == 1
