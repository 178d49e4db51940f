"""Messages whose process has died, in the SuperNode's own state."""

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import Status, SubStatus
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode.nodestate import NodeStateFactory

from fedsilo.deployment.worker.supernode import (
    READ,
    ShortWaits,
    give_up_unanswered,
    shorten_waits,
)
from fedsilo.engines.inline_engine import flower_identity

RUN = 7


@pytest.fixture
def state() -> Any:
    made: Any = NodeStateFactory(ObjectStoreFactory()).state()
    made.set_node_id(3)
    return made


def received(state: Any, retrieved: bool = False) -> tuple[str, int]:
    """Store a message and its task as the SuperNode does; return their ids."""
    with flower_identity():
        message = Message(RecordDict({"config": ConfigRecord({"a": 1})}), 3, "train")
    message.metadata.__dict__["_message_id"] = f"message-{len(state.msg_store)}"
    message.metadata.__dict__["_run_id"] = RUN
    task = state.create_task(task_type="flwr-clientapp", run_id=RUN, fab_hash="f")
    state.store_message(message)
    if retrieved:
        state.get_messages(run_ids=[RUN], is_reply=False)
        state.record_message_processing_start(message.metadata.message_id)
    return message.metadata.message_id, task


def failed(state: Any, task: int) -> None:
    assert state.claim_task(task)
    assert state.activate_task(task)
    assert state.finish_task(task, SubStatus.FAILED, "why")


@pytest.mark.parametrize("retrieved", [False, True])
def test_a_message_whose_task_has_failed_gets_an_error_and_is_given_up_once(
    state: Any, retrieved: bool
) -> None:
    message, task = received(state, retrieved)
    failed(state, task)
    assert not state.get_messages(is_reply=True), "Flower would wait for ever"
    assert give_up_unanswered(state) == 1
    assert give_up_unanswered(state) == 0
    (reply,) = state.get_messages(is_reply=True)
    assert reply.metadata.reply_to_message_id == message
    assert reply.has_error()
    assert state.get_message_processing_duration(message) >= 0


def test_a_task_that_may_still_answer_is_waited_for(state: Any) -> None:
    _, task = received(state)
    assert give_up_unanswered(state) == 0, "nobody has taken it yet"
    assert state.claim_task(task)
    assert give_up_unanswered(state) == 0, "it starts"
    assert state.activate_task(task)
    assert give_up_unanswered(state) == 0, "it runs"


def test_a_killed_task_that_had_not_fetched_its_message_is_given_up(
    state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, task = received(state)
    assert state.claim_task(task)
    assert state.activate_task(task)
    for record in state.task_token_store.values():  # a minute after its last sign of life
        record.active_until = record.active_until.replace(year=2000)
    assert not state.get_messages(is_reply=True)
    assert [t.status.status for t in state.get_tasks()] == [Status.FINISHED]
    assert give_up_unanswered(state) == 1
    (reply,) = state.get_messages(is_reply=True)
    assert reply.has_error()


def test_the_supernodes_wait_for_a_reply_looks_and_ends(
    state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, ended = ModuleType("waits"), list[str]()
    module.time = time  # type: ignore[attr-defined]

    def push(state: Any, object_store: Any, send: Any, push_object: Any) -> None:
        while not state.get_messages(is_reply=True):
            module.time.sleep(0.5)
        ended.append("sent")

    module._push_messages = push  # type: ignore[attr-defined]
    assert shorten_waits(READ, module) is None
    waits: ShortWaits = module.time
    failed(state, received(state)[1])
    pushing: Callable[..., None] = module._push_messages
    pushing(state, object_store=None, send=None, push_object=None)
    assert ended == ["sent"]
    assert waits.look is None
