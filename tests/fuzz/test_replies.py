"""What a site answers, mutated, against the whole server; see ``tests/fuzz/driver.py``."""

import os
from pathlib import Path
from typing import Any

import pytest

from fedsilo.core.methods import METHODS
from tests.fuzz.driver import Kind, check
from tests.fuzz.replies import kinds
from tests.support.soak import in_soak

# A method's honest run takes longer than the trials of `make test`. That tries one method for each
# file of the server's side, and a second where methods of a file read replies differently
SOME = {
    *("fedavg", "cyclic", "fedavgm", "ditto", "fedbabu", "fedper", "fedcross", "feddbe"),
    *("feddistill", "fedproto", "fednova", "scaffold", "fedpac", "distrans", "fedaligncl"),
    *("fedefm", "fedevprompt", "cdl", "matcha", "cross", "ensemble", "picsr", "uefl"),
}


def _chosen() -> list[Any]:
    """Return all kinds where `make fuzz` or a seed asks for them, else those of each suite."""
    every = kinds()
    if any(os.environ.get(f"FUZZ_{name}") for name in ("TRIALS", "SEED", "KIND")):
        return every
    names = {kind.name.removeprefix("reply-") for kind in every}
    assert names >= SOME
    others = {f"reply-{name}" for name in METHODS.keys() - SOME}
    return in_soak(every, but=[kind for kind in every if kind.name not in others])


@pytest.mark.parametrize("kind", _chosen(), ids=lambda kind: kind.name)
def test_no_answer_of_a_site_harms_the_server(kind: Kind, tmp_path: Path) -> None:
    check(kind, tmp_path)
