"""What is looked at before an engine starts."""

from pathlib import Path
from typing import Any

import pytest

from fedsilo.models.contract.errors import DataError, SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.server_app.run import ready

RESOURCES = {"num-supernodes": 9, "client-resources-num-cpus": 1, "init-args-num-cpus": 4}


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
    if not told:
        ready.refuse_without_a_silo(common)
        return
    with pytest.raises(SettingError, match=told):
        ready.refuse_without_a_silo(common)


def test_missing_data_and_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is missing in"):
        ready.refuse_by_first_silo(CommonSettings(dataset="mnist", data_dir=str(tmp_path)))
    ready.refuse_by_first_silo(CommonSettings(dataset="heart-synthetic"))
    weights = tmp_path / "weights.pt"
    weights.write_bytes(b"no weights")
    with pytest.raises(SettingError, match="not a weights file"):
        ready.refuse_by_first_silo(CommonSettings(silos=3, initial_weights=str(weights)))


def test_processes_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_free(free: float) -> None:
        monkeypatch.setattr(ready, "free_memory", lambda: free)

    with_free(1.7e9)
    ready.refuse_little_memory(RESOURCES)
    with_free(1.5e9)
    with pytest.raises(
        SettingError, match=r"4 processes, which need about 1.6 GB of memory, but 1.5 GB"
    ):
        ready.refuse_little_memory(RESOURCES)
    ready.refuse_little_memory(RESOURCES | {"num-supernodes": 3})
