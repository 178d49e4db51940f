"""The cores, memory and GPUs of this machine that simulated sites may use."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from fedsilo.core.errors import SettingError, unknown_key
from fedsilo.core.one_line import quote_value
from fedsilo.core.settings_schema import Value

RESOURCES: dict[str, Value] = {
    "num-supernodes": 2,
    "client-resources-num-cpus": 1,
    "client-resources-num-gpus": 0.0,
    "init-args-num-cpus": 0,
    "init-args-num-gpus": 0,
}
VISIBLE = "CUDA_VISIBLE_DEVICES"
_MOST = 1_000_000  # a larger number of any resource is a typing mistake
_ROOM = 2**30  # bytes of memory that a worker needs
_CGROUP = Path("/sys/fs/cgroup")


def check_resources(resources: Mapping[str, Value]) -> dict[str, Value]:
    """Check the computing resources for simulated sites, and add defaults for missing keys.

    The keys of ``RESOURCES`` are allowed, such as 'init-args-num-cpus'. Its values are the
    defaults. The result is a new mapping, in which given values are unchanged.

    Raises:
        SettingError: a key is not in ``RESOURCES``, or a value is not a number from 0 to 1,000,000.
            The number of sites, 'num-supernodes', must be at least 1. A bool is not a number.
    """
    for key, value in resources.items():
        if key not in RESOURCES:
            raise unknown_key(key, RESOURCES)
        least = 0
        if key == "num-supernodes":
            least = 1
        # True is an int in Python, but it is not a number of cores
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= float(value) <= _MOST:
            raise SettingError(
                f"resource '{key}' must be a number from {least} to {_MOST}, but is "
                f"{quote_value(value)}"
            )
    return RESOURCES | dict(resources)


def check_device(device: str, share: float) -> None:
    """Check that simulated sites will have the GPU that the setting 'machine.device' names.

    Each simulated site trains in a process that sees at most one GPU, as number 0. With the device
    "auto" and no share of a GPU, the sites train on the CPU. If PyTorch sees a GPU in that case, a
    warning is printed to stderr.

    Args:
        device: the setting 'machine.device'.
        share: the share of a GPU that each process gets, or 0 for none.

    Raises:
        SettingError: the device is "cuda:N" with N above 0, or a GPU is named but ``share`` is 0.
    """
    hint = (
        "set 'client-resources-num-gpus' in the experiment's 'resources' (0.5 for two clients at "
        "once), or take --engine inline"
    )
    fault = ""
    if device.startswith("cuda:") and device != "cuda:0":
        fault = (
            "a client process sees only the GPU that it is given, as number 0: set "
            f"'machine.device' to 'cuda', and {VISIBLE} to choose among GPUs"
        )
    elif device.startswith("cuda") and not share:
        fault = f"clients are given no GPU: {hint}"
    if fault:
        raise SettingError(f"setting 'machine.device' is '{device}', but {fault}")
    if device == "auto" and not share and has_gpu():
        print(
            f"fedsilo: this machine has a GPU, but clients train on the CPU: {hint}",
            file=sys.stderr,
        )


def has_gpu() -> bool:
    """Return whether PyTorch sees a GPU on this machine."""
    # Imported here, because it takes seconds and is needed only here
    import torch

    return torch.cuda.is_available()


def cores() -> int:
    """Return the number of CPU cores that this process may use, at least 1.

    Two limits are respected: the CPU affinity on Linux, and the CPU quota of the container. The
    quota is rounded to the nearest whole number of cores.
    """
    own = os.cpu_count() or 1
    # taskset and Slurm may leave a process fewer cores on Linux
    if sys.platform == "linux":
        own = len(os.sched_getaffinity(0))
    try:
        quota, period = map(int, (_CGROUP / "cpu.max").read_text().split())
        return max(1, min(own, round(quota / period)))
    except (OSError, ValueError):  # "max" is not a number: there is no limit
        return own


def free_memory() -> float:
    """Return the free memory in bytes of this machine, or of the container if that is less."""
    return min(psutil.virtual_memory().available, _free_container_memory())


def _free_container_memory() -> float:
    """Return the number of bytes of memory that this container may still use.

    Inactive page cache counts as free. The result is infinity if there is no limit, or if the limit
    cannot be read. The memory of the machine is not considered, and may be smaller.
    """
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        for line in (_CGROUP / "memory.stat").read_text().splitlines():
            name, value = line.split()
            # The kernel frees inactive page cache when memory is needed
            if name == "inactive_file":
                used -= int(value)
        return limit - used
    except (OSError, ValueError, KeyError):  # "max" is not a number: there is no limit
        return float("inf")


def worker_environments(resources: Mapping[str, Value]) -> list[dict[str, str]]:
    """Plan the worker processes that train simulated sites, and return their environments.

    The number of workers is the smallest of these limits, but at least 1:

    - the cores ('init-args-num-cpus') divided by the cores of a worker, rounded down. A worker has
      'client-resources-num-cpus' cores, but at least one,
    - the number of sites ('num-supernodes'),
    - one worker per GiB of free memory,
    - for each GPU, 1 / 'client-resources-num-gpus' workers, rounded down, but at least one. This
      limit needs a share above 0 and a GPU.

    Args:
        resources: all keys of ``RESOURCES`` with their values. For 'init-args-num-cpus' and
            'init-args-num-gpus', 0 stands for all.

    Returns:
        One mapping per worker, which sets only CUDA_VISIBLE_DEVICES. Workers get the GPUs in turn,
        one GPU each. If sites have no share of a GPU or the machine has no GPU, the value is empty,
        which hides all GPUs.
    """
    each = max(float(resources["client-resources-num-cpus"]), 1.0)
    # The smallest of four limits counts: cores, sites, memory and, further below, GPUs
    room = int((int(resources["init-args-num-cpus"]) or cores()) / each)
    room = min(room, int(resources["num-supernodes"]))
    room = max(1, int(min(room, free_memory() // _ROOM)))
    seats = [""] * room
    share = min(float(resources["client-resources-num-gpus"]), 1.0)
    if share:
        gpus = _list_gpus(int(resources["init-args-num-gpus"]))
        # Each GPU gets as many workers as it has shares
        if gpus:
            seats = gpus * int(1 / share)
    return [{VISIBLE: gpu} for gpu in seats[:room]]


def _list_gpus(most: int) -> list[str]:
    """List the identifiers of the GPUs that this process can see, for CUDA_VISIBLE_DEVICES.

    If the process has this variable, its entries are the identifiers. If the variable is empty or
    not set, they are "0", "1" and so on. PyTorch's count of GPUs limits the list. So the list is
    empty without a GPU.

    Args:
        most: the largest length of the list. 0 means no limit.
    """
    import torch

    # PyTorch counts only the GPUs that the variable names and that exist
    there = torch.cuda.device_count()
    names = []
    for gpu in os.environ.get(VISIBLE, "").split(","):
        if gpu.strip():
            names.append(gpu.strip())
    if not names:
        names = [str(number) for number in range(there)]
    return names[: min(most or there, there)]
