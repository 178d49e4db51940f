"""A hospital that trusts nobody, and a server that chooses every number to get past the noise."""

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from fedsilo.client_app.privacy.noisy_counts import FILE
from tests.support.hospital import Hospital

Make = Callable[..., Hospital]
NOBODY = {"trust": "nobody", "max-epsilon": 50.0}
PRIVATE: dict[str, Any] = {
    "privacy.trust": "nobody",
    "data.standardise": "declared",
    "privacy.sample-clip-norm": 1.0,
    "privacy.noise-multiplier": 4.0,
    "network.dropout": 0.0,
    "train.batch-size": 64,
    "train.local-steps": 2,
}
ZEROS = {"head.1.weight": np.zeros((2, 13)), "head.1.bias": np.zeros(2)}


def a_site(home: Path, run: dict[str, Any], site: str = "cleveland", **node: Any) -> Hospital:
    """Return a hospital of a run that differs from ``PRIVATE``, whatever the settings' rules say.

    A server need not keep to them.
    """
    checked = {key: value for key, value in run.items() if not isinstance(value, float)}
    unchecked = {key: value for key, value in run.items() if isinstance(value, float)}
    return Hospital(home, PRIVATE | checked, site, NOBODY | node, unchecked)


@pytest.mark.parametrize("clip", [1e-30, 1e-36, 1e-45])
def test_a_tiny_clip_norm_lets_no_gradient_past(
    hospital: Make, tmp_path: Path, clip: float
) -> None:
    """In float32 the squares of gradients of 1e-28 are 0, and what has no norm is not clipped."""
    run = {
        "privacy.sample-clip-norm": clip,
        "train.class-weights": "1e-28,1e-28",
        "train.optimiser": "sgd",
        "train.learning-rate": 1e30,
        "train.batch-size": 4096,
        "train.local-steps": 2,
    }
    open_to_all = {"minimum-clip-norm": 0.0, "maximum-clip-norm": 1e300}
    change = a_site(tmp_path / "open", run, **open_to_all).train(ZEROS)
    if change is not None:
        # Two steps, each of at most 199 parts of C, or z C of noise, over all that are told
        largest = max(float(np.abs(array).max()) for array in change.values())
        assert largest <= 1e30 * 2 * (199 + 4 * 10) * clip / 150
    usual = a_site(tmp_path / "usual", run)
    assert usual.train(ZEROS) is None
    assert "minimum-clip-norm" in usual.refusals[0]


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("privacy.sample-clip-norm", 1e-7, "minimum-clip-norm"),
        ("privacy.sample-clip-norm", 1e7, "maximum-clip-norm"),
        ("privacy.statistics-clip-norm", 1e-45, "minimum-clip-norm"),
        ("privacy.statistics-clip-norm", 1e38, "maximum-clip-norm"),
        ("privacy.noise-multiplier", 1e-45, "minimum-noise"),
        ("privacy.statistics-noise", 1e-30, "minimum-noise"),
    ],
)
def test_bounds_and_noise_beyond_what_a_hospital_takes_are_refused_before_data_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: float, limit: str
) -> None:
    def opened(*_: Any) -> None:
        raise AssertionError("data were opened")

    monkeypatch.setattr("fedsilo.client_app.opening.load_silo", opened)
    site = a_site(tmp_path, {key: value})
    assert site.send("query.hello") is None
    assert limit in site.refusals[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e9, 1e154])
@pytest.mark.parametrize(
    "key", ["privacy.sample-clip-norm", "privacy.noise-multiplier", "privacy.statistics-noise"]
)
def test_no_number_that_is_none_and_no_huge_noise_is_taken(
    tmp_path: Path, key: str, value: float
) -> None:
    site = a_site(tmp_path, {key: value})
    assert site.send("query.hello") is None
    assert not (tmp_path / ".own" / "cleveland" / FILE).exists()


@pytest.mark.parametrize("noise", [4.0, 1e6, 1e9, 1e154])
def test_no_run_decides_how_many_patients_a_hospital_says_it_has(
    tmp_path: Path, noise: float
) -> None:
    a_site(tmp_path, {"privacy.statistics-noise": noise}).send("query.hello")
    honest = a_site(tmp_path, {})
    hello = honest.send("query.hello")
    assert hello is not None, honest.refusals
    told = json.loads(str(hello["config"]["label-counts"]))
    assert sum(told["train"]) == pytest.approx(199, abs=30)
    assert honest.send("train", ZEROS, run_name="honest") is not None, honest.refusals


def test_a_first_try_with_much_noise_does_not_shut_a_small_hospital_out(tmp_path: Path) -> None:
    """By the run's z of 76 six of twenty hospitals of 30 patients were out for ever."""
    for trial in range(20):
        home = tmp_path / str(trial)
        a_site(home, {"privacy.noise-multiplier": 76.0}, "switzerland").send("query.hello")
        later = a_site(home, {}, "switzerland")
        assert later.send("query.hello") is not None, later.refusals


def test_the_ledger_is_charged_for_counts_by_the_hospitals_noise(tmp_path: Path) -> None:
    a_site(tmp_path, {"privacy.statistics-noise": 9.0}, **{"counts-noise": 2.5}).send("query.hello")
    ledger = json.loads((tmp_path / ".own/cleveland/privacy-ledger.json").read_text())
    assert ledger["releases"] == [[2.5, 1.0, 1]]


def test_which_operations_ran_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation runs on a batch without patients, so a mark said that there was one."""
    site = a_site(tmp_path, {})
    forward = nn.Linear.forward

    def warns(self: nn.Linear, rows: Tensor) -> Tensor:
        if len(rows):
            warnings.warn("found_one does not have a deterministic implementation", stacklevel=1)
        return forward(self, rows)

    monkeypatch.setattr(nn.Linear, "forward", warns)
    reply = site.send("train", ZEROS)
    assert reply is not None, site.refusals
    assert not [name for name in reply["metrics"] if name.startswith("unrepeatable.")]
