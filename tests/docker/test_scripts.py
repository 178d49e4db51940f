"""The scripts of the docker folder without an engine: one line that says what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Runner = Callable[..., Any]


@pytest.fixture
def no_engine(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which docker is installed and no engine answers."""
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nexit 1\n")
    docker.chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}


def test_trying_without_an_engine_names_the_script_that_starts_one(
    no_engine: dict[str, str], script: Runner
) -> None:
    done = script("try.sh", **no_engine)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "docker/start-engine.sh" in line


@pytest.mark.parametrize("words", [["tpu"], ["cpu", "/"]], ids=["a device", "a folder that exists"])
def test_trying_refuses_words_that_it_cannot_use_before_it_does_anything(
    words: list[str], no_engine: dict[str, str], script: Runner
) -> None:
    done = script("try.sh", *words, **no_engine)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert words[-1] in line


def test_a_base_image_without_an_engine_names_the_script_that_starts_one(
    no_engine: dict[str, str], script: Runner
) -> None:
    done = script("offline-base.sh", **no_engine)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "root" in line or "docker/start-engine.sh" in line
