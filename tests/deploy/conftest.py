"""A deployment for a module's tests; they take minutes and run by `make test-deploy` alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_app.cli import main
from server_app.deployment import Deployment, read_deployment

SITES = 6


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Bring a server and its sites up, and down again."""
    if os.environ.get("FEDSILO_DEPLOY") != "1":
        pytest.skip("takes minutes: make test-deploy")
    folder = tmp_path_factory.mktemp("deployment")
    consent = ["--node-config", "allow-embeddings=true"]
    try:
        assert main(["deploy", "up", "--sites", str(SITES), "--dir", str(folder), *consent]) == 0
        yield read_deployment(folder)
    finally:
        assert main(["deploy", "down", "--dir", str(folder)]) == 0
        assert read_deployment(folder).running() == []


@pytest.fixture
def folder(deployment: Deployment) -> Path:
    """Return the deployment's folder, with all of it running."""
    assert main(["deploy", "up", "--dir", str(deployment.folder)]) == 0
    return deployment.folder


@pytest.fixture
def sites(deployment: Deployment) -> int:
    """Return how many sites there are."""
    return len(deployment.sites)
