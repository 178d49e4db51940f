"""SuperLink and SuperNodes with TLS and keys, as processes: what they find is the simulation's.

All methods run on one federation, several at once, as the runs of several studies would: most of a
short run is its start and end, in which hospitals have nothing to do.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from fedsilo.client_app.privacy.round_secrets import SECRETS
from fedsilo.core.methods import METHODS
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import Deployment
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.deployed import run_deployed
from tests.support.tiny import VARIANTS

SITES = 6
POOLING = {"mix"}  # an oracle: no hospital hands its images out
AT_ONCE = 3  # runs: two cores are busy while one of them starts
Tiny = Callable[..., dict[str, Value]]
InlineRun = Callable[..., RunDirectory]
Deployed = Callable[..., tuple[int, RunDirectory]]
Same = Callable[[RunDirectory, RunDirectory], None]


def _noiseless(values: dict[str, Value]) -> dict[str, Value]:
    """Return settings without noise: a hospital draws its own where a simulation has the seed's."""
    known = resolve(values).as_mapping()
    loud = {key for key, value in known.items() if "noise" in key and isinstance(value, float)}
    return values | {key: 0.0 for key in loud if known[key]}


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, deployment: Deployment, tiny: Tiny
) -> Iterator[Mapping[str, Future[tuple[int, RunDirectory]]]]:
    """Start the runs of all methods that are tried, some at once, and return them by method."""
    items = [item for item in request.session.items if item.path == request.path]
    tried = [item.callspec.params["method"] for item in items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(AT_ONCE) as pool:

        def start(method: str) -> Future[tuple[int, RunDirectory]]:
            values = _noiseless(tiny(method, silos=SITES))
            return pool.submit(run_deployed, deployment.folder, values, method)

        # Alone: Flower takes an app for installed as soon as the first run has begun to unpack it
        first = {method: start(method) for method in tried[:1]}
        wait(first.values())
        yield first | {method: start(method) for method in tried[1:]}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("method", sorted(METHODS.keys() - POOLING))
def test_every_final_number_is_the_simulations_to_the_last_bit(
    method: str,
    runs: Mapping[str, Future[tuple[int, RunDirectory]]],
    tiny: Tiny,
    inline_run: InlineRun,
    same: Same,
) -> None:
    simulated = inline_run(_noiseless(tiny(method, silos=SITES)), SITES)
    code, found = runs[method].result()
    assert code == 0
    same(found, simulated)


def test_weights_that_are_summed_in_secret_are_the_simulations_to_the_last_bit(
    deployed: Deployed, tiny: Tiny, inline_run: InlineRun, same: Same, folder: Path
) -> None:
    values = tiny("fedavg", silos=SITES) | VARIANTS["fedavg-secure"]
    code, found = deployed(values, "secure")
    assert code == 0
    same(found, inline_run(values, SITES))
    assert not list(folder.rglob(SECRETS)), "keys of the last round are gone"


def test_a_site_keeps_its_state_on_its_own_disk(folder: Path) -> None:
    runs = folder / "server" / "runs"
    assert not list(runs.glob("*/sites/*")), "no private state at the server"
    states = {path.parent.name for path in folder.glob("sites/*/state/local/*/*")}
    assert len(states) == SITES


def test_no_hospital_hands_its_images_out(
    deployed: Deployed, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    code, directory = deployed(tiny("mix", silos=SITES), "mix")
    assert code == 1
    assert not (directory.path / "summary.json").exists()
    assert " failed: " in " ".join(capsys.readouterr().err.split())
