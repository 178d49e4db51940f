"""A hospital that trusts nobody, and a server that looks for a value without noise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsilo.client_app import session
from fedsilo.client_app.opening import open_site
from fedsilo.core.errors import RefusedError
from fedsilo.core.messages import ARRAYS, START
from fedsilo.models.privacy.dp_sgd import clipped_gradients, poisson_batch
from fedsilo.models.privacy.noisy_metrics import LOSS_BOUND, bounded_parts
from fedsilo.models.privacy.release import UNITS, Release
from tests.support.errors import refuses
from tests.support.hospital import Hospital

Make = Callable[..., Hospital]
NOBODY = {"trust": "nobody", "max-epsilon": 50.0}
PRIVATE: dict[str, Any] = {
    "trust": "nobody",
    "standardise": "declared",
    "sample_clip_norm": 1.0,
    "noise_multiplier": 4.0,
    "dropout": 0.0,
    "batch_size": 64,
    "local_steps": 2,
}
WIDE = 1e30  # times a patient's features it overflows


def logistic(scale: float = 0.1) -> dict[str, Any]:
    return {"head.1.weight": np.full((2, 13), scale), "head.1.bias": np.zeros(2)}


@pytest.mark.parametrize("method", ["fedavg-ft", "fedbabu"])
def test_what_was_fine_tuned_without_noise_does_not_leave_later(
    hospital: Make, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server asks for the fine-tuned model as if it were one to be averaged."""
    network = {"network": "mlp", "width": 4} if method == "fedbabu" else {}
    own = {**PRIVATE, **network, "optimiser_state": "run"}
    site = hospital(node=NOBODY, method=method, rounds=20, learning_rate=1e-30, **own)
    start = site.send("train", _start(method), round=1, returns=False, evaluate=False)
    assert start is not None, site.refusals
    assert site.send("train", None, round=2, returns=True, evaluate=False) is None
    assert "its own model stays" in caplog.text


def _start(method: str) -> dict[str, Any]:
    if method == "fedavg-ft":
        return logistic()
    return {
        "encoder.layers.0.weight": np.full((4, 13), 0.1),
        "encoder.layers.0.bias": np.zeros(4),
        "head.1.weight": np.full((2, 4), 0.1),
        "head.1.bias": np.zeros(2),
    }


@pytest.mark.parametrize("refreshes", [True, False])
def test_no_message_makes_uefl_send_centroids_of_a_private_run(
    hospital: Make, refreshes: bool
) -> None:
    site = hospital(
        node=NOBODY,
        method="uefl",
        network="mlp",
        width=4,
        uefl__codes=3,
        uefl__codeword_start="gaussian",
        uefl__refresh="none",
        **{**PRIVATE, "dropout": 0.1, "mc_passes": 2},
    )
    arrays = _start("fedbabu") | {"codebook.0": np.zeros((3, 4))}
    notes = {"refreshes": refreshes}
    reply = site.send("train", arrays, phase="centroids", notes=notes, evaluate=False)
    assert reply is None or ARRAYS not in reply


def test_a_row_that_overflows_is_not_seen_in_measurements() -> None:
    rows = torch.full((20, 2), 0.5, dtype=torch.float64)
    labels = torch.zeros(20, dtype=torch.long)
    rows[3] = float("nan")
    found = bounded_parts(rows, labels)
    assert found["loss"].tolist() == pytest.approx([np.log(2) / LOSS_BOUND] * 20)
    assert found["entropy"].tolist() == pytest.approx([1] * 20)


def test_a_server_that_makes_a_row_overflow_gets_finite_numbers(hospital: Make) -> None:
    site = hospital(node=NOBODY, **PRIVATE)
    told = site.evaluate(logistic(WIDE), round=1)
    assert told is not None, site.refusals
    assert all(np.isfinite(value) for value in told.values())
    change = site.train(logistic(WIDE), round=2)
    assert change is not None, site.refusals
    assert all(np.isfinite(array).all() for array in change.values())


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_or_row_that_is_not_finite_adds_nothing_that_is_not_bounded(odd: float) -> None:
    network = torch.nn.Linear(1, 1, bias=False)

    def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (network(inputs) * labels).mean()

    release = Release(0.5, 1.0, 1, None)
    inputs = torch.tensor([[1.0], [odd]])
    sums, losses = clipped_gradients(network, loss, inputs, torch.ones(2, 1), release)
    assert sums["weight"].abs().item() <= 2 * UNITS
    assert torch.isfinite(losses)
    assert release.parts({"": torch.tensor([[odd, 1.0]])})[""].tolist() == [[0, UNITS]]


def test_under_bf16_one_patient_moves_the_sum_by_no_more_than_the_clip_norm() -> None:
    network = torch.nn.Linear(1, 1, bias=False)

    def summed(count: int) -> float:
        inputs, labels = torch.full((count, 1), 3.0), torch.ones(count, 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            sums, _ = clipped_gradients(
                network,
                lambda x, y: (network(x) * y).float().mean(),
                inputs,
                labels,
                Release(1.0, 1.0, 1, None),
            )
        return float(sums["weight"].item())

    assert abs(summed(258) - summed(257)) <= UNITS


def test_batches_of_a_real_hospital_come_from_the_operating_system() -> None:
    batches = {tuple(poisson_batch(40, 0.5, None).tolist()) for _ in range(50)}
    assert len(batches) == 50
    mean = np.mean([len(poisson_batch(40, 0.5, None)) for _ in range(500)])
    assert mean == pytest.approx(20, abs=1)


def test_an_error_of_picsr_does_not_say_how_many_patients_there_are(hospital: Make) -> None:
    site = hospital(node=NOBODY, method="picsr", picsr__prototype_min_count=10**6, **PRIVATE)
    assert site.send("query.hello") is None or site.send("train", logistic()) is None
    assert site.refusals
    assert "199" not in site.refusals[-1]


def test_steps_of_training_that_stays_tell_nothing_of_the_number_of_patients(
    hospital: Make,
) -> None:
    """With one step of all patients a floor on steps would refuse, with two it would not."""
    plan = {**PRIVATE, "local_steps": 0, "local_epochs": 1}
    answers = []
    for size in (64, 128, 192, 256):
        site = hospital(node=NOBODY, method="local", **{**plan, "batch_size": size})
        answers.append(site.send("train", None, returns=False, run_name=f"size{size}") is None)
    assert len(set(answers)) == 1


def test_the_steps_of_fedrep_follow_the_told_counts(
    hospital: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """199 patients are four steps of 64; 60, as told, are one, which two parts cannot share."""
    monkeypatch.setattr(
        session, "reported_counts", lambda site: {"train": [30, 30], "test": [20, 20]}
    )
    plan = {**PRIVATE, "local_steps": 0, "local_epochs": 1, "network": "mlp", "width": 4}
    site = hospital(node=NOBODY, method="fedrep", **plan)
    shared = {name: array for name, array in _start("fedbabu").items() if "head" not in name}
    start = {f"{START}{name}": array for name, array in _start("fedbabu").items()}
    assert site.send("train", shared | start, evaluate=False) is None
    assert "takes 1 step a round" in caplog.text


@pytest.mark.parametrize(
    ("node", "refusal"),
    [
        ({}, "fewer than 8 training samples"),
        ({"minimum-train-samples": 100}, "fewer than 100 training samples"),
        ({"minimum-per-label": 4}, "a label of fewer than 4 training samples"),
    ],
)
def test_whether_patients_are_enough_is_judged_by_the_told_counts(
    hospital: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    node: dict[str, Any],
    refusal: str,
) -> None:
    """By the exact ones, of 199 patients, a refusal or an answer would tell a count's side."""
    told = {"train": [3, 4], "val": [0, 0], "test": [60, 60]}
    monkeypatch.setattr(session, "reported_counts", lambda site: told)
    site = hospital(node={**NOBODY, **node}, **PRIVATE)
    assert site.send("query.hello") is None
    assert refusal in caplog.text, "the hospital's own log alone says why"
    assert refusal not in site.refusals[0]


def test_which_splits_are_measured_is_judged_by_the_told_counts(
    hospital: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = hospital(node=NOBODY, **PRIVATE)
    for size, leaves in ((19, False), (20, True)):
        told = {"train": [99, 100], "val": [0, 0], "test": [size, 0]}
        monkeypatch.setattr(session, "reported_counts", lambda site, told=told: told)
        metrics = site.evaluate(logistic(), round=size)
        assert metrics is not None, site.refusals
        assert ("incoming.test.accuracy" in metrics) is leaves


def test_a_cap_without_a_folder_for_its_ledger_is_refused(hospital: Make, tmp_path: Path) -> None:
    site = hospital(node=NOBODY, **PRIVATE)
    context = site.context()
    del context.node_config["state-dir"]
    with refuses(RefusedError, "state-dir"):
        open_site(context)


def test_losses_too_large_for_their_sum_do_not_end_in_an_error(hospital: Make) -> None:
    """One patient's loss of 1e38 in each step adds up to infinity, and others' do not."""
    weights = np.stack([np.full(13, 1e37), np.full(13, -1e37)])
    site = hospital(node={**NOBODY, "max-epsilon": 500.0}, **{**PRIVATE, "local_steps": 20})
    arrays = {"head.1.weight": weights, "head.1.bias": np.zeros(2)}
    assert site.train(arrays) is not None, site.refusals


def test_the_entropy_by_which_uefl_judges_uncertainty_is_bounded_per_patient(
    hospital: Make,
) -> None:
    """A mean that is no number would tell that a patient is there who overflows."""
    own = {"uefl__codes": 3, "uefl__codeword_start": "gaussian", "uefl__refresh": "none"}
    plan = {**PRIVATE, "dropout": 0.1, "mc_passes": 2, "network": "mlp", "width": 4}
    node = {**NOBODY, "allow-folds": True}
    site = hospital(node=node, method="uefl", val_folds=2, **own, **plan)
    arrays = _start("fedbabu") | {"codebook.0": np.full((3, 4), WIDE)}
    arrays["head.1.weight"] = np.full((2, 4), WIDE)
    reply = site.send("train", arrays, phase="uncertainty", evaluate=False)
    assert reply is not None, site.refusals
    assert np.isfinite(float(str(reply["metrics"]["incoming.val.entropy"])))


def test_a_model_that_stays_is_trained_on_however_few_the_site_has(
    hospital: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 are told and 30 are there: a refusal for too small a batch would say how many."""
    monkeypatch.setattr(
        session, "reported_counts", lambda site: {"train": [20, 20], "test": [20, 20]}
    )
    site = hospital("switzerland", {**NOBODY, "minimum-batch": 31}, method="local", **PRIVATE)
    assert site.send("train", None, returns=False) is not None, site.refusals
