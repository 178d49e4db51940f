"""``python -m fedsilo.cli``: the ``fedsilo`` command of this checkout."""

import gc
import io
import sys

from fedsilo.cli.main import main
from fedsilo.core.files.atomic_files import STANDARD_OUTPUT, naming


class _NamedOutput(io.TextIOWrapper):
    """Standard output that names itself in its errors.

    The system's errors do not name the file that is full.
    """

    def write(self, text: str) -> int:
        with naming(STANDARD_OUTPUT):
            return super().write(text)

    def flush(self) -> None:
        with naming(STANDARD_OUTPUT):
            super().flush()


def run() -> None:
    """Run the command line as a process of its own, and end with its exit code.

    The garbage collector runs less often, and not at the end, because it took a third of the time
    of PyTorch's import and found nothing. If Triton was imported (by timm), it also runs at the
    end; otherwise Triton's bindings print 30 lines of "leaks" for objects that remain.
    """
    gc.set_threshold(20_000)
    if isinstance(sys.stdout, io.TextIOWrapper):
        usual = sys.stdout
        encoding, errors = usual.encoding, usual.errors
        by_line, at_once = usual.line_buffering, usual.write_through
        sys.stdout = _NamedOutput(usual.detach(), encoding, errors, None, by_line, at_once)
    try:
        code = main()
    finally:
        if "triton" not in sys.modules:
            gc.freeze()
    sys.exit(code)


if __name__ == "__main__":
    run()
