"""A real headless browser for tests of pages: Chromium, by Playwright or by its own command.

``FEDSILO_BROWSER`` names it, else one of the usual names on the PATH is taken; where there is none
the test is skipped.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

DESKTOP, PHONE = (1280, 900), (390, 844)
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def browser_path() -> str:
    """Return where a browser is, or skip the test."""
    given = os.environ.get("FEDSILO_BROWSER", "")
    found = given or next((path for name in _NAMES if (path := shutil.which(name))), "")
    if not found:
        pytest.skip("no browser: install chromium, or name one by FEDSILO_BROWSER")
    return found


def browser() -> list[str]:
    """Return the command of a headless browser, or skip."""
    quiet = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    return [browser_path(), "--headless", *quiet]


def rendered(address: str, home: Path) -> str:
    """Return a page's document as the browser has it; ``home`` is the browser's own folder."""
    command = [*browser(), f"--user-data-dir={home}", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def picture(address: str, path: Path, size: tuple[int, int], home: Path) -> bytes:
    """Return a PNG of a page in a window of that size."""
    window = f"--window-size={size[0]},{size[1]}"
    command = [*browser(), f"--user-data-dir={home}", window, f"--screenshot={path}", address]
    subprocess.run(command, capture_output=True, check=True, timeout=120)
    return path.read_bytes()


@contextmanager
def chromium() -> Iterator[Any]:
    """Start a browser for a while, or skip."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")
    path = browser_path()
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def opened(browser: Any, file: Path, width: int, height: int = 900) -> tuple[Any, list[str]]:
    """Open a file in a window of that size.

    Returns:
        The page, and a list that takes its errors and what it asks for beside itself.
    """
    page = browser.new_page(viewport={"width": width, "height": height})
    told: list[str] = []
    page.on("console", lambda message: told.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: told.append(f"error: {error}"))
    page.on(
        "request",
        lambda request: (
            None
            if request.url == file.as_uri() or request.url.startswith("data:")
            else told.append(f"request: {request.url}")
        ),
    )
    page.goto(file.as_uri())
    return page, told
