"""The check of a hospital's GPU: driver, PyTorch's build, bf16, memory, and one convolution."""

from collections.abc import Sequence

import torch

from fedsilo.server_app.doctor.findings import Passed, Refused, Skipped
from fedsilo.server_app.doctor.machine import GIGABYTE

_MIN_FREE = 2.0  # gigabytes: a context, the libraries' buffers, and a small network
_MAX_DIFFERENCE = 1e-2  # of a convolution from the CPU's; TF32 has 10 bits


def look(device: str) -> Passed:
    """Describe the device of a node config (auto, cpu, cuda or cuda:N) after one convolution.

    Raises:
        Refused: it cannot be used.
        Skipped: the CPU is meant, or there is no GPU and none is asked for.
    """
    if device == "cpu":
        raise Skipped("the node config's 'device' is cpu")
    if not torch.cuda.is_available():
        if device == "auto":
            raise Skipped("PyTorch finds no GPU, and 'device' is auto: the CPU is used")
        raise Refused(f"'device' is {device}, and {_why_none()}", "fix that, or set it to cpu")
    index = int(device.partition(":")[2] or 0)
    if index >= (count := torch.cuda.device_count()):
        raise Refused(f"'device' is {device}, and there are {count} GPUs", "count them from 0")
    capability = _built_for(index)
    free, total = (size / GIGABYTE for size in torch.cuda.mem_get_info(index))
    if free < _MIN_FREE:
        raise Refused(
            f"GPU {index} has {free:.1f} of {total:.1f} GB free, and a run needs at least "
            f"{_MIN_FREE:g}",
            "end what else runs there ('nvidia-smi' names it), or name another in 'device'",
        )
    if not (difference := _difference(index)) < _MAX_DIFFERENCE:
        raise Refused(
            f"a convolution on GPU {index} differs from the CPU's by {difference:g}",
            "update its driver; if it stays so the GPU is broken: set 'device' to cpu",
        )
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    return Passed(
        f"{torch.cuda.get_device_name(index)}, capability {capability}, {free:.1f} of {total:.1f} "
        f"GB free, {'native bf16' if native else 'no native bf16: runs in fp32'}",
        (f"PyTorch {torch.__version__} for CUDA {torch.version.cuda}",),
    )


def _why_none() -> str:
    """Return why PyTorch finds no GPU."""
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} was built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).partition(". ")[0].splitlines()[0]
    return "PyTorch finds no GPU"


def _built_for(index: int) -> str:
    """Return a GPU's capability in words; Refused if PyTorch was not built for it."""
    capability, built = torch.cuda.get_device_capability(index), torch.cuda.get_arch_list()
    in_words = ".".join(map(str, capability))
    if not is_built_for(capability, built):
        raise Refused(
            f"GPU {index} has capability {in_words}, and PyTorch {torch.__version__} was built for "
            f"{', '.join(built)}",
            "install a PyTorch that has it (pytorch.org/get-started), or set 'device' to cpu",
        )
    return in_words


def is_built_for(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Tell whether code for ``built``, such as sm_80 or compute_90, runs on such a GPU.

    Machine code (sm) runs on GPUs of the same major number and at least its minor one. Code that
    is compiled at first use (compute) runs on every later GPU.
    """
    for kind, _, digits in (name.partition("_") for name in built):
        number = int("".join(c for c in digits if c.isdigit()))  # some end in a letter: sm_90a
        code = divmod(number, 10)
        if code <= capability and (kind == "compute" or code[0] == capability[0]):
            return True
    return False


def _difference(index: int) -> float:
    """Return the largest relative difference of a convolution on the GPU from the CPU's."""
    torch.manual_seed(0)
    images, kernels = torch.randn(2, 3, 16, 16), torch.randn(4, 3, 3, 3)
    here = torch.nn.functional.conv2d(images, kernels)
    try:
        there = torch.nn.functional.conv2d(images.to(index), kernels.to(index)).cpu()
    except RuntimeError as error:
        fault = f"GPU {index} cannot compute a convolution ({str(error).splitlines()[0]})"
        raise Refused(fault, "update its driver, or set 'device' to cpu") from error
    return float((here - there).abs().max() / here.abs().max())
