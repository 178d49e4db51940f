"""Plugs in a command's options: files become modules, with their place and their digest."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsilo.api.options import Sources, run_sources
from fedsilo.core.errors import SettingError
from fedsilo.engines.planning import plan_run

_NETS = "from torch import nn\n\n\ndef build(shape, classes):\n    return nn.Linear(1, classes)\n"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write two files of plugs to the working folder."""
    (tmp_path / "ward_nets.py").write_text(_NETS)
    (tmp_path / "ward_cuts.py").write_text("def cut(labels, silos, rng): ...\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("ward_nets", "ward_cuts"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "given",
    [
        {"plugin": "ward_nets.py", "settings": {"network": "ward_nets:build"}},
        {"plugin": ["ward_nets.py"], "settings": ["network=ward_nets:build"]},
        {"settings": {"network": "ward_nets.py:build"}},
        {"settings": {"network": "ward_nets.py:build", "plugin": "ward_nets.py"}},
    ],
    ids=str,
)
def test_a_file_is_a_module_whose_digest_the_run_has(files: Path, given: Sources) -> None:
    common = plan_run("fedavg-digits", run_sources(given))[0].common
    assert (common.network, common.plugin) == ("ward_nets:build", str(files / "ward_nets.py"))
    digest = hashlib.sha256(_NETS.encode()).hexdigest()
    assert common.plugin_digests == f"ward_nets={digest}"


def test_files_of_several_plugs_are_all_there(files: Path) -> None:
    settings = {"network": "ward_nets.py:build", "partition": "ward_cuts:cut"}
    sources = run_sources({"plugin": "ward_cuts.py", "settings": settings})
    common = plan_run("fedavg-digits", sources)[0].common
    assert common.plugin == f"{files / 'ward_cuts.py'}, {files / 'ward_nets.py'}"
    assert [pin.partition("=")[0] for pin in common.plugin_digests.split(", ")] == [
        "ward_cuts",
        "ward_nets",
    ]


def test_timms_networks_are_no_plugs() -> None:
    sources = run_sources({"settings": {"network": "timm:resnet18"}})
    assert plan_run("fedavg-digits", sources)[0].common.plugin_digests == ""


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"network": "ward_nets.py:none"}, "module 'ward_nets' has no 'none'"),
        ({"network": "none.py:build"}, "none.py cannot be read"),
        ({"partition": "ward_cuts.py:none"}, "module 'ward_cuts' has no 'none'"),
        ({"dataset": "ward_cuts.py:cut"}, "must be a DataSet"),
        ({"method": "ward_cuts.py"}, "module 'ward_cuts' has 0 classes of Method"),
        ({"network": "ward_nets.build"}, "must be .* timm:NAME or module:object"),
    ],
    ids=str,
)
def test_what_is_no_plug_is_refused_before_anything_begins(
    settings: dict[str, str], told: str
) -> None:
    with pytest.raises(SettingError, match=told):
        plan_run("fedavg-digits", run_sources({"settings": settings}))
