"""Make the picture of docs/watch.md: two runs, and the page of the second while it trains.

    python docs/site/watch_picture.py

It needs Chromium on the PATH and takes about two minutes.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread

from gallery import ROOT, shrink

from fedsilo.reports.watch.run_folder import look_for
from fedsilo.reports.watch.web.serve import WatchServer
from fedsilo.server_app.records.progress import read_progress

_SMALL = ("split.silo-train-size=150", "network.width=16", "train.mc-passes=5", "rounds=16")
_ROUND = 11  # of the picture
_WINDOW = "1200,1560"
_COLOURS = 192  # with fewer, two lines of a picture get the same colour
_QUIET = ("--headless", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars")


def main(target: Path) -> None:
    """Train two runs; write the picture of the second one, before its end, to ``target``."""
    with tempfile.TemporaryDirectory(prefix="fedsilo-watch-") as folder:
        runs = Path(folder, "runs")
        _start("fedavg-digits", runs).wait()
        training = _start("uefl-digits", runs)
        try:
            server = WatchServer(0, look_for(runs))
            Thread(target=server.serve, daemon=True).start()
            _wait_for_round(runs / "uefl-digits", _ROUND)
            made = Path(folder, "page.png")
            _photograph(f"{server.address}run?name=uefl-digits", made)
            server.stop()
        finally:
            training.terminate()
            training.wait()
        shrink(made, target, _COLOURS)


def _start(experiment: str, runs: Path) -> subprocess.Popen[bytes]:
    """Start a simulation with few samples."""
    command = [sys.executable, "-m", "fedsilo.cli", "simulate", experiment, "--engine", "inline"]
    for setting in _SMALL:
        command += ["--set", setting]
    return subprocess.Popen([*command, "--out", str(runs), "--name", experiment], cwd=ROOT)


def _wait_for_round(run_dir: Path, number: int) -> None:
    """Wait until a run has finished a round."""
    finished = 0
    while finished < number:
        time.sleep(0.5)
        if run_dir.is_dir():
            progress = read_progress(run_dir)
            finished = progress.finished_rounds if progress else 0


def _photograph(address: str, path: Path) -> None:
    """Write a PNG of a page in a window of 1200 pixels."""
    browser = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
    home = f"--user-data-dir={path.parent / 'browser'}"
    window = (f"--window-size={_WINDOW}", f"--screenshot={path}")
    subprocess.run([browser, *_QUIET, home, *window, address], check=True, capture_output=True)


if __name__ == "__main__":
    main(ROOT / "docs" / "img" / "watch.png")
