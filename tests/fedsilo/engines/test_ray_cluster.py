"""A Ray cluster that a run is spread over: what Ray is told, and its own error in one line."""

import json

import pytest

from fedsilo.core.errors import SettingError
from fedsilo.core.processes import free_ports
from fedsilo.engines import ray_cluster
from fedsilo.engines.ray_cluster import check_cluster, ray_variables, unused_cluster


@pytest.mark.parametrize("address", ["ray://here:no", "auto"])
def test_an_address_that_ray_does_not_take_is_told_in_its_own_words(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SettingError, match=f"Ray cluster at {address} cannot be used: .*Error"):
        check_cluster(address, {})


def test_a_cluster_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_LIMIT", 3.0)
    (port,) = free_ports(1)
    with pytest.raises(SettingError, match="it did not answer within 3 s") as told:
        check_cluster(f"127.0.0.1:{port}", {})
    assert "\n" not in str(told.value)


def test_resources_of_a_cluster_of_ones_own_are_refused() -> None:
    with pytest.raises(SettingError, match="resource 'init-args-num-cpus' is for a cluster that"):
        check_cluster("auto", {"init-args-num-cpus": 4})


def test_without_an_address_ray_starts_a_cluster_of_its_own() -> None:
    assert ray_variables("", {"FEDSILO_DATA": "/d"}) == {"RAY_ADDRESS": "local"}
    assert unused_cluster({}) is unused_cluster({"RAY_ADDRESS": "local"}) is None
    told = unused_cluster({"RAY_ADDRESS": "10.0.0.1:6379"})
    assert told is not None
    assert "10.0.0.1:6379, but this run does not use it" in told


def test_what_sites_read_of_the_environment_travels() -> None:
    environment = {"FEDSILO_DATA": "/d", "OMP_NUM_THREADS": "1", "HOME": "/root", "PATH": "/bin"}
    told = ray_variables("10.0.0.0:6379", environment)
    assert told["RAY_ADDRESS"] == "10.0.0.0:6379"
    travelling = json.loads(told["RAY_JOB_CONFIG_JSON"])["runtime_env"]["env_vars"]
    assert travelling == {"FEDSILO_DATA": "/d", "OMP_NUM_THREADS": "1"}
