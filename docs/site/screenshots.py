"""Make the pictures of pages: of a run while it trains, and of two doors of docs/README.md.

    python docs/site/screenshots.py

It needs Chromium on the PATH and Playwright, trains three small runs, and takes about three
minutes.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread
from typing import Any

from gallery import ROOT, shrink
from playwright.sync_api import sync_playwright

from fedsilo.reports.watch.run_folder import look_for
from fedsilo.reports.watch.web.serve import WatchServer
from fedsilo.server_app.records.progress import read_progress

IMAGES = ROOT / "docs" / "img"
_SMALL = ("split.silo-train-size=150", "network.width=16", "train.mc-passes=5", "rounds=16")
_ROUND = 9  # of the picture of a run that trains
_PATIENCE = 120_000  # milliseconds that a page may take
_COLOURS = 192  # with fewer, two lines of a picture get the same colour
# A picture of a door -> the page with it, and where it is on that page
_DOORS = {
    "door-hospital": ("report?name=hearts&reader=dpo", "#what-flows-where svg"),
    "door-clinician": ("report?name=hearts&reader=clinic", "#how-often-it-is-right svg"),
}


def main() -> None:
    """Train three runs and write all pictures."""
    with tempfile.TemporaryDirectory(prefix="fedsilo-pages-") as folder:
        runs = Path(folder, "runs")
        _start("picsr-heart", runs, "hearts", ("dataset=heart-synthetic",)).wait()
        _start("fedavg-digits", runs, "fedavg-digits", _SMALL).wait()
        training = _start("uefl-digits", runs, "uefl-digits", _SMALL)
        server = WatchServer(0, look_for(runs))
        Thread(target=server.serve, daemon=True).start()
        with sync_playwright() as playwright:
            path = shutil.which("chromium")
            browser = playwright.chromium.launch(executable_path=path)
            photograph_doors(browser, server.address, Path(folder))
            try:
                _wait_for_round(runs / "uefl-digits", _ROUND)
                photograph_run(browser, server.address, Path(folder))
            finally:
                training.terminate()
                training.wait()
            browser.close()
        server.stop()


def photograph_run(browser: Any, address: str, folder: Path) -> None:
    """Write the picture of docs/watch.md."""
    page = browser.new_page(viewport={"width": 1200, "height": 1560})
    page.set_default_timeout(_PATIENCE)
    page.goto(f"{address}run?name=uefl-digits")
    page.wait_for_selector("#connection:has-text('Live')")
    page.screenshot(path=folder / "watch.png")
    shrink(folder / "watch.png", IMAGES / "watch.png", _COLOURS)


def photograph_doors(browser: Any, address: str, folder: Path) -> None:
    """Write the pictures of the doors, at twice the pixels of a page."""
    page = browser.new_page(viewport={"width": 1200, "height": 900}, device_scale_factor=2)
    page.set_default_timeout(_PATIENCE)
    for name, (place, selector) in _DOORS.items():
        page.goto(f"{address}{place}")
        page.locator(selector).first.screenshot(path=folder / f"{name}.png")
        shrink(folder / f"{name}.png", IMAGES / f"{name}.png")


def _start(
    experiment: str, runs: Path, name: str, settings: tuple[str, ...]
) -> subprocess.Popen[bytes]:
    """Start a simulation with these settings."""
    command = [sys.executable, "-m", "fedsilo.cli", "simulate", experiment, "--engine", "inline"]
    for setting in settings:
        command += ["--set", setting]
    return subprocess.Popen([*command, "--out", str(runs), "--name", name], cwd=ROOT)


def _wait_for_round(run_dir: Path, number: int) -> None:
    """Wait until a run has finished a round."""
    finished = 0
    while finished < number:
        time.sleep(0.5)
        if run_dir.is_dir():
            progress = read_progress(run_dir)
            finished = progress.finished_rounds if progress else 0


if __name__ == "__main__":
    main()
