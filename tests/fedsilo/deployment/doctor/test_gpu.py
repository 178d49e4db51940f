"""A GPU that PyTorch cannot use is named with why; the rest is tried on machines that have one."""

import pytest
import torch

from fedsilo.deployment.doctor import gpu
from fedsilo.deployment.doctor.findings import Failed, Passed, Refused, Skipped

WHEELS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")


@pytest.mark.parametrize(
    ("capability", "built", "fits"),
    [
        ((9, 0), WHEELS, True),
        ((8, 9), WHEELS, True),  # by the code of 8.6
        ((7, 0), WHEELS, False),
        ((6, 1), WHEELS, False),
        ((12, 1), WHEELS, True),
        ((13, 0), WHEELS, True),  # compiled when it is first used
        ((13, 0), WHEELS[:-1], False),
        ((9, 0), ("sm_90a",), True),
        ((9, 0), (), False),
    ],
)
def test_machine_code_fits_its_major_number_and_compiled_code_later_ones(
    capability: tuple[int, int], built: tuple[str, ...], fits: bool
) -> None:
    assert gpu.is_built_for(capability, built) is fits


def test_the_cpu_is_no_gpu_to_look_at() -> None:
    with pytest.raises(Skipped, match="'device' is cpu"):
        gpu.check_gpu("cpu")


def _machine(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Let PyTorch say that it has one GPU of capability 9.0, of which so many bytes are free."""
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_arch_list": list(WHEELS),
        "mem_get_info": (free, 80 * 10**9),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


def test_a_gpu_without_room_and_one_too_many_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, 10**9)
    with pytest.raises(Refused, match=r"GPU 0 has 1.0 of 80.0 GB free.*nvidia-smi"):
        gpu.check_gpu("auto")
    found = gpu.check_gpu("cuda:1")
    assert isinstance(found, Failed)
    assert found.said == "'device' is cuda:1, but PyTorch finds only 1 GPUs"


def test_wheels_without_code_for_a_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, 10**10)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (6, 1))
    with pytest.raises(Refused, match=r"capability 6.1, but PyTorch .* was built for sm_75"):
        gpu.check_gpu("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_skipped_and_cuda_refused() -> None:
    with pytest.raises(Skipped, match="the CPU is"):
        gpu.check_gpu("auto")
    found = gpu.check_gpu("cuda")
    assert isinstance(found, Failed)
    assert "use the cpu" in found.fix


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_told_by_name_after_a_convolution() -> None:
    found = gpu.check_gpu("cuda")
    assert isinstance(found, Passed)
    assert torch.cuda.get_device_name(0) in found.said
    assert "bf16" in found.said
