"""Explain that a site's GPU or machine has no memory left: who holds it, and what to lower."""

import re
import traceback
from collections.abc import Mapping

import torch
from flwr.app import Message

from fedsilo.client_app.site.node import build_settings
from fedsilo.client_app.training.compute import gpu_share
from fedsilo.core.errors import MemoryShortageError
from fedsilo.core.messages import TRAIN
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value

# Parts of the texts with which PyTorch and its libraries report a failed allocation. PyTorch's own
# allocator alone has a class of errors
_OF_GPU = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_OF_MACHINE = ("DefaultCPUAllocator", "Cannot allocate memory")
_GPU = re.compile(r"\bGPU (\d+)\b")
_WANTED = re.compile(r"Tried to allocate ([\d.]+ [KMG]iB)")
_GIB = 2**30


def raise_memory_shortage(
    error: Exception, run_config: Mapping[str, Value], message: Message, together: int = 1
) -> None:
    """Raise a one-line error if ``error`` says that no memory is left, and otherwise return.

    The new error's text has only amounts of memory, the GPU's number and the run's settings. So a
    hospital may send it.

    Args:
        error: the exception that ended a site's answer.
        run_config: the run's settings by key.
        message: the message that the site was answering; its type says whether the site was
            training.
        together: the number of sites that were trained as one batch.

    Raises:
        MemoryShortageError: the site's GPU or machine has no memory left.
    """
    settings = build_settings(CommonSettings, run_config)
    training = message.metadata.message_type == TRAIN
    shortage = memory_shortage(error, settings, training, together)
    if shortage:
        raise shortage from None


def memory_shortage(
    error: Exception, settings: CommonSettings, training: bool, together: int = 1
) -> MemoryShortageError | None:
    """Build the one-line error for a failed allocation of memory, and free what the work held.

    The result is None for any other error, and nothing is freed then. The local variables in the
    traceback of ``error`` are cleared. Otherwise the next site, or another process on the same GPU,
    would find the memory taken. The caller raises the result.

    Args:
        error: an exception of PyTorch, or Python's MemoryError.
        settings: the run's settings.
        training: whether the site was training. If not, the error does not advise smaller batches.
        together: the number of sites that were trained as one batch.
    """
    text = str(error)
    on_gpu = isinstance(error, torch.OutOfMemoryError) or any(part in text for part in _OF_GPU)
    on_machine = isinstance(error, MemoryError) or any(part in text for part in _OF_MACHINE)
    if not on_gpu and not on_machine:
        return None
    place, held, others = "this machine", "", 0.0
    if on_gpu:
        place, held, others = _describe_gpu(text)
    wanted, match = "", _WANTED.search(text)
    if match:
        wanted = f" for another {match[1]}"
    _free_memory_of(error)
    return MemoryShortageError(
        f"{place} has no memory left{wanted} in a run of method '{settings.method}'{held}: "
        f"{_remedy(settings, training, together, on_gpu, others)}"
    )


def _describe_gpu(text: str) -> tuple[str, str, float]:
    """Describe the GPU that an error names, and the processes that hold its memory now.

    Only the GPU's number comes from ``text``. The amounts of memory come from CUDA.

    Returns:
        Three values. The first is the GPU, such as "GPU 1", or "GPU 0" if the error names none. The
        second is a text with a leading space, such as " (of 80.0 GiB this process holds 12.0, other
        processes 60.0)". If this process may use only a share of the GPU, the text says so. The
        third is the share of the GPU, 0 to 1, that other processes hold. If CUDA gives no numbers,
        the text is "" and the share 0.
    """
    index, match = 0, _GPU.search(text)
    if match:
        index = int(match[1])
    place = f"GPU {index}"
    try:
        free, total = torch.cuda.mem_get_info(index)
        own = torch.cuda.memory_reserved(index)
    # Without room for a CUDA context, even this question fails
    except (RuntimeError, AssertionError, ValueError):
        return place, "", 0.0
    others = max(0, total - free - own)
    held = f"of {total / _GIB:.1f} GiB this process holds {own / _GIB:.1f}"
    if gpu_share() < 1:
        held += f", at most {gpu_share():g} of the GPU"
    return place, f" ({held}, other processes {others / _GIB:.1f})", others / total


def _remedy(
    settings: CommonSettings, training: bool, together: int, on_gpu: bool, others: float
) -> str:
    """Propose, in an instruction to the user, how the work can fit into memory.

    The advice is to start another run with one of these changes:

    - A larger share of the GPU, if the GPU is short of memory and this process may use only a part.
    - Fewer sites per batch, if several sites were trained as one batch.
    - Smaller batches, if a single site was training.
    - A smaller network or smaller images, if no site was training.
    - The CPU as the device, if the GPU is short of memory.

    If other processes hold more than half of the GPU, the first advice is to end them.

    Args:
        settings: the run's settings.
        training: whether the site was training.
        together: the number of sites that were trained as one batch.
        on_gpu: whether the GPU's memory is short, not the machine's.
        others: the share of the GPU that other processes hold, 0 to 1.
    """
    changes = []
    if on_gpu and gpu_share() < 1:
        changes.append("a larger 'client-resources-num-gpus', so that fewer processes share it")
    if together > 1:
        changes.append(f"'machine.vectorised' below {together}")
    elif training:
        changes += _smaller_steps(settings)
    else:
        changes += ["a smaller network", "smaller images"]
    if on_gpu:
        changes.append("'machine.device' cpu")
    # A resumed run has the settings that it began with, so lower ones need another run
    *first, last = changes
    remedy = f"start another run with {last}"
    if first:
        remedy = f"start another run with {', '.join(first)} or {last}"
    if others > 0.5:
        return f"end other programs on it ('nvidia-smi' lists them) and resume the run, or {remedy}"
    return remedy


def _smaller_steps(settings: CommonSettings) -> list[str]:
    """Name the settings that make an optimiser step smaller, with the values to stay below."""
    if settings.micro_batch:
        return [f"'train.micro-batch' below {settings.micro_batch}"]
    size = settings.batch_size
    return [f"'train.batch-size' below {size}", f"'train.micro-batch' below {size}"]


def _free_memory_of(error: BaseException) -> None:
    """Free the memory that failed work still holds, by clearing the error's traceback.

    The local variables of all functions in the traceback are cleared. The tracebacks of earlier
    errors that led to ``error`` are cleared too. Cached memory is returned to the GPU, if there is
    one.
    """
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__context__
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
