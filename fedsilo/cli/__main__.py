"""``python -m fedsilo.cli``: the ``fedsilo`` command of this checkout."""

import gc
import sys

from fedsilo.cli.main import main


def run() -> None:
    """Run the command line as a process of its own, and end with its exit code.

    The garbage collector runs less often, and not at the end, because it took a third of the time
    of PyTorch's import and found nothing. If Triton was imported (by timm), it also runs at the
    end; otherwise Triton's bindings print 30 lines of "leaks" for objects that remain.
    """
    gc.set_threshold(20_000)
    try:
        code = main()
    finally:
        if "triton" not in sys.modules:
            gc.freeze()
    sys.exit(code)


if __name__ == "__main__":
    run()
