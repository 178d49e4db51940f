import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable import inflatable_utils as objects

from fedsilo.core.messages import CONFIG, EVALUATE
from fedsilo.engines.inline_engine import InlineGrid, partition_configs
from fedsilo.strategies.wire.messaging import retry_soon, send_and_receive


def exchange(
    grid: Any, messages: list[Message], timeout: float, **options: Any
) -> dict[int, Message]:
    return dict(send_and_receive(grid, messages, timeout, **options))


def asks(nodes: Iterable[int]) -> list[Message]:
    content = RecordDict({CONFIG: ConfigRecord({"round": 1})})
    return [Message(content, node, EVALUATE, group_id="1") for node in nodes]


def test_each_node_gets_its_own_reply(
    spy_grid: Callable[..., Any], fake_app: Callable[..., ClientApp], content: Any
) -> None:
    app = fake_app(s2a=lambda message: content(num_examples=77))
    replies = exchange(spy_grid(app), asks([1003, 1001, 1002]), 10)
    counts = {n: r.content["metrics"]["num-examples"] for n, r in replies.items()}
    assert counts == {1001: 36, 1002: 77, 1003: 36}


def test_a_silent_node_gives_none_when_the_time_is_up_and_not_before(
    spy_grid: Callable[..., Any], fake_app: Callable[..., ClientApp]
) -> None:
    began = time.monotonic()
    replies = exchange(spy_grid(fake_app(), silent={1002}), asks([1001, 1002]), 0.3)
    assert 0.3 <= time.monotonic() - began < 30
    assert list(replies) == [1001]


def test_nobody_waits_once_all_have_answered(
    spy_grid: Callable[..., Any], fake_app: Callable[..., ClientApp]
) -> None:
    began = time.monotonic()
    assert len(exchange(spy_grid(fake_app()), asks([1001, 1002]), 60)) == 2
    assert time.monotonic() - began < 10


def test_arriving_yields_each_reply_once_as_it_comes(
    spy_grid: Callable[..., Any], fake_app: Callable[..., ClientApp]
) -> None:
    replies = send_and_receive(spy_grid(fake_app(), silent={1003}), asks([1001, 1002, 1003]), 0.2)
    assert [(node, reply.has_error()) for node, reply in replies] == [(1001, False), (1002, False)]


def test_an_error_is_a_reply_of_the_node_that_failed(
    spy_grid: Callable[..., Any], fake_app: Callable[..., ClientApp]
) -> None:
    def fail(_: Message) -> RecordDict:
        raise ValueError("no disk")

    reply = exchange(spy_grid(fake_app(s1a=fail)), asks([1001, 1002]), 10)[1001]
    assert reply is not None
    assert reply.has_error()
    assert "no disk" in reply.error.reason


def test_the_superlinks_own_error_counts_for_the_node_that_was_asked(
    spy_grid: Callable[..., Any], fake_app: Callable[..., ClientApp]
) -> None:
    grid = spy_grid(fake_app())
    pull = grid.pull_messages

    def pull_as_superlink(message_ids: Iterable[str]) -> list[Message]:
        # As flwr.server.superlink.linkstate.utils answers for a node that went away.
        replies = list(pull(message_ids))
        for index, reply in enumerate(replies):
            if reply.metadata.src_node_id == 1002:
                asked = next(m for m in grid.sent if m.metadata.dst_node_id == 1002)
                replies[index] = Message(Error(3, "Node Unavailable"), reply_to=asked)
                replies[index].metadata.__dict__["_src_node_id"] = 1
        return replies

    grid.pull_messages = pull_as_superlink
    replies = exchange(grid, asks([1001, 1002]), 10)
    assert set(replies) == {1001, 1002}
    assert replies[1002] is not None
    assert replies[1002].error.reason == "Node Unavailable"


@pytest.mark.parametrize("none", ["", None])  # of its HTTP grid and of its in-memory one
def test_a_message_that_flower_does_not_take_is_not_waited_for(
    spy_grid: Callable[..., Any], fake_app: Callable[..., ClientApp], none: str | None
) -> None:
    grid = spy_grid(fake_app())
    push = grid.push_messages
    # As Flower's grid answers where nodes are unknown by now: no id in the messages' places.
    grid.push_messages = lambda messages: [push(messages[:1])[0], none, none]
    began = time.monotonic()
    replies = exchange(grid, asks([1001, 1002, 1003]), 60)
    assert [(node, reply.has_error()) for node, reply in sorted(replies.items())] == [
        *((1001, False), (1002, True), (1003, True)),
    ]
    assert "it was revoked, or has a new key since" in replies[1003].error.reason
    assert time.monotonic() - began < 30


class Leaving:
    """A grid whose node 1002 is away for some looks; what is pulled of it then is lost."""

    def __init__(self, inner: Any, looks: int) -> None:
        self.inner, self.looks = inner, looks

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return list(self.inner.push_messages(messages))

    def get_node_ids(self) -> list[int]:
        self.looks -= 1
        return [1001] if self.looks >= 0 else [1001, 1002]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = list(self.inner.pull_messages(message_ids))
        if self.looks >= 0:
            asked = next(m for m in self.inner.sent if m.metadata.dst_node_id == 1002)
            lost = Message(Error(5, "Node Unavailable"), reply_to=asked)
            replies = [lost if r.metadata.src_node_id == 1002 else r for r in replies]
        return replies


def test_a_node_that_is_away_for_a_while_is_waited_for(
    spy_grid: Callable[..., Any], fake_app: Callable[..., ClientApp]
) -> None:
    grid = Leaving(spy_grid(fake_app()), looks=4)
    away: list[Collection[int]] = []
    reply = exchange(grid, asks([1001, 1002]), 10, away=away.append)[1002]
    assert reply is not None
    assert reply.has_content()
    assert grid.looks < 0
    assert away == [[1002], []], "told when it went and when it came back"


def test_a_node_that_stays_away_is_given_up_before_the_replies_are_due(
    spy_grid: Callable[..., Any], fake_app: Callable[..., ClientApp]
) -> None:
    began = time.monotonic()
    grid = Leaving(spy_grid(fake_app()), looks=10**6)
    replies = exchange(grid, asks([1001, 1002]), 60, away_timeout=0.3)
    assert 0.3 <= time.monotonic() - began < 30
    assert replies[1001] is not None
    assert replies[1001].has_content()
    assert replies[1002] is not None
    assert "Node Unavailable" in replies[1002].error.reason


def test_of_many_sites_few_are_asked_for_at_once() -> None:
    asked: list[int] = []

    class Counting(InlineGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            asked.append(len(set(message_ids)))
            return super().pull_messages(message_ids)

    def answer(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    app = ClientApp()
    app.evaluate()(answer)
    grid = Counting(app, {}, partition_configs(20))
    replies = exchange(grid, asks(range(1001, 1021)), 60)
    assert sorted(replies) == list(range(1001, 1021))
    assert max(asked) <= 8


def test_retry_soon_asks_again_for_an_object_on_its_way_within_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for function in (objects.pull_objects, objects.pull_and_inflate_object_from_tree):
        monkeypatch.setattr(function, "__kwdefaults__", dict(function.__kwdefaults__))
    asked: list[float] = []

    def pull(object_id: str) -> bytes:
        asked.append(time.monotonic())
        if len(asked) == 1:
            raise objects.ObjectUnavailableError(object_id)
        return b"content"

    assert retry_soon()
    assert objects.pull_objects(["a"], pull) == {"a": b"content"}
    assert asked[1] - asked[0] < 0.5, "Flower's own wait is a second"


def test_retry_soon_with_a_flower_without_that_wait_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(objects.pull_objects, "__kwdefaults__", None)
    before = dict(objects.pull_and_inflate_object_from_tree.__kwdefaults__)
    assert not retry_soon()
    assert objects.pull_and_inflate_object_from_tree.__kwdefaults__ == before
    monkeypatch.delattr(objects, "pull_objects")
    assert not retry_soon()
