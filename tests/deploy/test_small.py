"""The smallest deployment, in every run of the suite: one server, two hospitals, a round or two."""

from collections.abc import Callable

import pytest

from fedsilo.cli.main import main
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import Deployment
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.deployed import run_deployed

ALWAYS, SITES = True, 2


@pytest.mark.parametrize(
    ("method", "rounds"),
    [
        pytest.param("distrans", 1, marks=pytest.mark.soak),
        ("uefl", 2),  # its uncertain hospital gets a book, its certain one re-initialises the first
    ],
)
def test_processes_with_tls_and_keys_find_what_the_simulation_finds(
    method: str,
    rounds: int,
    deployment: Deployment,
    tiny: Callable[..., dict[str, Value]],
    inline_run: Callable[..., RunDirectory],
    same: Callable[[RunDirectory, RunDirectory], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = tiny(method, silos=SITES, rounds=rounds)
    code, found = run_deployed(deployment.folder, values, f"small-{method}")
    assert code == 0
    same(found, inline_run(values, SITES))
    assert main(["deploy", "status", "--deployment", str(deployment.folder)]) == 0
    assert capsys.readouterr().out.count("online") >= SITES
