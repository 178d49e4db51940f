"""What simulated sites may use of this machine: cores, memory and GPUs."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.one_line import shown
from fedsilo.models.contract.settings_schema import Value, unknown_key

RESOURCES: dict[str, Value] = {
    "num-supernodes": 2,
    "client-resources-num-cpus": 1,
    "client-resources-num-gpus": 0.0,
    "init-args-num-cpus": 0,
    "init-args-num-gpus": 0,
}
VISIBLE = "CUDA_VISIBLE_DEVICES"
_MOST = 1_000_000  # of any resource
_ROOM = 2**30  # bytes of memory that a worker needs
_CGROUP = Path("/sys/fs/cgroup")


def check_resources(resources: Mapping[str, Value]) -> dict[str, Value]:
    """Return the resources, with defaults for those not given; SettingError for a wrong one."""
    for key, value in resources.items():
        if key not in RESOURCES:
            raise unknown_key(key, RESOURCES)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
            raise SettingError(
                f"resource '{key}' is {shown(value)}; it must be a number, at least 0 and at most "
                f"{_MOST}"
            )
    chosen = RESOURCES | dict(resources)
    if int(chosen["num-supernodes"]) < 1:
        raise SettingError("resource 'num-supernodes' is 0; at least one simulated site is needed")
    return chosen


def check_device(device: str, share: float) -> None:
    """Warn of a GPU that clients will not see, and refuse one by number: engines number them.

    Raises:
        SettingError: the device cannot be used by several processes.
    """
    if device.startswith("cuda:") and device != "cuda:0":
        raise SettingError(
            f"setting 'device' is '{device}': a client in a process of its own sees only the GPU "
            f"that it is given, as number 0; set 'device' to 'cuda', and {VISIBLE} to choose "
            "among GPUs"
        )
    if share:
        return
    hint = (
        "set 'client-resources-num-gpus' in the experiment's 'resources' (0.5 for two clients at "
        "once), or take --engine inline"
    )
    if device.startswith("cuda"):
        raise SettingError(f"setting 'device' is '{device}', and clients are given no GPU: {hint}")
    if device == "auto" and has_gpu():
        print(f"fedsilo: there is a GPU, and clients train on the CPU: {hint}", file=sys.stderr)


def has_gpu() -> bool:
    """Return whether PyTorch sees a GPU here."""
    import torch  # takes seconds, and is needed only here

    return torch.cuda.is_available()


def cores() -> int:
    """Return the number of cores that this process may use, also within the container's limit."""
    own = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = map(int, (_CGROUP / "cpu.max").read_text().split())
        return max(1, min(own, round(quota / period)))
    except (OSError, ValueError):  # "max" is not a number: there is no limit
        return own


def free_memory() -> float:
    """Return the bytes of memory that are free, also within the container's limit."""
    return min(psutil.virtual_memory().available, _left_in_container())


def _left_in_container() -> float:
    """Return the bytes that the container may still use, or infinity if it has no limit."""
    try:
        limit, used, statistics = (
            (_CGROUP / f"memory.{name}").read_text() for name in ("max", "current", "stat")
        )
        cached = dict(line.split() for line in statistics.splitlines())["inactive_file"]
        return int(limit) - int(used) + int(cached)  # the page cache makes room
    except (OSError, ValueError, KeyError):  # "max" is not a number: there is no limit
        return float("inf")


def worker_environments(resources: Mapping[str, Value]) -> list[dict[str, str]]:
    """Return the variables of each worker of this machine: as many as fit, at most one per site.

    Cores, free memory and, if sites are given a share of a GPU, the GPUs are the limits. Each
    worker sees one GPU then, and otherwise none. ``resources`` have been checked.
    """
    each = max(float(resources["client-resources-num-cpus"]), 1.0)
    room = int((int(resources["init-args-num-cpus"]) or cores()) / each)
    room = min(room, int(resources["num-supernodes"]))
    room = max(1, int(min(room, free_memory() // _ROOM)))
    share = min(float(resources["client-resources-num-gpus"]), 1.0)
    gpus = _gpus(int(resources["init-args-num-gpus"])) if share else []
    seats = gpus * int(1 / share) if gpus else [""] * room
    return [{VISIBLE: gpu} for gpu in seats[:room]]


def _gpus(most: int) -> list[str]:
    """Return the GPUs that are there and may be used, at most so many, or all if that is 0."""
    import torch

    there = torch.cuda.device_count()
    named = [gpu.strip() for gpu in os.environ.get(VISIBLE, "").split(",") if gpu.strip()]
    return (named or [str(number) for number in range(there)])[: min(most or there, there)]
