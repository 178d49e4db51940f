from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message

from client_app.fedavg import FedAvgSite
from client_app.site import open_method, open_site, site_name, site_settings, state_folder
from client_app.uefl import UEFLSite
from models.contract import TRAIN, Instruction
from models.errors import DataError, SettingError, SiteError

Node = Callable[..., Context]


def named(name: str, run_dir: str = "") -> Instruction:
    return Instruction(1, TRAIN, run_name=name, run_dir=run_dir)


@pytest.mark.parametrize(("partition", "name"), [(0, "s1a"), (1, "s2a"), (2, "s3a")])
def test_a_simulated_node_is_the_silo_of_its_partition(
    context: Node, partition: int, name: str
) -> None:
    node = context({"partition-id": partition, "num-partitions": 3})
    assert site_name(node, site_settings(node)) == name
    assert open_site(node).silo.name == name


def test_the_nodes_own_name_wins_over_its_partition(context: Node) -> None:
    node = context({"site": "s3a", "partition-id": 0})
    assert open_site(node).silo.distribution == "D3"


def test_a_node_without_a_name_is_told_how_to_give_one(context: Node) -> None:
    node = context({"state-dir": "/somewhere"})
    with pytest.raises(SiteError, match=r"--node-config 'site=\"s1a\"' \(silos: s1a, s2a, s3a\)"):
        open_site(node)


def test_a_partition_beyond_the_silos_is_refused(context: Node) -> None:
    with pytest.raises(SiteError, match="SuperNode 4 has no silo: 'silos' is 3"):
        open_site(context({"partition-id": 3}))


def test_a_name_that_is_no_silo_is_refused(context: Node) -> None:
    with pytest.raises(DataError, match=r"no silo '../s1a'"):
        open_site(context({"site": "../s1a"}))


def test_the_hospitals_own_folders_and_device_win(context: Node) -> None:
    node = context(
        {"site": "s1a", "data-dir": "/mine", "device": "cuda:1", "seed": 99},
        data_dir="/theirs",
        cache_dir="/their-cache",
    )
    settings = site_settings(node)
    assert settings.data_dir == "/mine"
    assert settings.device == "cuda:1"
    assert settings.cache_dir == "/their-cache"
    assert settings.seed == 7  # what belongs to the result is the run's alone


def test_an_unknown_device_of_a_node_is_refused_when_a_method_is_opened(
    context: Node, message: Callable[..., Message]
) -> None:
    with pytest.raises(SettingError, match="'device' is 'tpu'"):
        open_method(message(TRAIN), context({"partition-id": 0, "device": "tpu"}))


def test_the_run_config_names_the_method_and_its_settings(
    context: Node, message: Callable[..., Message], tmp_path: Path
) -> None:
    fedavg = open_method(message(TRAIN), context({"partition-id": 0}))
    assert isinstance(fedavg, FedAvgSite)
    uefl = open_method(message(TRAIN, round=4), context({"partition-id": 1}, "uefl", codes=6))
    assert isinstance(uefl, UEFLSite)
    assert uefl.settings.codes == 6
    assert uefl.request.instruction.round == 4
    assert uefl.state.folder == tmp_path / "sites" / "s2a"


def test_a_real_site_keeps_its_state_in_its_own_folder(context: Node) -> None:
    node = context({"site": "s1a", "state-dir": "/private", "partition-id": 0})
    assert state_folder(node, named("run", "/server"), "s1a") == Path("/private/run/s1a")


def test_a_simulated_site_keeps_its_state_in_the_run_directory(context: Node) -> None:
    folder = state_folder(context({"partition-id": 0}), named("run", "/server/run"), "s1a")
    assert folder == Path("/server/run/sites/s1a")


@pytest.mark.parametrize("node", [{"site": "s1a"}, {"partition-id": 0}])
def test_a_site_with_nowhere_to_keep_its_state_is_refused(
    context: Node, node: dict[str, Any]
) -> None:
    run_dir = "" if "partition-id" in node else "/server/run"
    with pytest.raises(SiteError, match="site s1a: the node config names no 'state-dir'"):
        state_folder(context(node), named("run", run_dir), "s1a")


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "/etc", ".hidden", "a/"])
def test_a_run_name_that_would_leave_the_folder_is_refused(context: Node, name: str) -> None:
    node = context({"site": "s1a", "state-dir": "/private"})
    with pytest.raises(SettingError, match="is no plain folder name"):
        state_folder(node, named(name), "s1a")
