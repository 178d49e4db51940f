"""A site that measures all sites' models: its own as ``local`` does, the others by hand."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import ARRAYS, METRICS, measurements
from fedsilo.models.methods.cross import CROSSED
from fedsilo.models.networks.mixture import expert_array
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays, load_exchanged
from tests.support.lab import answer, evaluate

Opened = Callable[..., Lab]
PLAIN = {"mc_passes": 0}


def sent(models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what the server sends at the end."""
    return {
        expert_array(site, name): array
        for site, arrays in models.items()
        for name, array in arrays.items()
    }


def always(weights: dict[str, Any], label: int) -> dict[str, Any]:
    """Return a model that answers ``label`` whatever it sees."""
    found = {name: np.zeros_like(array) for name, array in weights.items()}
    found["head.4.bias"][label] = 10
    return found


def figures(reply: Any, split: str = "test") -> dict[str, float]:
    return {
        metric: value
        for model, part, metric, value in measurements(dict(reply[METRICS]))
        if (model, part) == ("incoming", split)
    }


def usual(method: str, reply: Any) -> dict[str, Any]:
    skipped = ("seconds", "peak-memory-bytes")
    return {k: v for k, v in reply[METRICS].items() if "-from-" not in k and k not in skipped}


def test_a_site_trains_and_measures_its_own_model_as_local_does_to_the_bit(
    opened: Opened, weights: dict[str, Any]
) -> None:
    crossed = answer(opened("cross", returns=False))
    alone = answer(opened("local"))
    assert ARRAYS not in crossed
    assert usual("cross", crossed) == usual("local", alone)
    last = {"round": 2, "phase": "evaluate"}
    others = sent({"s2a": weights, "s3a": always(weights, 1)})
    assert usual("cross", evaluate(opened("cross", others, **last))) == usual(
        "local", evaluate(opened("local", **last))
    )


def test_the_model_leaves_the_site_when_it_is_asked_for(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("cross")
    reply = answer(method)
    assert set(reply[ARRAYS]) == set(weights)
    kept = exchanged_arrays(cast(nn.Module, opened("cross", round=2).open()))
    for name, array in reply[ARRAYS].items():
        np.testing.assert_array_equal(array.numpy(), kept[name])


def test_every_model_that_came_is_measured_on_the_sites_own_samples(
    opened: Opened, weights: dict[str, Any]
) -> None:
    answer(opened("cross", own=PLAIN, returns=False))
    labels = opened("cross").silo.test.labels
    first, last = int(labels[0]), int(labels[-1])
    other = {name: array + np.float32(0.01) for name, array in weights.items()}
    received = sent(
        {
            "s1a": weights,
            "s2a": always(weights, first),
            "s3a": other,
            "s4a": always(weights, last),
        }
    )
    method = opened("cross", received, round=2, phase="evaluate", own=PLAIN)
    found = figures(evaluate(method))
    for site, label in (("s2a", first), ("s4a", last)):
        share = (labels == label).double().mean().item()
        assert found[f"accuracy-from-{site}"] == pytest.approx(share)
        assert found[f"balanced-accuracy-from-{site}"] == pytest.approx(1 / len(labels.unique()))
    network = initial_classifier(method.common, method.silo)
    load_exchanged(network, {name: torch.from_numpy(array) for name, array in other.items()})
    with torch.no_grad():
        said = network.eval()(method.silo.test.inputs).argmax(dim=1)
    assert found["accuracy-from-s3a"] == pytest.approx((said == labels).double().mean().item())
    assert "accuracy-from-s2a" in figures(evaluate(method), "val")
    assert not {m for m in found if m.startswith(("loss-from", "entropy-from"))}


def test_what_came_of_the_site_itself_has_its_own_figures_and_noised_ones_if_it_was_noised(
    opened: Opened, weights: dict[str, Any]
) -> None:
    last: dict[str, Any] = {"round": 2, "phase": "evaluate"}
    reply = answer(opened("cross"))
    own = {name: array.numpy() for name, array in reply[ARRAYS].items()}
    first = always(weights, int(opened("cross").silo.test.labels[0]))
    found = figures(evaluate(opened("cross", sent({"a": first, "s1a": own}), **last)))
    assert {m for m in CROSSED if m in found} == {"accuracy", "balanced-accuracy"}
    for metric in ("accuracy", "balanced-accuracy"):
        assert found[f"{metric}-from-s1a"] == found[metric]
    noised = {name: array + np.float32(1) for name, array in own.items()}
    after = figures(evaluate(opened("cross", sent({"a": noised, "s1a": noised}), **last)))
    assert after["accuracy-from-s1a"] == after["accuracy-from-a"]
    assert after["accuracy"] == found["accuracy"]


@pytest.mark.parametrize("name", ["s.1", "a-from-b", "north.ward_2-b"])
def test_a_sites_name_may_hold_what_parts_metrics(
    opened: Opened, weights: dict[str, Any], name: str
) -> None:
    received = sent({name: always(weights, 1)})
    found = figures(evaluate(opened("cross", received, phase="evaluate", own=PLAIN)))
    assert {m for m in found if "-from-" in m} >= {
        f"accuracy-from-{name}",
        f"balanced-accuracy-from-{name}",
    }


def test_a_site_whose_own_model_did_not_come_is_measured_but_not_in_the_matrix(
    opened: Opened, weights: dict[str, Any]
) -> None:
    received = sent({"s2a": weights})
    found = figures(evaluate(opened("cross", received, phase="evaluate", own=PLAIN)))
    assert "accuracy" in found
    assert "accuracy-from-s1a" not in found
    # It has no state, so its own model is the initial one, as what came here is
    assert found["accuracy-from-s2a"] == found["accuracy"]


def test_one_foreign_model_is_open_at_a_time_and_nothing_is_stored(
    opened: Opened, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[TokenClassifier] = []
    monkeypatch.setattr(
        "fedsilo.client_app.lab.initial_classifier",
        lambda *site: built.append(initial_classifier(*site)) or built[-1],
    )
    received = sent(dict.fromkeys(("s1a", "s2a", "s3a"), weights))
    method = opened("cross", received, phase="evaluate", own=PLAIN)
    assert evaluate(method)[METRICS]["kept-state"] == 0
    assert len(built) == 1
    assert not method.state_files.folder.exists()


def test_a_model_that_does_not_fit_is_refused(opened: Opened, weights: dict[str, Any]) -> None:
    received = sent({"s2a": weights})
    del received[expert_array("s2a", "head.4.bias")]
    with pytest.raises(SettingError, match=r"missing \['head.4.bias'\]"):
        evaluate(opened("cross", received, phase="evaluate"))


def test_an_evidential_model_is_measured_with_the_prior_of_the_site_that_tests(
    opened: Opened, weights: dict[str, Any]
) -> None:
    zeros = {name: np.zeros_like(array) for name, array in weights.items()}
    own = PLAIN | {"loss": "evidential"}
    method = opened("cross", sent({"s2a": zeros}), phase="evaluate", own=own)
    found = figures(evaluate(method))
    # Equal evidence for all classes: it answers the rarest of this site's training samples
    counts = torch.bincount(method.silo.train.labels, minlength=10)
    right = (method.silo.test.labels == counts.argmin()).double().mean().item()
    assert found["accuracy-from-s2a"] == pytest.approx(right)
