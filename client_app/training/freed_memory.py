"""What glibc does with memory that a process has freed; without effect where it is another library.

Otherwise it decides by itself, and returns to the system what the next step takes again.
"""

import ctypes

# glibc's numbers of M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, and bytes; the second is its upper limit
_KEPT = {-1: 2**26, -3: 2**25}


def keep_freed_memory() -> None:
    """Have glibc keep up to 64 MiB that this process has freed for what it allocates next.

    A training step on a CPU frees and allocates the same activations each time. Otherwise glibc
    returns them to the system, which clears every page that it gives again: a tenth of a step.
    """
    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):
        for option, bytes_ in _KEPT.items():
            set_option(option, bytes_)


def return_freed_memory() -> None:
    """Have glibc return all that this process has freed to the system."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
