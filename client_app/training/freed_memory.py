"""Control how glibc keeps freed memory; no effect with another C library.

By default glibc decides itself, and returns memory to the system that the next step needs again.
"""

import ctypes

# Bytes by glibc's numbers for M_TRIM_THRESHOLD and M_MMAP_THRESHOLD.
# The second is at the highest value that glibc accepts
_KEPT = {-1: 2**26, -3: 2**25}


def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed memory for the next allocations of this process.

    A training step on a CPU frees and allocates the same activations each time. By default glibc
    returns this memory to the system. The system clears each page before the next use, which takes
    a tenth of a step's time. Without ``mallopt`` in the C library nothing is changed.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option:
        for option, bytes_ in _KEPT.items():
            set_option(option, bytes_)


def return_freed_memory() -> None:
    """Let glibc return all freed memory of this process to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
