"""A run's name reaches no file of the hospital's own, and no run takes more than its share."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsilo.client_app.privacy.ledger import LEDGER, Ledger
from fedsilo.core.messages import EVALUATE, HELLO, TRAIN
from tests.support.hospital import Hospital, files_below

Make = Callable[..., Hospital]
FEATURES = 13
PRIVATE: dict[str, Any] = {
    "sample_clip_norm": 1.0,
    "noise_multiplier": 6.0,
    "standardise": "declared",
}


def model() -> dict[str, Any]:
    return {"head.1.weight": np.zeros((2, FEATURES)), "head.1.bias": np.zeros(2)}


@pytest.mark.parametrize(
    "name", [f"cleveland-{LEDGER}", "cleveland-audit.jsonl", "seed", "runs.json", "cleveland"]
)
def test_no_run_name_shuts_the_ledger_out(hospital: Make, name: str) -> None:
    site = hospital(node={"max-epsilon": 9.0}, **PRIVATE, method="local")
    assert site.send(TRAIN, run_name=name) is not None
    private = hospital(node={"max-epsilon": 9.0}, **PRIVATE)
    assert private.train(model(), run_name="honest") is not None
    found = Ledger(site.home / ".own" / "cleveland" / LEDGER, 0.0, 1e-5).releases()
    of_counts = [key for key in found if key[1] == 1.0]
    assert [found[key] for key in of_counts] == [1], "the label counts"
    assert len(found) == 2, "and the steps"


@pytest.mark.parametrize(
    "name",
    [
        *(".own", "../x", ".", "", "a/b"),
        *("\x1b[2Jred", "two\nlines", "nul\0", "\u202egnp.exe", "café", "n" * 300, "-rf"),
    ],
    ids=ascii,
)
def test_a_name_that_leads_elsewhere_or_misleads_is_refused(hospital: Make, name: str) -> None:
    site = hospital(method="local")
    assert site.send(TRAIN, run_name=name) is None
    assert "it must be a plain name of at most 128 letters, digits" in site.refusals[0]
    assert site.refusals[0].isprintable()
    assert not site.home.exists(), "no folder was made"


def test_a_new_run_of_an_old_name_wipes_no_state(hospital: Make) -> None:
    site = hospital(method="local")
    for round_ in range(1, 6):
        assert site.send(TRAIN, round=round_) is not None
    before = files_below(site.home / "attack")
    assert len(before) == 2
    assert site.send(TRAIN, round=1) is None
    assert "rounds only go up" in site.refusals[0]
    assert files_below(site.home / "attack") == before
    assert site.send(TRAIN, round=1, run_name="another") is not None, "the fix that it names"


def test_a_round_is_answered_a_few_times(hospital: Make) -> None:
    site = hospital(method="local", rounds=2)
    answers = [site.send(TRAIN, round=1) for _ in range(25)]
    assert sum(answer is not None for answer in answers) == 3
    asked_again = [site.send(TRAIN, round=1, step=step) for step in range(1, 16)]
    assert not [answer for answer in asked_again if answer is not None], "as another step"
    ends = [site.send(EVALUATE, round=1, step=n, phase=f"phase-{n}") for n in range(16)]
    assert sum(answer is not None for answer in ends) == 3, "under whatever name"
    steps = [site.send(TRAIN, round=1, step=step, phase="dream") for step in range(1, 30)]
    assert not [answer for answer in steps if answer is not None]
    assert "has had 'dream' of round 1 answered 3 times" in " ".join(site.refusals)
    assert site.send(TRAIN, round=4) is None
    assert "has 2 rounds" in site.refusals[-1]


def test_a_run_has_so_many_messages_and_a_day_so_many_runs(hospital: Make) -> None:
    site = hospital(node={"max-messages": 4, "max-runs-per-day": 2}, method="local", rounds=3)
    answers = [site.send(TRAIN, round=1 + n // 2) for n in range(5)]
    assert [answer is not None for answer in answers] == [True] * 4 + [False]
    assert "all that the hospital gives a run ('max-messages')" in site.refusals[-1]
    assert site.send(TRAIN, run_name="second") is not None
    assert site.send(TRAIN, run_name="third") is None
    assert "('max-runs-per-day')" in site.refusals[-1]
    hellos = [site.send(HELLO) for _ in range(20)]
    assert sum(answer is not None for answer in hellos) == 16


@pytest.mark.parametrize(
    "work", [{"local_epochs": 10**9}, {"mc_passes": 10**9}, {"local_steps": 10**12}], ids=str
)
def test_endless_work_ends(hospital: Make, work: dict[str, Any]) -> None:
    site = hospital(node={"max-seconds": 0.5}, **work)
    began = time.monotonic()
    assert site.send(TRAIN, model()) is None
    assert time.monotonic() - began < 60
    assert "'max-seconds'" in site.refusals[0]
    assert site.send(TRAIN, model(), round=2) is None, "what it took counts for the run"


def test_a_large_image_is_no_way_to_take_the_memory(hospital: Make) -> None:
    site = hospital(
        "vienna_dias",
        {"max-memory": 1, "allow-embeddings": True},
        dataset="dermoscopy-phantom",
        network="resnet22",
        image_size=64,
        standardise="pooled",
    )
    assert site.send(HELLO) is None
    assert "'max-memory'" in site.refusals[0]


def test_old_states_go_first_and_only_by_the_bound(hospital: Make) -> None:
    site = hospital(node={"max-state": 0}, method="local")
    for number in range(3):
        assert site.send(TRAIN, run_name=f"run-{number}") is not None
    kept = [name for name in files_below(site.home) if name.endswith(".safetensors")]
    assert len(kept) == 1
    assert "run-2" in kept[0]


def test_no_settings_beside_the_runs_open_a_state_of_other_settings(hospital: Make) -> None:
    """What a site compares with its private state is what it was asked under."""
    assert hospital(method="local", seed=1).send(TRAIN) is not None
    for carried in ("", '{"seed": 1}'):
        site = hospital(method="local", unchecked={"seed": 2, "plugin-settings": carried})
        assert site.send(TRAIN, round=2) is None
    assert "'plugin-settings'" in site.refusals[0]
    assert "'seed'" in site.refusals[0]
