"""What measurements tell: of few samples nothing, and under a hospital's cap nothing for free."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsilo.client_app.privacy.ledger import LEDGER, Ledger
from fedsilo.core.messages import CONFIG, HELLO
from fedsilo.models.privacy.accountant import epsilon
from tests.support.hospital import Hospital, seeded

Make = Callable[..., Hospital]
FEATURES = 13
CAP = {"max-epsilon": 6.0}
PRIVATE: dict[str, Any] = {
    "sample_clip_norm": 1.0,
    "noise_multiplier": 2.0,
    "standardise": "declared",
    "dropout": 0.0,
}


def model(weight: Any, bias: float) -> dict[str, Any]:
    return {
        "head.1.weight": np.stack([np.zeros(FEATURES), np.broadcast_to(weight, (FEATURES,))]),
        "head.1.bias": np.array([0.0, bias]),
    }


def charged(site: Hospital) -> int:
    return sum(Ledger(site.home / ".own" / site.site / LEDGER, 0.0, 1e-5).releases().values())


def test_no_loss_of_two_chosen_patients_leaves_under_a_cap(hospital: Make) -> None:
    """Rates near 0 leave the weights alone: the loss of each step is that of its patients."""
    site = hospital(node=CAP, batch_size=2, local_steps=1, learning_rate=1e-12, **PRIVATE)
    told = [site.metrics(model(0.0, 3.0), round=round_) for round_ in range(1, 43)]
    assert not [found for found in told if found and "trained.train.loss" in found]
    larger = hospital(node=CAP, batch_size=8, local_steps=2, learning_rate=1e-12, **PRIVATE)
    told = [larger.metrics(model(0.0, 3.0), round=r, run_name="b") for r in range(1, 43)]
    assert not [found for found in told if found and "trained.train.loss" in found]


def test_every_measurement_under_a_cap_is_noisy_and_charged(hospital: Make) -> None:
    site = hospital(node=CAP, **PRIVATE)
    open_site = hospital(dropout=0.0, standardise="declared")
    exact = open_site.evaluate(model(0.3, 0.1), run_name="open")
    assert exact is not None
    told = [site.evaluate(model(0.3, 0.1), round=round_) for round_ in range(1, 43)]
    answered = [found for found in told if found]
    assert 1 <= len(answered) < 10
    assert charged(site) == len(answered) + 1, "and the label counts once"
    assert "epsilon is spent" in site.refusals[0]
    for found in answered:
        names = {name for name in found if name.count(".") >= 2}
        assert names == {f"incoming.test.{metric}" for metric in ("accuracy", "loss", "entropy")}
        assert all(found[name] != exact[name] for name in names)
    assert len({found["incoming.test.loss"] for found in answered}) == len(answered)


def test_a_run_without_noise_gets_nothing_from_a_hospital_with_a_cap(hospital: Make) -> None:
    site = hospital(node=CAP)
    for ask in (site.train, site.metrics, site.evaluate):
        assert ask(model(0.0, 0.0)) is None
    assert all("'privacy.sample-clip-norm' is 0" in refusal for refusal in site.refusals)


def test_a_split_of_few_is_not_measured(hospital: Make) -> None:
    """Switzerland has 16 test patients: an accuracy of so few is a count of persons."""
    assert hospital("switzerland").evaluate(model(0.0, 0.0)) is not None
    told = hospital("switzerland").evaluate(model(0.0, 0.0), round=2)
    assert told is not None
    assert not [name for name in told if ".test." in name]


def test_no_label_is_read_off_from_losses_of_a_plane_under_a_cap(hospital: Make) -> None:
    """One patient beyond a plane adds that patient's loss alone: its label, if it were exact."""
    site = hospital(node=CAP, **PRIVATE)
    draws, jumps = seeded(2), 0
    direction = draws.normal(size=FEATURES) * 100
    before: float | None = None
    for round_, bias in enumerate(np.linspace(-600, 600, 60), start=1):
        told = site.evaluate(model(direction, float(bias)), round=round_)
        loss = told.get("incoming.test.accuracy") if told else None
        if loss is not None and before is not None:
            patients = (loss - before) * 104
            jumps += 0.9 < abs(patients) < 1.1 and abs(patients - round(patients)) < 1e-3
        before = loss
    assert jumps == 0


def test_label_counts_under_a_cap_are_noisy_the_same_each_time_and_paid_once(
    hospital: Make,
) -> None:
    site = hospital(node=CAP, **PRIVATE, statistics_noise=20.0)
    exact = {name: list(counts) for name, counts in site.silo().label_counts().items()}
    told = []
    for _ in range(5):
        reply = site.send(HELLO)
        assert reply is not None, site.refusals
        told.append(json.loads(str(reply[CONFIG]["label-counts"])))
        assert json.loads(str(reply[CONFIG]["measured"])) == ["val", "test"]
    assert told[0] != exact
    assert told == [told[0]] * 5, "their mean would be the count"
    assert charged(site) == 1
    found = site.metrics(model(0.0, 0.0))
    assert found is not None, site.refusals
    assert told[0]["train"] != exact["train"]
    assert found["num-examples"] == sum(told[0]["train"])
    of_run = Ledger(site.home / "attack" / "cleveland" / LEDGER, 0.0, 1e-5).releases()
    assert of_run[20.0, 1.0] == 1, "the measurements of this very reply"
    assert found["dp-epsilon"] == pytest.approx(epsilon(of_run, 1e-5))


def test_what_a_model_trained_without_noise_says_of_patients_stays_under_a_cap(
    hospital: Make,
) -> None:
    """One training patient may turn such a model's every answer: no noise is enough."""
    site = hospital(node=CAP, method="local", **PRIVATE)
    hello = site.send(HELLO)
    assert hello is not None
    assert json.loads(str(hello[CONFIG]["measured"])) == []
    for found in (site.metrics({}), site.metrics({}, round=2), site.evaluate({}, round=3)):
        assert found is not None, site.refusals
        assert not [name for name in found if name.count(".") >= 2]
    assert charged(site) == 1, "the label counts"
