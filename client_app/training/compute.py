"""Choose the device and the precision for a site, and how repeatable its results are.

'machine.deterministic' decides whether operations without a deterministic form are refused.
PyTorch reports them by a warning or an error when it meets one.
"""

import os
import re
import resource
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from fedsilo.client_app.training.freed_memory import keep_freed_memory
from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.settings.common_settings import GPU_SHARE, CommonSettings
from fedsilo.datasets.silo.silos import log_once
from fedsilo.models.networks.kinds import image_network
from fedsilo.models.networks.site_network import frozen_weights_in

_HELD = 2**31  # bytes; larger tensors are streamed to a GPU
# oneDNN with AVX2 writes beyond the memory of a strided 1 x 1 convolution of fewer than 8
# channels (PyTorch 2.15); these networks have no such layers
_CHANNELS_LAST_ON_CPU = ("conv", "vgg16-bn")
M = TypeVar("M", bound=nn.Module)
_BUFFERS = 2  # one buffer of a streamed tensor is filled while the other is copied


@dataclass(frozen=True)
class Compute:
    """A device and the precision of forward passes on it."""

    device: torch.device  # the device of tensors
    bf16: bool  # whether forward passes use bf16 autocast
    fp16: bool = False  # whether they use fp16 autocast, with a scaled loss
    # Whether images and convolutions store a pixel's channels together in memory
    channels_last: bool = False

    def autocast(self) -> torch.autocast:
        """Return the autocast context for forward passes; it does nothing in fp32."""
        half = torch.bfloat16
        if self.fp16:
            half = torch.float16
        return torch.autocast(self.device.type, dtype=half, enabled=self.bf16 or self.fp16)

    def convert_frozen(self, network: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which a network's frozen weights are in half precision.

        Autocast, PyTorch's use of bf16 or fp16, would convert these weights in each step. The
        context converts them once, with the same results, and restores them at its end. In fp32 it
        does nothing.
        """
        if self.fp16:
            return frozen_weights_in(network, torch.float16)
        if self.bf16:
            return frozen_weights_in(network, torch.bfloat16)
        return nullcontext()

    def exact(self) -> Self:
        """Return a copy with fp32 on the same device, for explanations and embeddings."""
        return replace(self, bf16=False, fp16=False)

    def scaler(self) -> GradScaler:
        """Return a new loss scaler, which keeps fp16 gradients from vanishing.

        In other precisions the scaler does nothing. Each training has its own scaler, whose scale
        is not stored. The first scale is 2^10. With PyTorch's 2^16, the first steps of each round
        would overflow and be skipped.
        """
        return GradScaler(self.device.type, init_scale=2.0**10, enabled=self.fp16)

    def place(self, network: M) -> M:
        """Move a network to the device, in its memory format; return it."""
        placed = network.to(self.device)
        if self.channels_last:
            placed = placed.to(memory_format=torch.channels_last)
        return placed

    def bring(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device of this ``Compute``, and images in its memory format.

        Images are tensors with 4 dimensions. In the format channels last, the channels of a pixel
        are stored together. In the other format, the layout does not change.
        """
        if not self.channels_last or tensor.ndim != 4:
            return tensor.to(self.device)
        if self.device.type == "cpu":
            return tensor.contiguous(memory_format=torch.channels_last)
        # The GPU rearranges the pixels itself. On one CPU core this takes longer than the copy
        return tensor.to(self.device).contiguous(memory_format=torch.channels_last)

    def hold(self, tensor: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that maps row indices (n,) to those rows of ``tensor``, on the device.

        On a CPU the function indexes the tensor. On a GPU, a tensor of at most 2 GiB is copied
        there once, and rows of a larger tensor are copied batch by batch.
        """
        # On a CPU the rows are in memory already, so plain indexing is enough
        if self.device.type != "cuda":
            return self.bring(tensor).__getitem__
        if tensor.nbytes > _HELD:
            return Streamed(tensor, self.device).pick
        resident = self.bring(tensor)
        return lambda rows: resident[rows.pin_memory().to(self.device, non_blocking=True)]

    def peak_memory(self) -> int:
        """Return the peak memory in bytes: on a GPU that of PyTorch, on a CPU that of the process.

        On a GPU the peak counts from the start of the site's current answer. On a CPU it counts
        from the start of the process.
        """
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if sys.platform == "darwin":  # macOS reports bytes, Linux kilobytes
            return peak
        return peak * 1024


def scaled_step(optimisers: Sequence[Optimizer], scaler: GradScaler) -> bool:
    """Unscale the gradients in place, step all optimisers, and adapt the scale of the loss.

    An optimiser with a gradient that is not finite takes no step, but the other optimisers do. The
    scale is then halved. After many finite steps PyTorch raises it again. If the scaler is
    disabled, every optimiser takes its step.

    Returns:
        False if the scale was lowered because a gradient was not finite; otherwise True.
    """
    for optimiser in optimisers:
        scaler.unscale_(optimiser)  # code after the step must see the unscaled gradients
        scaler.step(optimiser)
    before = scaler.get_scale()
    scaler.update()
    return scaler.get_scale() >= before


def choose_compute(
    device: str,
    precision: str,
    threads: int,
    deterministic: str = "warn",
    memory_format: str = "auto",
) -> Compute:
    """Choose the device, precision and memory format for this process.

    The call also changes global state. It sets PyTorch's thread count, on which the results depend,
    and it lets freed memory stay in the process. On a GPU it also sets PyTorch's deterministic
    mode, and limits this process's share of the GPU's memory if the simulation shares the GPU. A
    line is logged if 'bf16' is chosen on a GPU that only emulates it.

    Args:
        device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N".
        precision: "auto" (bf16 on GPUs that have it, else fp32), "bf16", "fp16" or "fp32".
        threads: the number of CPU threads.
        deterministic: "true" refuses operations without a deterministic form, "warn" logs their
            names, and "false" allows them.
        memory_format: "auto" (channels last on a GPU), "channels-last" or "contiguous".

    Raises:
        SettingError: the device is unknown, the GPU does not exist, or 'fp16' is set without a GPU.
    """
    torch.set_num_threads(threads)
    keep_freed_memory()
    kind, index = _device_parts(device)
    usable = 0
    if torch.cuda.is_available():
        usable = torch.cuda.device_count()
    if kind == "cuda" and index >= usable:
        raise SettingError(
            f"setting 'machine.device' is '{device}', but this machine has "
            f"{usable or 'no'} usable GPU; use auto or cpu"
        )
    # "auto" without a GPU is fine; "cuda" without one was refused above
    use_gpu = kind == "cuda" or (kind == "auto" and usable > 0)
    if use_gpu:
        _be_repeatable(precision, deterministic)
    if precision == "fp16" and not use_gpu:
        raise SettingError(
            "setting 'machine.precision' is 'fp16', but this site computes on its CPU: set it to "
            "'bf16', 'fp32' or 'auto'"
        )
    chosen = torch.device("cpu")
    if use_gpu:
        chosen = torch.device(f"cuda:{index}")
        share = gpu_share()
        if 0 < share < 1:
            torch.cuda.set_per_process_memory_fraction(share, chosen)
    native = False
    if use_gpu:
        # PyTorch answers for the current GPU, which may be another kind
        with torch.cuda.device(index):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "bf16" and use_gpu and not native:
        log_once(
            f"{chosen} only emulates bf16, which is slower than fp32: set 'machine.precision' to "
            "'fp16', 'fp32' or 'auto'"
        )
    bf16 = precision == "bf16" or (precision == "auto" and native)
    last = memory_format == "channels-last" or (memory_format == "auto" and use_gpu)
    return Compute(chosen, bf16, fp16=precision == "fp16", channels_last=last)


def _device_parts(device: str) -> tuple[str, int]:
    """Split a device such as "cuda:1" into its kind and its index.

    The index is 0 if the text has none, as in "cpu". Whether the device exists is not checked.

    Raises:
        SettingError: the device is not "auto", "cpu", "cuda" or "cuda:N".
    """
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdigit())):
        raise SettingError(
            f"setting 'machine.device' is '{device}'; it must be auto, cpu, cuda or cuda:N"
        )
    return kind, int(index or 0)


def compute_of(settings: CommonSettings) -> Compute:
    """Choose the device, precision and memory format that the run's settings ask for at this site.

    ``choose_compute`` makes the choice, and also sets global state of PyTorch, such as the number
    of threads. On a CPU, memory format 'auto' means channels last for the networks 'conv' and
    'vgg16-bn', and contiguous for all others. PyTorch may fail on a CPU if others have channels
    last.

    Raises:
        SettingError: ``choose_compute`` refuses a setting, or 'channels-last' is set on a CPU for
            another network.
    """
    wanted, network = settings.memory_format, image_network(settings)
    safe = network in _CHANNELS_LAST_ON_CPU
    if wanted == "auto" and safe:
        wanted = "channels-last"
    compute = choose_compute(
        settings.device, settings.precision, settings.threads, settings.deterministic, wanted
    )
    if compute.channels_last and compute.device.type == "cpu" and not safe:
        raise SettingError(
            "setting 'machine.memory-format' is 'channels-last', but this site computes on its "
            f"CPU, where PyTorch may fail in layers of network '{network}': set it to 'auto'"
        )
    return compute


def gpu_share() -> float:
    """Return the fraction of a GPU's memory that this process may use; 1 means all of it.

    A simulation sets this fraction for each of its processes, in the environment variable
    FEDSILO_GPU_SHARE. If the variable is missing or is not a number, the result is 1. The range of
    the number is not checked.
    """
    try:
        return float(os.environ.get(GPU_SHARE, "1"))
    except ValueError:
        return 1.0


def _be_repeatable(precision: str, deterministic: str) -> None:
    """Set PyTorch's global switches for deterministic CUDA operations and cuDNN's TF32.

    Args:
        precision: 'machine.precision'; "fp32" turns TF32 off in cuDNN, and any other value turns it
            on.
        deterministic: "true" makes PyTorch refuse non-deterministic operations, and "warn" makes it
            give a warning instead. "false" allows them and lets cuDNN choose its fastest kernels.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    wanted = deterministic != "false"
    torch.use_deterministic_algorithms(wanted, warn_only=deterministic == "warn")
    # No code may read uninitialised memory, and filling it would cost a pass over it
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not wanted
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


_SAID = re.compile(
    r"(\S+) does not have a deterministic implementation"
    # Attention, which has another algorithm if 'machine.deterministic' is 'true'
    r"|(.+?) defaults to a non-deterministic algorithm"
)


_PLAIN = re.compile(r"[^A-Za-z0-9_.-]")


@contextmanager
def collect_unrepeatable_operations(
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[set[str]]:
    """Yield a set that collects the names of non-deterministic operations used in the block.

    The names come from PyTorch's warnings, which are not shown. Other warnings are shown as usual.

    Args:
        report: called once with a line that lists the names, if the block has ended without an
            error and the set is not empty.

    Raises:
        SiteError: PyTorch refuses an operation, because 'machine.deterministic' is 'true'. Other
            errors of the block pass unchanged.
    """
    found: set[str] = set()
    pass_on, always = warnings.showwarning, torch.is_warn_always_enabled()

    def note(message: Warning | str, *where: Any, **more: Any) -> None:
        operation = _operation(str(message))
        if operation:
            found.add(operation)
        else:
            pass_on(message, *where, **more)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_SAID.pattern)
        warnings.showwarning = note
        torch.set_warn_always(True)  # otherwise attention is named only once per process
        try:
            yield found
        except RuntimeError as error:
            if operation := _operation(str(error)):
                raise SiteError(
                    f"'{operation}' has no deterministic form on this device, but "
                    "'machine.deterministic' is 'true': set it to 'warn', which names such "
                    "operations"
                ) from None
            raise
        finally:
            torch.set_warn_always(always)
    if found:
        names = ", ".join(sorted(found))
        report(
            "results differ each time, because these operations have no deterministic form on "
            f"this device: {names}"
        )


def _operation(text: str) -> str:
    """Return the name of the non-deterministic operation that a message of PyTorch reports.

    ``text`` is a warning or an error. The result is "" if it reports none. Any character of the
    name that is not a letter, digit, '_', '.' or '-' becomes '-'. Dashes at the start of the name
    are removed, and the name is cut at 100 characters.
    """
    match = _SAID.match(text)
    return _PLAIN.sub("-", match[1] or match[2]).lstrip("-")[:100] if match else ""


class Streamed:
    """A tensor that is too large for the GPU; batches are copied to it from two pinned buffers.

    Pinning costs as much as a copy, so it is done once per buffer instead of once per batch. A
    buffer is filled again only after its earlier content has arrived.
    """

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self._tensor = tensor
        self._device = device
        self._buffers: list[Tensor] = []
        self._arrived: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self._turn = 0

    def pick(self, rows: Tensor) -> Tensor:
        """Copy the rows of the tensor with these indices (n,) to the device, and return the copy.

        Images get the layout channels last. The function returns before a copy to a GPU has
        finished. Two buffers take turns, so that one can be filled while the other is copied. The
        buffers grow if a call asks for more rows than they hold.
        """
        turn = self._turn = (self._turn + 1) % _BUFFERS
        # Both copies must have arrived before the buffers are replaced by larger ones
        if not self._buffers or len(rows) > len(self._buffers[0]):
            self._wait(*range(_BUFFERS))
            self._buffers = [self._buffer(len(rows)) for _ in range(_BUFFERS)]
        self._wait(turn)
        batch = self._buffers[turn][: len(rows)]
        batch.copy_(self._tensor[rows])
        moved = batch.to(self._device, non_blocking=True)
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            # Without a stream it would be recorded on the current GPU, perhaps another one
            event.record(torch.cuda.current_stream(self._device))
            self._arrived[turn] = event
        if moved.data_ptr() == batch.data_ptr():  # nothing was copied on the CPU
            return moved.clone()
        return moved

    def _buffer(self, rows: int) -> Tensor:
        shape = (rows, *self._tensor.shape[1:])
        layout = torch.contiguous_format
        if len(shape) == 4:  # images
            layout = torch.channels_last
        pinned = self._device.type == "cuda"
        kind = self._tensor.dtype
        return torch.empty(shape, dtype=kind, pin_memory=pinned, memory_format=layout)

    def _wait(self, *turns: int) -> None:
        for turn in turns:
            event = self._arrived[turn]
            if event:
                event.synchronize()
