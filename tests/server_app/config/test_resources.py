"""What sites may use: workers by cores, memory and GPUs, and devices as a client sees them."""

import os
from pathlib import Path

import pytest
import torch

from fedsilo.core.errors import SettingError
from fedsilo.core.settings_schema import Value
from fedsilo.server_app.config import resources
from fedsilo.server_app.config.resources import check_device, check_resources, worker_environments


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_gpu_by_number_is_refused_with_the_reason(share: float) -> None:
    with pytest.raises(SettingError, match="'cuda:1', but a client process sees only"):
        check_device("cuda:1", share)


def test_a_gpu_that_clients_get_no_share_of_is_refused_with_the_mend() -> None:
    for device in ("cuda", "cuda:0"):
        with pytest.raises(SettingError, match="'client-resources-num-gpus' in the experiment"):
            check_device(device, 0.0)
        check_device(device, 0.5)


@pytest.mark.parametrize("there", [True, False])
def test_a_gpu_that_is_seen_and_not_used_is_told(
    there: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    check_device("auto", 0.0)
    assert (
        "this machine has a GPU, but clients train on the CPU" in capsys.readouterr().err
    ) == there
    check_device("auto", 0.5)
    check_device("cpu", 0.0)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("wanted", "free", "workers"),
    [
        ({"num-supernodes": 20}, 64, 8),
        ({"num-supernodes": 3}, 64, 3),
        ({"num-supernodes": 20, "client-resources-num-cpus": 3}, 64, 2),
        ({"num-supernodes": 20, "init-args-num-cpus": 4}, 64, 4),
        ({"num-supernodes": 20, "client-resources-num-cpus": 99}, 64, 1),
        ({"num-supernodes": 20}, 5, 5),
        ({"num-supernodes": 20}, 0, 1),
    ],
)
def test_workers_are_as_many_as_cores_memory_and_sites_allow(
    wanted: dict[str, Value], free: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "cores", lambda: 8)
    monkeypatch.setattr(resources, "free_memory", lambda: free * 2.0**30)
    # as with Ray, a site that is given no share of a GPU sees none
    assert worker_environments(check_resources(wanted)) == [{resources.VISIBLE: ""}] * workers


@pytest.mark.parametrize(("limit", "most"), [("max 100000", 8), ("250000 100000", 2), ("1 9", 1)])
def test_cores_are_within_the_containers_limit(
    limit: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert resources.cores() == most


@pytest.mark.parametrize(
    ("share", "most", "seen"),
    [
        (0.5, 0, ["4", "6", "4", "6"]),
        (1, 0, ["4", "6"]),
        (0.5, 1, ["4", "4"]),
        (0.3, 0, ["4", "6", "4", "6", "4", "6"]),
        (2, 0, ["4", "6"]),
    ],
)
def test_each_worker_sees_one_gpu_and_shares_it_with_as_many_as_its_share_allows(
    share: float, most: int, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "cores", lambda: 16)
    monkeypatch.setattr(resources, "free_memory", lambda: 16 * 2.0**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv(resources.VISIBLE, "4, 6")
    told = {"client-resources-num-gpus": share, "init-args-num-gpus": most, "num-supernodes": 9}
    environments = worker_environments(check_resources(told))
    assert [one[resources.VISIBLE] for one in environments] == seen


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_share_of_a_gpu_that_is_not_there_leaves_every_core_a_worker(
    hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "cores", lambda: 8)
    monkeypatch.setattr(resources, "free_memory", lambda: 16 * 2.0**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv(resources.VISIBLE, hidden)
    wanted = check_resources({"client-resources-num-gpus": 1.0, "num-supernodes": 9})
    assert worker_environments(wanted) == [{resources.VISIBLE: ""}] * 8
