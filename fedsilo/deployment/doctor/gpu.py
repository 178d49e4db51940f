"""Checks a hospital's GPU: driver, PyTorch's build, bf16, memory, and one convolution."""

from collections.abc import Sequence

import torch

from fedsilo.deployment.doctor.findings import Failed, Passed, Refused, require
from fedsilo.deployment.doctor.machine import GIGABYTE

_MIN_FREE = 2.0  # gigabytes for a CUDA context, the libraries' buffers, and a small network
_MAX_DIFFERENCE = 1e-2  # largest relative difference from the CPU; TF32 has only 10 bits


def check_gpu(device: str) -> Passed | Failed:
    """Check that PyTorch can compute on the GPU that a node config names, and describe the GPU.

    PyTorch must be built for the GPU, and 2 GB of its memory must be free. A convolution on the GPU
    must agree with the CPU's result within 1 %. Its random input sets the seed of PyTorch's global
    generator to 0.

    Args:
        device: auto, cpu, cuda or cuda:N. Other forms are not refused here. auto and cuda mean the
            first GPU.

    Returns:
        ``Passed`` with the GPU's name, compute capability, free memory and support of bf16.
        ``Failed`` if PyTorch does not find the GPU, or if the convolution's result is wrong.

    Raises:
        Refused: PyTorch was not built for the GPU, less than 2 GB are free, or the convolution
            cannot be computed at all.
        Skipped: the device is cpu, or it is auto and PyTorch finds no GPU.
    """
    require(device != "cpu", "the node config's 'device' is cpu")
    if not torch.cuda.is_available():
        require(device != "auto", "PyTorch finds no GPU and 'device' is auto, so the CPU is used")
        return Failed(f"'device' is {device}, but {_why_none()}", "fix that, or use the cpu")
    index = int(device.partition(":")[2] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        return Failed(
            f"'device' is {device}, but PyTorch finds only {count} GPUs",
            "name one of them, counted from 0",
        )
    # The order is that of the remedies: another PyTorch, other programs, another driver
    capability = _built_for(index)
    memory = _free_memory(index)
    difference = _difference(index)
    if not difference < _MAX_DIFFERENCE:  # "not", so that NaN is refused too
        return Failed(
            f"a convolution on GPU {index} differs from the CPU's by {difference:g}",
            "update its driver; if that does not help, the GPU is broken: set 'device' to cpu",
        )
    precision = "no native bf16: runs in fp32"
    # PyTorch answers for the current GPU, which may be another kind
    with torch.cuda.device(index):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            precision = "native bf16"
    return Passed(
        f"{torch.cuda.get_device_name(index)}, capability {capability}, {memory}, {precision}",
        (f"PyTorch {torch.__version__} for CUDA {torch.version.cuda}",),
    )


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text; the error's type if it has no text."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0]


def _why_none() -> str:
    """Explain in a clause that PyTorch finds no GPU, and for which reason.

    If PyTorch was built without CUDA, the clause says so. Otherwise CUDA is initialised, and the
    clause is the first sentence of the error message. If there is no error, it is "PyTorch finds
    no GPU".
    """
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} was built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return _first_line(error).partition(". ")[0]
    return "PyTorch finds no GPU"


def _free_memory(index: int) -> str:
    """Describe the free memory of GPU ``index``, as in "30.1 of 80.0 GB free".

    Raises:
        Refused: less than 2 GB are free.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    free, total = free_bytes / GIGABYTE, total_bytes / GIGABYTE
    said = f"{free:.1f} of {total:.1f} GB free"
    if free < _MIN_FREE:
        raise Refused(
            f"GPU {index} has {said}, but a run needs at least {_MIN_FREE:g} GB",
            "end other programs on it ('nvidia-smi' lists them), or name another GPU in 'device'",
        )
    return said


def _built_for(index: int) -> str:
    """Check that PyTorch was built for a GPU, and return the GPU's compute capability.

    The result is text, such as "8.0". ``index`` is the GPU's number, counted from 0.

    Raises:
        Refused: the installed PyTorch was built only for other capabilities.
    """
    # An old or very new GPU is found, but no kernel of this PyTorch build runs on it
    capability, built = torch.cuda.get_device_capability(index), torch.cuda.get_arch_list()
    in_words = ".".join(map(str, capability))
    if not is_built_for(capability, built):
        raise Refused(
            f"GPU {index} has capability {in_words}, but PyTorch {torch.__version__} was built for "
            f"{', '.join(built)}",
            "install a PyTorch build that supports it (pytorch.org/get-started), or set 'device' "
            "to cpu",
        )
    return in_words


def is_built_for(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Return whether a PyTorch that was built for certain GPUs can run on a given GPU.

    Machine code (sm) runs on GPUs with the same major number and an equal or higher minor number.
    Code that is compiled at first use (compute) also runs on every later GPU.

    Args:
        capability: the GPU's compute capability: its major and minor number.
        built: the targets that PyTorch was built for, such as "sm_80" or "compute_90".
    """
    for name in built:
        kind, _, digits = name.partition("_")
        # Some names end in a letter: sm_90a. The last digit is the minor number: 90 is 9.0
        number = int("".join(c for c in digits if c.isdigit()))
        major, minor = divmod(number, 10)
        if (major, minor) > capability:
            continue
        if kind == "compute" or major == capability[0]:
            return True
    return False


def _difference(index: int) -> float:
    """Compute how much a convolution on a GPU differs from the same convolution on the CPU.

    The result is the largest absolute difference, divided by the largest absolute value of the
    CPU's result. The images and kernels are random, with 0 as the seed of PyTorch's global
    generator. The generator's state is not restored.

    Args:
        index: the GPU's number, counted from 0.

    Raises:
        Refused: the GPU cannot compute the convolution, for example because of an old driver.
    """
    torch.manual_seed(0)
    images, kernels = torch.randn(2, 3, 16, 16), torch.randn(4, 3, 3, 3)
    here = torch.nn.functional.conv2d(images, kernels)
    # A kernel runs only now: a driver that does not fit PyTorch's build fails here, not before
    try:
        there = torch.nn.functional.conv2d(images.to(index), kernels.to(index)).cpu()
    except RuntimeError as error:
        fault = f"GPU {index} cannot compute a convolution ({_first_line(error)})"
        raise Refused(fault, "update its driver, or set 'device' to cpu") from error
    return float((here - there).abs().max() / here.abs().max())
