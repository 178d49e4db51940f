"""``python -m fedsilo.cli``: the ``fedsilo`` command of this checkout."""

import gc
import io
import os
import sys

from fedsilo.cli.main import main


class StandardOutput(io.TextIOWrapper):
    """Standard output that no longer raises once it cannot be written, so that a run goes on.

    Attributes:
        fault: the first error: a full disk, or a closed pipe whose reader has left. None so far.
            From then on, everything is written to the null device.
    """

    fault: OSError | None = None

    def write(self, text: str) -> int:
        """Write ``text``, and return its length.

        If standard output can no longer be written to, the text is dropped without an error, so
        that the command continues. Its length is returned all the same. The first time, the reason
        is printed on standard error, except for a closed pipe.
        """
        try:
            return super().write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Flush the buffer. If that fails, the error is noted in ``fault``, but not raised."""
        try:
            super().flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Stop writing to standard output after an error, so that the command can continue.

        The error is stored in ``fault``. All later output of this process and of the processes that
        it started is discarded. The reason is printed on standard error, unless the output is a
        pipe that its reader has closed.
        """
        self.fault = error
        # The descriptor itself, because this process's buffers and its children write there too
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self.fileno())
        os.close(nothing)
        if not isinstance(error, BrokenPipeError):
            line = f"fedsilo: standard output cannot be written ({error.strerror})"
            print(f"{line}; the command continues", file=sys.stderr)


def run() -> None:
    """Run the command line, and end the process with its exit code.

    If standard output could not be written, an exit code of 0 becomes 1.
    """
    # The collector would take a third of the time of PyTorch's import, and finds nothing
    gc.set_threshold(20_000)
    output = None
    if isinstance(sys.stdout, io.TextIOWrapper):
        usual = sys.stdout
        encoding, errors = usual.encoding, usual.errors
        by_line, at_once = usual.line_buffering, usual.write_through
        # Detached, because the old wrapper would otherwise close the descriptor when it is deleted
        output = StandardOutput(usual.detach(), encoding, errors, None, by_line, at_once)
        sys.stdout = output
    try:
        code = main()
    finally:
        # No collection at the end. Without one, though, Triton's bindings (imported by timm) would
        # print 30 lines of "leaks" for objects that remain
        if "triton" not in sys.modules:
            gc.freeze()
    if output:
        output.flush()
        if output.fault:
            code = code or 1
    sys.exit(code)


if __name__ == "__main__":
    run()
