"""Devices under Ray, which gives each client its own view of the GPUs."""

import pytest
import torch

from fedsilo.models.contract.errors import SettingError
from fedsilo.server_app.run.ray_engine import _check_device


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_gpu_by_number_is_refused_with_the_reason(share: float) -> None:
    with pytest.raises(SettingError, match="'cuda:1': under Ray a client sees only the GPU"):
        _check_device("cuda:1", share)


def test_a_gpu_that_clients_get_no_share_of_is_refused_with_the_mend() -> None:
    for device in ("cuda", "cuda:0"):
        with pytest.raises(SettingError, match="'client-resources-num-gpus' in the experiment"):
            _check_device(device, 0.0)
        _check_device(device, 0.5)


@pytest.mark.parametrize("there", [True, False])
def test_a_gpu_that_is_seen_and_not_used_is_told(
    there: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    _check_device("auto", 0.0)
    assert ("there is a GPU, and clients train on the CPU" in capsys.readouterr().err) == there
    _check_device("auto", 0.5)
    _check_device("cpu", 0.0)
    assert capsys.readouterr().err == ""
