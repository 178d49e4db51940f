"""A real headless browser for tests of pages: Chromium, by Playwright; skipped where there is none.

``FEDSILO_BROWSER`` names it, else one of the usual names on the PATH is taken.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def browser_path() -> str:
    """Return where a browser is, or skip the test."""
    given = os.environ.get("FEDSILO_BROWSER", "")
    found = given or next((path for name in _NAMES if (path := shutil.which(name))), "")
    if not found:
        pytest.skip("no browser: install chromium, or name one by FEDSILO_BROWSER")
    return found


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
