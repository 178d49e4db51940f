"""All methods alike: their classes, what an author uses, and who has a model of its own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods import base as methods_base
from fedsilo.client_app.methods.base import SiteMethod
from fedsilo.client_app.training.compute import Compute
from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.messages import METRICS, Instruction
from fedsilo.core.methods import METHODS, settings_class, site_class, title_of
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Silo
from fedsilo.explanations.sample import refuse_row
from fedsilo.models.networks.site_network import exchanged_arrays
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.personal_models import PersonalState
from fedsilo.strategies.methods.registry import strategy_class
from fedsilo.strategies.wire.reply import Reply
from tests.support.asking import make_reply
from tests.support.errors import refuses
from tests.support.lab import evaluate
from tests.support.methods import Opened

# What a method finds at a site: its arrays, its own state, the network of the seed.


def test_a_message_without_arrays_has_none(opened: Opened) -> None:
    assert opened("fedavg").arrays() == {}


def test_the_classifier_has_the_arrays_that_are_given_else_the_seeds(
    opened: Opened, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    method, placed = opened("fedavg"), []

    def place(_: Compute, network: nn.Module) -> nn.Module:
        placed.append(network)
        return network

    monkeypatch.setattr(Compute, "place", place)
    given = {name: torch.from_numpy(array) + 1 for name, array in weights.items()}
    for arrays, expected in ((None, weights), (given, given)):
        network = method.classifier(arrays)
        assert placed.pop() is network
        for name, tensor in exchanged_arrays(network).items():
            np.testing.assert_array_equal(tensor, expected[name])
    with pytest.raises(SettingError, match="weights do not fit the network"):
        method.classifier({})


def test_arrays_that_came_are_read_below_a_prefix(opened: Opened) -> None:
    lab = opened("fedavg", {"a/x": np.ones(2), "b/x": np.zeros(1)})
    assert set(lab.arrays()) == {"a/x", "b/x"}
    assert [(name, array.tolist()) for name, array in lab.arrays("a/").items()] == [("x", [1, 1])]


def test_a_methods_own_state_is_without_the_progress_in_an_epoch(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("fedavg", weights)
    arrays = {"pace/order": torch.ones(1), "mine/w": torch.zeros(2), "v": torch.ones(1)}
    method.state_files.store(Instruction(1, "train"), arrays)
    later = opened("fedavg", round=2)
    assert set(later.state()) == {"mine/w", "v"}
    assert set(later.state("mine/")) == {"w"}
    assert set(later.stored_state) == set(arrays)
    assert opened("fedavg", site="s2a").state() == {}


def test_an_author_of_a_method_meets_eight_names_and_five_that_have_defaults() -> None:
    public = {name for name in vars(SiteMethod) if not name.startswith("_")}
    defaults = {"measured", "phases", "measures_what_stays", "trains_stacked", "follow"}
    assert public == {"admit", "open", "train"} | defaults
    assert SiteMethod.__abstractmethods__ == {"train"}
    text = methods_base.__doc__ or ""
    met = ("open", "train", "arrays", "state", "classifier", "measure", "fit", "Outgoing")
    assert all(f"``{name}``" in text for name in met)
    assert all(hasattr(Lab, name) for name in met if name not in ("train", "Outgoing"))


@pytest.mark.parametrize(("row", "fits"), [(0, True), (9, True), (10, False), (-1, False)])
def test_a_row_that_a_split_does_not_have_is_refused(silo: Silo, row: int, fits: bool) -> None:
    if fits:
        refuse_row(silo, "test", row)
        return
    with refuses(DataError, "s1a", 10, row):
        refuse_row(silo, "test", row)


@pytest.mark.parametrize("method", ["local", "fedavg-ft"])
def test_of_unseen_labels_a_model_that_stays_is_also_measured_on_the_silos_own(
    method: str, opened: Opened, weights: dict[str, Any]
) -> None:
    cut = {"partition": "unseen", "unseen": 1.0, "silos": 5, "silo_test_size": 60}
    lab = opened(method, weights, site="silo-2", own=cut, phase="evaluate")
    labels = lab.silo.test.labels
    own = (labels == 2) | (labels == 3)  # two of ten labels each, in their order
    with torch.no_grad():
        network = lab.open()
        network.eval()
        inputs = lab.silo.test.inputs.float()
        right = network.classify(network.features(network.encode(inputs))).argmax(dim=1) == labels
    found = evaluate(lab)[METRICS]
    assert 0 < int(own.sum()) < len(labels)
    assert found["incoming.test.own-labels-accuracy"] == pytest.approx(
        float(right[own].float().mean())
    )
    plain = evaluate(opened(method, weights, phase="evaluate"))[METRICS]
    assert not [name for name in plain if "own-labels" in name]


@pytest.mark.parametrize("method", METHODS)
def test_every_registered_method_can_be_opened_at_a_site(method: str) -> None:
    cls = site_class(method)
    assert issubclass(cls, SiteMethod)
    assert not getattr(cls, "__abstractmethods__", None)


# Who has a model of its own: whoever kept something while models were trained.


def _replies(**kept: bool) -> dict[str, Reply]:
    return {site: make_reply(site, kept_state=int(value)) for site, value in kept.items()}


def test_only_who_kept_something_while_models_were_trained_has_one() -> None:
    state = PersonalState({}, 2, dict.fromkeys("abc", 1))
    assert state.personal == (), "all keep their optimisers' moments"
    state = state.with_keepers(_replies(c=True, a=True, b=False))
    assert state.personal == ["a", "c"], "b's reply told of nothing kept"
    state = state.with_keepers(_replies(b=True))
    assert state.personal == ["a", "b", "c"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_says_its_name_and_what_leaves_the_site(
    method: str, participants: Participants
) -> None:
    cls = strategy_class(method)
    assert issubclass(cls, Method)
    assert title_of(method)
    told = cls(CommonSettings(), settings_class(method)(), participants).disclosures().leaves
    assert all(told)
    assert bool(told) is (method != "local")  # whose sites send metrics alone


@pytest.mark.parametrize("find", [site_class, strategy_class])
def test_a_misspelt_method_is_answered_with_the_nearest_name(find: Callable[[str], type]) -> None:
    with refuses(SettingError, "fedavg"):
        find("fedvag")
