"""The virtual environment of the Makefile: its folder depends on what is installed into it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _folder(folder: Path, version: tuple[int, int], *words: str) -> str:
    """Return the environment that ``make`` would use with a Python that says it is ``version``."""
    python = folder / "python"
    code = f"import sys; sys.version_info = ({version[0]}, {version[1]}, 0); exec(sys.argv[1])"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$2"\n')
    python.chmod(0o755)
    command = ["make", "--dry-run", "--no-print-directory", "lint", f"PYTHON={python}", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.endswith("/ruff check .")]
    return Path(line.split()[0]).parts[-3]


@pytest.mark.skipif(not shutil.which("make"), reason="the system has no make")
def test_each_version_of_python_has_an_environment_of_its_own(tmp_path: Path) -> None:
    usual = _folder(tmp_path, (3, 11))
    assert len(usual) == 12
    assert _folder(tmp_path, (3, 13)) == f"{usual}-py3.13"
    assert _folder(tmp_path, (3, 12), "TORCH=cpu") == f"{usual}-py3.12-cpu"
