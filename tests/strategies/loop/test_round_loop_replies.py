"""What counts as a usable reply, and what a site owes in which round."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fedsilo.core.errors import SiteError
from fedsilo.core.messages import TRAIN
from fedsilo.strategies.loop.ask import Ask
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.wire.reply import Reply

Started = Callable[..., tuple[Any, FedAvg]]


def bad_replies(content: Callable[..., RecordDict]) -> dict[str, RecordDict]:
    good = {"w": np.zeros(2, np.float32)}
    no_metrics = content(good)
    del no_metrics["metrics"]
    return {
        "no metrics": no_metrics,
        "metric 'loss' is nan": content(good, loss=float("nan")),
        "non-finite values": content({"w": np.float32([1, np.nan])}),
        r"float32 \(3,\), expected float32 \(2,\)": content({"w": np.zeros(3, np.float32)}),
        r"float64 \(2,\)": content({"w": np.zeros(2)}),
        r"missing \['w'\], surplus \[\]": content(),
        r"missing \[\], surplus \['v'\]": content(good | {"v": good["w"]}),
        "'num-examples' is 0": content(good, num_examples=0),
        "'num-examples' is 35; the site has 36 samples": content(good, num_examples=35),
        "'trained.train.loss' is missing": content(good, **{"trained.train.loss": None}),
        r"'incoming.test.class.0.false' is 1e\+12, not a whole number from 0 to 10": content(
            good, **{"incoming.test.class.0.false": 1e12}
        ),
        "'incoming.test.entropy' is missing": content(good, **{"incoming.test.entropy": None}),
    }


@pytest.mark.parametrize("index", range(12))
def test_a_bad_reply_counts_as_a_failing_site(
    started: Started, fake_app: Any, content: Any, measured: dict[str, float], index: int
) -> None:
    said, reply = list(bad_replies(partial(content, **measured)).items())[index]
    app = fake_app(s2a=lambda message: reply)
    with pytest.raises(SiteError, match=f"site s2a, round 1, phase train: .*{said}"):
        started(app)


def test_a_method_may_object_to_a_reply_of_the_right_form(
    started: Started,
    fake_app: Any,
    answering: Any,
    recorder: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def fault(reply: Reply) -> str | None:
        asked.append(reply.site)
        return "too good to be true" if reply.metrics.get("loss") == 0 else None

    def one_round(self: FedAvg, state: State, ask: Ask) -> State:
        trained = ask(TRAIN, dict.fromkeys(ask.sites, state.arrays), fault=fault)
        return dataclasses.replace(state, arrays=self.average(trained, state.arrays))

    monkeypatch.setattr(FedAvg, "round", one_round)
    app = fake_app(answering(4.0), s2a=answering(9.0, loss=0.0))
    _, strategy = started(app, min_sites=2, rounds=1)
    assert strategy.state is not None
    assert strategy.state.arrays["w"].tolist() == [4, 4]
    assert recorder.failures == [(1, "train", "s2a", "too good to be true")]
    assert asked == ["s1a", "s2a", "s3a"]
    with pytest.raises(SiteError, match="site s2a, round 1, phase train: too good to be true"):
        started(app)


def test_a_bad_reply_never_reaches_the_mean(
    started: Started,
    fake_app: Any,
    answering: Any,
    content: Any,
    measured: dict[str, float],
    recorder: Any,
) -> None:
    poison = content({"w": np.full(2, np.inf, np.float32)}, **measured)
    _, strategy = started(fake_app(answering(4.0), s2a=lambda m: poison), min_sites=1)
    assert strategy.state is not None
    assert strategy.state.arrays["w"].tolist() == [4, 4]
    # In the final evaluation no site may answer with arrays at all.
    assert recorder.failures[-1][1:3] == ("evaluate", "s2a")
    assert "surplus ['w']" in recorder.failures[-1][3]


@pytest.mark.parametrize(("round_", "fails"), [(1, True), (2, False)])
def test_measurements_are_needed_in_the_rounds_that_measure(
    started: Started, fake_app: Any, answering: Any, told: Any, round_: int, fails: bool
) -> None:
    def forgets(message: Message) -> RecordDict:
        left_out = {} if told(message)["round"] != round_ else {"incoming.val.accuracy": None}
        answer: RecordDict = answering(**left_out)(message)
        return answer

    app = fake_app(s2a=forgets)
    if fails:
        with pytest.raises(SiteError, match=r"site s2a, round 1, .*'incoming\.val\.accuracy' is"):
            started(app, evaluate_every=2)
    else:
        _, strategy = started(app, evaluate_every=2)
        assert strategy.state.round == 2


@pytest.mark.parametrize("key", ["incoming.val.loss", "incoming.test.accuracy"])
def test_the_final_evaluation_needs_its_measurements_whatever_the_rounds_did(
    started: Started, fake_app: Any, answering: Any, key: str
) -> None:
    def forgets(message: Message) -> RecordDict:
        answer: RecordDict = answering(**{key: None})(message)
        return answer

    with pytest.raises(SiteError, match=f"site s3a, round 2, phase evaluate: metric '{key}' is"):
        started(fake_app(s3a=forgets), evaluate_every=0)


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_site_without_samples_of_a_split_owes_no_measurements_of_it_and_the_others_do(
    started: Started, fake_app: Any, answering: Any, recorder: Any, split: str
) -> None:
    none = {f"incoming.{split}.{metric}": None for metric in ("accuracy", "entropy", "loss")}
    empty = {"s2a": {split: 0}}
    started(fake_app(s2a=answering(**none)), sizes=empty)
    assert recorder.failures == []
    said = f"site s1a, round 1, phase train: metric 'incoming.{split}.accuracy' is missing"
    with pytest.raises(SiteError, match=said):
        started(fake_app(answering(**none), s3a=answering()), sizes=empty, min_sites=3)


def test_what_a_site_owes_does_not_depend_on_what_another_lacks(
    started: Started, fake_app: Any, answering: Any
) -> None:
    app = fake_app(s2a=answering(**{"incoming.test.loss": None}))
    with pytest.raises(SiteError, match=r"site s2a, round 1, .*'incoming\.test\.loss' is missing"):
        started(app, sizes={"s2a": {"val": 0}, "s3a": {"test": 0}})
