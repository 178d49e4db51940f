"""The SuperNode's process, which must not outlive its connection."""

import subprocess
import sys

_LOSES_THE_SERVER = """
import importlib, threading, time
from fedsilo.deployment.worker import supernode
# As Flower's: the Runtime API is a thread, and an error of the server is logged
module = importlib.import_module("flwr.supernode.cli.flower_supernode")
module.flower_supernode = lambda: threading.Thread(target=time.sleep, args=(60,)).start()
supernode.main()
"""


def test_a_supernode_that_lost_the_server_ends_with_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOSES_THE_SERVER],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "the SuperNode lost the server and ends: start it again" in done.stderr
