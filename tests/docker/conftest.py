"""The docker folder, and a way to run what lies in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"

Done = subprocess.CompletedProcess[str]
Runner = Callable[..., Done]


@pytest.fixture(scope="session")
def docker_folder() -> Path:
    """Return the folder of images, compose files and scripts."""
    return DOCKER


@pytest.fixture(scope="session")
def script() -> Runner:
    """Return a function that runs a script of the folder with arguments and environment."""

    def run(name: str, *arguments: object, stdin: str = "", **environment: str) -> Done:
        command = [sys.executable] if name.endswith(".py") else ["bash"]
        return subprocess.run(
            [*command, str(DOCKER / name), *map(str, arguments)],
            env=os.environ | environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def made_secrets(tmp_path_factory: pytest.TempPathFactory, script: Runner) -> Path:
    """Return a folder of secrets of two hospitals; tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("made") / "secrets"
    names = ("--hospital", "north", "--hospital", "south")
    done = script("make-secrets.sh", "--out", folder, "--host", "server", *names)
    assert done.returncode == 0, done.stderr
    return folder
