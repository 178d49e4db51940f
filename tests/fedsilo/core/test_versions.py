import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from fedsilo.core.errors import SiteError
from fedsilo.core.versions import FEDSILO, own_versions, refuse_other_versions


def test_the_version_in_the_code_is_that_of_the_package() -> None:
    project = Path(__file__).resolve().parents[3] / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == FEDSILO


@pytest.mark.parametrize(
    ("server", "here", "there"),
    [
        ({"fedsilo-version": "9.9.9"}, f"fedsilo {FEDSILO}", "9.9.9"),
        ({"fedsilo-version": "0"}, f"fedsilo {FEDSILO}", "0"),
        ({"flower-version": "1.40.0"}, f"Flower {version('flwr')}", "1.40.0"),
        ({"flower-version": 2}, f"Flower {version('flwr')}", "2"),
    ],
)
def test_another_version_is_refused_by_both_numbers(
    server: dict[str, Any], here: str, there: str
) -> None:
    with pytest.raises(SiteError) as caught:
        refuse_other_versions(own_versions() | server)
    told = f"the site runs {here}, but the server {there}: install the same version"
    assert str(caught.value) == told


def test_the_same_versions_later_patches_and_silence_are_not_refused() -> None:
    refuse_other_versions(own_versions())
    major, minor, *_ = version("flwr").split(".")
    refuse_other_versions(own_versions() | {"flower-version": f"{major}.{minor}.99"})
    major, minor, _ = FEDSILO.split(".")
    refuse_other_versions(own_versions() | {"fedsilo-version": f"{major}.{minor}.99"})
    refuse_other_versions({"hello": True})
