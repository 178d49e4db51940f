"""Runs with plugs of a file: the same as ours where they say the same, and never another's."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from fedsilo import load_run
from fedsilo.core.errors import RunDirectoryError, SettingError, SiteError
from fedsilo.core.settings_schema import Value
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.settings import read_run_config
from fedsilo.server_app.records.run_directory import RunDirectory

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"


@pytest.fixture
def own_file(tmp_path: Path) -> Iterator[Path]:
    """Return a copy of the page's own method."""
    yield Path(shutil.copy(EXAMPLES / "own_method.py", tmp_path))
    sys.modules.pop("own_method", None)


def test_fedbn_outside_the_package_is_ours(
    tiny: Callable[..., dict[str, Value]],
    inline_run: Callable[..., RunDirectory],
    own_file: Path,
) -> None:
    values = tiny("fedbn")
    ours = inline_run(values | {"run.name": "ours"})
    own = {"method": "own_method", "plugin": str(own_file), "run.name": "own"}
    theirs = inline_run(values | own)
    models = [load_file(run.path / "model.safetensors") for run in (ours, theirs)]
    assert models[0].keys() == models[1].keys()
    assert all((models[0][name] == models[1][name]).all() for name in models[0])
    assert (ours.path / "metrics.csv").read_text() == (theirs.path / "metrics.csv").read_text()
    summary = theirs.read_json("summary.json")
    assert (summary["method"], summary["title"]) == ("own_method", "OwnFedBN")
    assert list(summary["plugs"]) == ["own_method"]
    assert "plugs" not in ours.read_json("summary.json")


def test_a_run_is_not_resumed_with_another_plug(
    tiny: Callable[..., dict[str, Value]],
    inline_run: Callable[..., RunDirectory],
    own_file: Path,
) -> None:
    own = {"method": "own_method", "plugin": str(own_file), "rounds": 1}
    run = inline_run(tiny("fedbn") | own)
    again = read_run_config(run.path / "config.toml").settings | {"resume": True}
    assert (
        again["plugin-digests"]
        == f"own_method={run.read_json('summary.json')['plugs']['own_method']}"
    )
    inline_run(again)  # finished: nothing to do
    assert FinishedRun(run.path).settings.common.method == "own_method", "its own user reads it"
    version = own_file.read_text()
    own_file.write_text(version + "# changed\n")
    with pytest.raises(RunDirectoryError, match="is another version of plugin 'own_method'"):
        _ = FinishedRun(run.path).settings
    copy = own_file.with_name("kept") / own_file.name
    copy.parent.mkdir()
    copy.write_text(version)
    assert load_run(run.path, plugin=copy).settings["plugin"] == str(copy)
    with pytest.raises(
        SettingError, match="plugin own_method differs from the version in 'plugin-digests'"
    ):
        inline_run(again)


def test_mistake_of_a_plug_at_all_sites_is_one_reason(
    tiny: Callable[..., dict[str, Value]],
    inline_run: Callable[..., RunDirectory],
    tmp_path: Path,
) -> None:
    path = tmp_path / "unfinished.py"
    path.write_text(
        "from fedsilo.client_app.methods.base import SiteMethod\n"
        "from fedsilo.strategies.methods.fedavg import FedAvg\n\n"
        "class Own(FedAvg): ...\n\n"
        "class OwnSite(SiteMethod):\n    def train(self, lab): lab.reply()\n"
    )
    with pytest.raises(SiteError) as error:
        inline_run(tiny("fedavg") | {"method": "unfinished", "plugin": str(path)})
    said = "site s1a, site s2a, site s3a, round 1, phase train: phase 'train' of method 'unfini"
    assert str(error.value).startswith(said)
    sys.modules.pop("unfinished", None)


def test_a_method_that_reads_tokens_takes_a_network_of_a_file(
    tiny: Callable[..., dict[str, Value]],
    inline_run: Callable[..., RunDirectory],
    tmp_path: Path,
) -> None:
    path = shutil.copy(EXAMPLES / "own_network.py", tmp_path)
    own = {"network": "own_network:build", "plugin": str(path), "rounds": 1}
    run = inline_run(tiny("moon") | own)
    weights = load_file(run.path / "model.safetensors")["encoder.3.weight"]
    assert weights.shape == (10, 64)
    sys.modules.pop("own_network", None)
