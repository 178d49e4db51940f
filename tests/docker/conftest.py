"""The docker folder, and a way to run what lies in it."""

import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
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
        words = [str(DOCKER / name), *map(str, arguments)]
        if name.endswith(".py"):
            return _in_process(words, stdin, environment)
        return subprocess.run(
            ["bash", *words],
            env=os.environ | environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def _in_process(words: list[str], stdin: str, environment: Mapping[str, str]) -> Done:
    """Run a script as a process of its own would, without the start of one."""
    said, told = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(told):
        patch.setattr(sys, "argv", words)
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        patch.syspath_prepend(str(DOCKER))
        patch.setattr(os, "execvp", _never)  # which would end the tests
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            runpy.run_path(words[0], run_name="__main__")
            code: object = 0
        except SystemExit as end:
            code = end.code
    if isinstance(code, str):  # as Python itself does
        told.write(f"{code}\n")
    returned = code if isinstance(code, int) else int(code is not None)
    return subprocess.CompletedProcess(words, returned, said.getvalue(), told.getvalue())


def _never(*_: object) -> None:
    raise AssertionError("a script that becomes another process is run by none of these tests")
