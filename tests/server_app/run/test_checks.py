"""Which plans of a run are refused before an engine starts, and by which problem."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedsilo.core.errors import DataError, FedsiloError, SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value
from fedsilo.core.site_facts import SiteFacts
from fedsilo.server_app.run import checks
from fedsilo.server_app.run.checks import (
    DATA_CHECKS,
    PLAN_CHECKS,
    Beginning,
    Plan,
    find_problems,
    raise_first,
)
from fedsilo.strategies.meeting.participants import Participants

KEYS = ("'run.purpose'", "'machine.vectorised'", "--ray-address", "'vit.backbone-weights'")
RESOURCES = {"num-supernodes": 9, "client-resources-num-cpus": 1, "init-args-num-cpus": 4}


def _ray(common: CommonSettings, resources: Mapping[str, Value] = RESOURCES, **more: str) -> Plan:
    return Plan(common, resources, "ray", **more)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"initial_weights": "none.safetensors"}, "'train.initial-weights' is 'none.safetensors'"),
        ({"initial_weights": "encoder:none.pt"}, "'train.initial-weights' is 'encoder:none.pt'"),
        ({"network": "vit", "backbone_weights": "none.pt"}, "'vit.backbone-weights' is 'none.pt'"),
        ({"network": "resnet22", "backbone_weights": "none.pt"}, "'vit.backbone-weights' is"),
        ({"initial_weights": "timm:resnet18"}, ""),
        ({"network": "vit", "backbone_weights": "random"}, ""),
        ({"network": "resnet22"}, ""),
    ],
)
def test_missing_weights_are_refused_without_data(
    settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    common = CommonSettings(dataset="mnist", data_dir=str(tmp_path), **settings)
    problems = list(find_problems(DATA_CHECKS, Plan(common)))
    assert len(problems) == bool(told)
    assert all(problem.code == "setting" and told in str(problem) for problem in problems)


def test_missing_data_and_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is missing in"):
        raise_first(DATA_CHECKS, _ray(CommonSettings(dataset="mnist", data_dir=str(tmp_path))))
    raise_first(DATA_CHECKS, _ray(CommonSettings(dataset="heart-synthetic")))
    weights = tmp_path / "weights.pt"
    weights.write_bytes(b"no weights")
    with pytest.raises(SettingError, match="not a weights file"):
        raise_first(DATA_CHECKS, _ray(CommonSettings(silos=3, initial_weights=str(weights))))


def test_processes_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_free(free: float) -> None:
        monkeypatch.setattr(checks, "free_memory", lambda: free)

    common = CommonSettings(dataset="heart-synthetic")
    with_free(1.7e9)
    raise_first(PLAN_CHECKS, _ray(common))
    with_free(1.5e9)
    with pytest.raises(
        SettingError, match=r"4 processes, which need about 1.6 GB of memory, but 1.5 GB"
    ):
        raise_first(PLAN_CHECKS, _ray(common))
    raise_first(PLAN_CHECKS, _ray(common, resources=RESOURCES | {"num-supernodes": 3}))
    raise_first(PLAN_CHECKS, _ray(common, ray_address="auto"))
    raise_first(PLAN_CHECKS, Plan(common, RESOURCES, "processes"))


@pytest.mark.parametrize(
    ("engine", "address", "refused"),
    [
        ("auto", "", False),
        ("inline", "", False),
        ("processes", "", True),
        ("ray", "", True),
        ("auto", "auto", True),
    ],
)
def test_sites_train_as_one_only_in_this_process(engine: str, address: str, refused: bool) -> None:
    common = CommonSettings(vectorised=4)
    problem = checks.check_vectorised(Plan(common, RESOURCES, engine, address))
    assert isinstance(problem, SettingError) == refused
    assert checks.check_vectorised(Plan(CommonSettings(), RESOURCES, engine, address)) is None


@pytest.mark.parametrize(
    ("engine", "refused"), [("auto", False), ("ray", False), ("inline", True), ("processes", True)]
)
def test_an_address_of_ray_needs_the_engine_ray(engine: str, refused: bool) -> None:
    problem = checks.check_ray_address(Plan(CommonSettings(), RESOURCES, engine, "auto"))
    assert isinstance(problem, SettingError) == refused


def test_all_problems_are_found_and_the_first_is_raised(tmp_path: Path) -> None:
    common = CommonSettings(
        dataset="mnist", data_dir=str(tmp_path), purpose="meet", vectorised=2, network="vit"
    )
    plan = Plan(common, RESOURCES, "processes", "auto")
    problems = [str(problem) for problem in find_problems(PLAN_CHECKS, plan)]
    assert len(problems) == 4
    assert [key in problem for key, problem in zip(KEYS, problems, strict=True)] == [True] * 4
    with pytest.raises(FedsiloError) as raised:
        raise_first(PLAN_CHECKS, plan)
    assert str(raised.value) == problems[0]


@pytest.mark.parametrize(
    ("metric", "val", "refused"),
    [
        ("none", None, False),
        ("loss", [0, 0], True),
        ("loss", [4, 0], False),
        ("accuracy", [4, 0], False),
        ("balanced-accuracy", [4, 0], True),
        ("balanced-accuracy", [4, 1, 0], False),
        ("auc", [4, 1, 0], True),
        ("auc", [4, 1, 2], False),
        ("average-precision", [4, 1, 2], True),
        ("average-precision", [4, 1], False),
    ],
)
def test_a_metric_that_no_site_can_report_stops_no_run(
    metric: Any, val: list[int] | None, refused: bool
) -> None:
    counts = {"train": [4] * len(val or [0, 0])}
    if val is not None:
        counts["val"] = val
    facts = SiteFacts("a", "D1", (1,), len(counts["train"]), counts, {})
    common = CommonSettings(early_stopping_metric=metric)
    sites = Participants({"a": facts}, {})
    problem = checks.check_early_stopping(Beginning(common, sites))
    assert isinstance(problem, SettingError) == refused
    plugged = CommonSettings(early_stopping_metric=metric, method="mine:Own")
    without_samples = metric != "none" and not sum(val or [])
    assert (checks.check_early_stopping(Beginning(plugged, sites)) is not None) == without_samples
