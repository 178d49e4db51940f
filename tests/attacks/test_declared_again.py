"""What a hospital has declared at ``trust: sums`` stays, whatever settings a server makes up."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedsilo.server_app.config.settings import resolve
from tests.support.two_worlds import RUN, VICTIM, Federation, table


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """Return hospitals, of which the victim has declared its data."""
    made = Federation(tmp_path / "home")
    made.send(VICTIM, "query.hello", resolve(RUN).as_mapping())
    return made


def declared(federation: Federation) -> dict[str, Any]:
    path = federation.home / VICTIM / "state" / ".own" / VICTIM / "declared-data.json"
    read: dict[str, Any] = json.loads(path.read_text())
    return read


@pytest.mark.parametrize(
    "changes",
    [
        {"data.image-size": 40},
        {"data.pixel-scale": "raw"},
        {"data.broken-images": "skip"},
        {"split.test-fold": 3},
        {"split.val-fold": 1},
        {"standardise": "site"},
        {"split.silo-train-size": 9},
    ],
)
def test_settings_that_read_the_same_patients_do_not_count_them_again(
    changes: dict[str, Any], federation: Federation
) -> None:
    """With each made-up setting the hospital counted anew, so a server saw counts pass a step."""
    (before,) = declared(federation).values()
    federation.patients(VICTIM, table(200))
    federation.send(VICTIM, "query.hello", resolve(RUN).as_mapping() | changes)
    for entry in declared(federation).values():
        assert entry["at_least"] == before["at_least"]


def test_a_declaration_is_not_pushed_out_by_others(federation: Federation) -> None:
    """A hundred other readings made the hospital forget the first one, and count again."""
    ((first, entry),) = declared(federation).items()
    path = federation.home / VICTIM / "state" / ".own" / VICTIM / "declared-data.json"
    others = {f"another {number}": entry for number in range(99)}
    path.write_text(json.dumps({first: entry, **others}))
    federation.send(VICTIM, "query.hello", resolve(RUN).as_mapping() | {"split.use-test": False})
    assert first in declared(federation)
    assert "has declared 100" in federation.seen[-1][2]


@pytest.mark.parametrize(
    "private", [{}, {"privacy.sample-clip-norm": 1.0, "privacy.noise-multiplier": 1.0}]
)
def test_a_hospital_with_a_cap_on_epsilon_answers_no_run_at_sums(
    private: dict[str, Any], tmp_path: Path
) -> None:
    """Its declared counts are rounded, not noisy, so they must not leave."""
    limits = {"max-epsilon": 50.0, "counts-noise": 2.0}
    hospital = Federation(tmp_path / "home", limits=limits)
    config = resolve(RUN).as_mapping() | private
    assert hospital.send(VICTIM, "query.hello", config) is None
    assert "privacy.sample-clip-norm" in hospital.last_error
