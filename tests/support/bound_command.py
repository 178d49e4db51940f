"""Runs fedsilo's command line, and ends when the tests end, however they end.

Given as a script to a new process: ``python tests/support/bound_command.py run ...``.
"""

import os
import signal
import sys
from pathlib import Path

from fedsilo.cli.main import main
from fedsilo.core.processes import end_with

COMMAND = (sys.executable, str(Path(__file__).resolve()))

if __name__ == "__main__":
    end_with(os.getppid(), signal.SIGTERM)
    sys.exit(main())
