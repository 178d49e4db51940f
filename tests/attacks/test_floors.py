"""Sums and means: behind each stand enough patients, whatever a run says."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsilo.core.messages import ARRAYS, CONFIG, HELLO, TRAIN
from tests.support.hospital import Hospital

Make = Callable[..., Hospital]
FEATURES = 13


def test_the_single_healthy_patient_is_no_prototype(hospital: Make) -> None:
    """On 'logistic' a prototype is a mean of rows; Switzerland has one healthy patient."""
    site = hospital("switzerland", method="fedproto", sums_min_count=1, fedproto__class_min_count=1)
    reply = site.send(TRAIN)
    found = [a.numpy() for a in reply[ARRAYS].values()] if reply and ARRAYS in reply else []
    assert site.recovered(found) == 0


def test_no_sums_of_few_leave_a_hospital(hospital: Make) -> None:
    site = hospital("switzerland", {"sums-min-count": 31}, standardise="pooled", sums_min_count=1)
    assert site.send(HELLO) is None
    assert "sends no sums" in site.refusals[0]


def test_the_floor_that_a_server_reads_is_the_hospitals(hospital: Make) -> None:
    reply = hospital(sums_min_count=1).send(HELLO)
    assert reply is not None
    assert reply[CONFIG]["floor"] == 10
    lowered = hospital(node={"sums-min-count": 2}, sums_min_count=1).send(HELLO)
    assert lowered is not None
    assert lowered[CONFIG]["floor"] == 2


@pytest.mark.parametrize("codes", [1, 2, 4])
def test_no_centroid_is_one_patients(hospital: Make, codes: int) -> None:
    """An encoder that answers to one patient makes the mean over all that patient's features."""
    width = FEATURES + 1
    site = hospital(
        method="uefl",
        network="mlp",
        width=width,
        uefl__codes=codes,
        uefl__centroid_min_count=1,
        mc_passes=1,
    )
    found: list[np.ndarray[Any, Any]] = []
    for round_, away in enumerate((1.5, 2.0, 2.5), start=1):
        # Each unit sees one feature, raised above 0 only for who is far out in the first
        weight = np.zeros((width, FEATURES))
        weight[:, 0] = 1e3
        weight[:FEATURES] += np.eye(FEATURES)
        arrays = {
            "encoder.layers.0.weight": weight,
            "encoder.layers.0.bias": np.full(width, -1e3 * away),
            "head.1.weight": np.zeros((2, width)),
            "head.1.bias": np.zeros(2),
            "codebook.0": np.zeros((codes, width)),
        }
        reply = site.send(TRAIN, arrays, phase="centroids", round=round_)
        if reply is None or ARRAYS not in reply:
            continue
        centroids, counts = (reply[ARRAYS][name].numpy() for name in ("centroids", "counts"))
        for centre in centroids:
            for n in range(1, 200):
                raw = centre * n
                found.append(raw[:FEATURES] - raw[FEATURES])
        assert (counts >= 10).all()
    assert site.recovered(found) == 0


def test_single_images_need_a_yes(hospital: Make) -> None:
    site = hospital(
        "vienna_dias",
        method="fedevprompt",
        dataset="dermoscopy-phantom",
        network="vit",
        backbone_weights="random",
        standardise="pooled",
        backbone_width=16,
        backbone_depth=2,
        backbone_heads=2,
        basic_layers=1,
    )
    assert site.send(HELLO) is None
    assert "'allow-embeddings=true'" in site.refusals[0]


def test_noise_that_a_server_makes_next_to_none_leaves_the_floor_of_a_step(hospital: Make) -> None:
    """Without a cap of the hospital's own the server chooses the noise."""
    private = {"sample_clip_norm": 1e6, "noise_multiplier": 1e-6, "standardise": "declared"}
    arrays = {"head.1.weight": np.zeros((2, FEATURES)), "head.1.bias": np.zeros(2)}
    few = hospital(batch_size=8, local_steps=2, **private)
    assert few.train(arrays) is None
    assert "'minimum-batch'" in few.refusals[0]
    assert "set 'train.batch-size' to at least 32" in few.refusals[0]
    enough = hospital(batch_size=32, local_steps=2, **private)
    assert enough.train(arrays, run_name="enough") is not None, enough.refusals
    bounded = hospital(
        node={"max-epsilon": 50.0},
        batch_size=8,
        local_steps=2,
        **{**private, "noise_multiplier": 2.0},
    )
    assert bounded.train(arrays, run_name="bounded") is not None, bounded.refusals


@pytest.mark.parametrize("weights", ["1,0", "1,1e-20", "1,1e39", "balanced"])
def test_no_weights_leave_a_step_to_a_single_patient(hospital: Make, weights: str) -> None:
    """Switzerland has one healthy patient: by these weights an update is that one's gradient."""
    site = hospital("switzerland", class_weights="none", unchecked={"train.class-weights": weights})
    assert site.send(HELLO) is None
    refusal = site.refusals[0]
    assert "'train.class-weights' fewer than 8 training samples" in refusal
    assert "('minimum-batch')" in refusal
    for closer in ("1,0.9", "none"):
        site.unchecked["train.class-weights"] = closer
        assert site.send(HELLO) is not None


@pytest.mark.parametrize(("size", "answered"), [(8, False), (85, True)])
def test_no_weights_leave_a_batch_to_a_single_patient(
    hospital: Make, size: int, answered: bool
) -> None:
    """Of 85 patients 19 are healthy: of a batch of eight one or two, whose rows were read."""
    site = hospital("va", class_weights="1,0", batch_size=size, local_steps=2)
    arrays = {"head.1.weight": np.zeros((2, FEATURES)), "head.1.bias": np.zeros(2)}
    assert site.send(HELLO) is not None
    asked = [site.train(arrays, round=round_) for round_ in range(1, 11)]
    assert [change is not None for change in asked].count(True) == (10 if answered else 0)
    assert answered or "('minimum-batch')" in site.refusals[0]


@pytest.mark.parametrize("gamma", [0.0, 1e-9])
def test_a_step_at_no_learning_rate_is_none(hospital: Make, gamma: float) -> None:
    """Of two steps a schedule leaves one: its gradient would leave alone."""
    schedule = {
        "train.schedule": "step",
        "train.schedule-arguments": f"{{step_size: 0.5, gamma: {gamma}}}",
    }
    arrays = {"head.1.weight": np.zeros((2, FEATURES)), "head.1.bias": np.zeros(2)}
    site = hospital(unchecked=schedule, optimiser="sgd", local_steps=2)
    assert site.train(arrays) is None
    assert "1 optimiser step(s), but at least" in site.refusals[0]
    site.unchecked["train.schedule-arguments"] = "{step_size: 0.5, gamma: 0.1}"
    assert site.train(arrays, run_name="another") is not None


def test_weights_of_classes_with_enough_patients_are_taken(hospital: Make) -> None:
    for name in ("cleveland", "va"):
        site = hospital(name, class_weights="balanced")
        arrays = {"head.1.weight": np.zeros((2, FEATURES)), "head.1.bias": np.zeros(2)}
        assert site.train(arrays, run_name=name) is not None, site.refusals


@pytest.mark.parametrize(
    "evasion",
    [
        {"train.optimiser-arguments": "{momentum: 0.5, dampening: 1}"},
        {"train.optimiser-arguments": "{momentum: 1e6}"},
        {"train.optimiser-arguments": "{momentum: 0.5, dampening: -1000}"},
        {"train.optimiser": "adagrad", "train.optimiser-arguments": "{lr_decay: 1000}"},
        {"train.weight-decay": 10.0},
        {"method": "fedprox", "fedprox.proximal-mu": 10.0},
        {"method": "feddyn", "feddyn.regularisation-alpha": 10.0},
    ],
)
def test_no_optimiser_leaves_the_gradient_of_one_step(
    hospital: Make, evasion: dict[str, Any]
) -> None:
    """Of two steps one would be all that is in the weights, as if it were sent alone."""
    site = hospital(optimiser="sgd", learning_rate=0.1, local_steps=2, unchecked=evasion)
    assert site.send(HELLO) is None
    assert "optimiser steps only 1 would decide what leaves, but all must" in site.refusals[0]
    site.unchecked = {"train.optimiser-arguments": "{momentum: 0.9, nesterov: true}"}
    assert site.send(HELLO) is not None, site.refusals
