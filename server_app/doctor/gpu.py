"""A hospital's GPU: driver, what PyTorch's wheels were built for, bf16, memory, one convolution."""

from __future__ import annotations

from collections.abc import Sequence

from fedsilo.server_app.doctor.findings import Passed, Refused, Skipped
from fedsilo.server_app.doctor.machine import GIGABYTE

_LEAST = 2.0  # gigabytes: a context, its libraries' buffers, and a small network
_APART = 1e-2  # of a convolution here and on the CPU; TF32 has 10 bits


def look(device: str) -> Passed:
    """Say what the device of a node config is, after one convolution on it.

    Args:
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        Refused: it cannot be used, and why.
        Skipped: the CPU is meant, or there is no GPU and none is asked for.
    """
    if device == "cpu":
        raise Skipped("the node config's 'device' is cpu")
    import torch

    if not torch.cuda.is_available():
        if device == "auto":
            raise Skipped("no GPU that PyTorch can use is here, and 'device' is auto: the CPU is")
        raise Refused(f"'device' is {device}, and {_why_none()}", "mend that, or set it to cpu")
    index = int(device.partition(":")[2] or 0)
    if index >= (count := torch.cuda.device_count()):
        raise Refused(f"'device' is {device}, and there are {count} GPUs", "count them from 0")
    _refuse_unbuilt(index)
    free, whole = (size / GIGABYTE for size in torch.cuda.mem_get_info(index))
    if free < _LEAST:
        raise Refused(
            f"GPU {index} has {free:.1f} of {whole:.1f} GB free, and a run takes {_LEAST:g} at "
            "least",
            "end what else runs there ('nvidia-smi' names it), or name another in 'device'",
        )
    apart = _convolution_apart(index)
    if not apart < _APART:
        raise Refused(
            f"a convolution on GPU {index} is {apart:g} from the CPU's",
            "update its driver; if it stays so the GPU is broken: set 'device' to cpu",
        )
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
    return Passed(
        f"{torch.cuda.get_device_name(index)}, capability {capability}, {free:.1f} of {whole:.1f} "
        f"GB free, {'native bf16' if native else 'no native bf16: runs in fp32'}",
        (f"PyTorch {torch.__version__} for CUDA {torch.version.cuda}",),
    )


def _why_none() -> str:
    """Say why PyTorch finds no GPU."""
    import torch

    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} was built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).partition(". ")[0].splitlines()[0]
    return "PyTorch finds no GPU"


def _refuse_unbuilt(index: int) -> None:
    """Refuse a GPU of a capability that the installed wheels hold no code for."""
    import torch

    capability, built = torch.cuda.get_device_capability(index), torch.cuda.get_arch_list()
    if not is_built_for(capability, built):
        raise Refused(
            f"GPU {index} has capability {capability[0]}.{capability[1]}, and PyTorch "
            f"{torch.__version__} was built for {', '.join(built)}",
            "install a PyTorch that has it (pytorch.org/get-started), or set 'device' to cpu",
        )


def is_built_for(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Tell whether code of ``built``, such as sm_80 or compute_90, runs on such a GPU.

    Machine code ('sm') runs on the same major number from its minor one on; what is compiled when
    it is first used ('compute') on any later GPU.
    """
    for kind, _, digits in (name.partition("_") for name in built):
        number = int("".join(c for c in digits if c.isdigit()))  # some end in a letter: sm_90a
        code = divmod(number, 10)
        same = code[0] == capability[0] or kind == "compute"
        if same and code <= capability:
            return True
    return False


def _convolution_apart(index: int) -> float:
    """Return by how much one convolution there differs from the CPU's, at most.

    Raises:
        Refused: it cannot be computed.
    """
    import torch

    torch.manual_seed(0)
    images, kernels = torch.randn(2, 3, 16, 16), torch.randn(4, 3, 3, 3)
    here = torch.nn.functional.conv2d(images, kernels)
    try:
        there = torch.nn.functional.conv2d(images.to(index), kernels.to(index)).cpu()
    except RuntimeError as error:
        fault = f"GPU {index} cannot compute a convolution ({str(error).splitlines()[0]})"
        raise Refused(fault, "update its driver, or set 'device' to cpu") from error
    return float((here - there).abs().max() / here.abs().max())
