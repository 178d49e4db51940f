"""The SuperNode's process: how often it polls, what it gives up, and when it ends."""

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import Status, SubStatus
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.version import package_version
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory

from fedsilo.deployment.worker import supernode
from fedsilo.deployment.worker.supernode import (
    READ,
    PollInterval,
    ShortWaits,
    give_up_unanswered,
    shorten_waits,
)
from fedsilo.engines.inline_engine import flower_identity

RUN = 7
_LOSES_THE_SERVER = """
import importlib, threading, time
from fedsilo.deployment.worker import supernode
# As Flower's: the Runtime API is a thread, and an error of the server is logged
module = importlib.import_module("flwr.supernode.cli.flower_supernode")
module.flower_supernode = lambda: threading.Thread(target=time.sleep, args=(60,)).start()
supernode.main()
"""


def test_poll_interval_after_an_arrival_is_short_for_ten_seconds() -> None:
    now = [100.0]
    interval = PollInterval(short=0.1, long=2.0, clock=lambda: now[0])
    assert interval.seconds() == 2.0
    interval.note_arrival()
    for passed, wait in ((0.0, 0.1), (9.9, 0.1), (10.0, 2.0), (1e6, 2.0)):
        now[0] = 100.0 + passed
        assert interval.seconds() == wait
    interval.note_arrival()
    assert interval.seconds() == 0.1


def test_installed_flower_is_the_one_whose_waits_were_read() -> None:
    assert package_version == READ
    assert start_client_internal.time is time


def test_shorten_waits_of_a_known_flower_makes_its_loop_poll_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("waits")
    module.time = time  # type: ignore[attr-defined]
    module._push_messages = lambda state: None  # type: ignore[attr-defined]
    exec("def idle(): time.sleep(3)\ndef reply(): time.sleep(0.5)", module.__dict__)
    slept: list[float] = []
    assert shorten_waits(READ, module) is None
    monkeypatch.setattr(time, "sleep", slept.append)
    module.idle()
    module.reply()
    module.idle()
    assert slept == [1.0, 0.05, 0.25], "idle, then a message came"
    waits: ShortWaits = module.time
    assert waits.monotonic is time.monotonic


@pytest.mark.parametrize("version", ["1.39.1", "1.40.0"])
def test_shorten_waits_of_another_flower_leaves_them_and_says_why(version: str) -> None:
    module = ModuleType("waits")
    module.time = time  # type: ignore[attr-defined]
    assert f"this is {version}: the SuperNode keeps Flower's own" in str(
        shorten_waits(version, module)
    )
    assert module.time is time
    del module.time
    assert "keeps Flower's own" in str(shorten_waits(READ, module))


def test_end_with_a_process_that_ends_ends_too() -> None:
    root = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    code = (
        "import time; from fedsilo.core.processes import end_with; "
        f"end_with({root.pid}); print('bound', flush=True); time.sleep(60)"
    )
    bound = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert bound.stdout
    assert bound.stdout.readline() == b"bound\n"
    root.communicate(b"\n")
    assert bound.wait(20) == 1
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1, "it has ended"


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


def test_a_supernode_that_lost_the_server_ends_with_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOSES_THE_SERVER],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "the SuperNode lost the server and ends: start it again" in done.stderr


@pytest.mark.parametrize("why", ["", "this is Flower 1.50"])
def test_a_supernode_that_loses_its_server_ends_with_its_process(
    why: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    done: list[object] = []
    monkeypatch.setattr(supernode, "end_with", lambda process: done.append(process))
    monkeypatch.setattr(supernode, "retry_soon", lambda: done.append("retry"))
    monkeypatch.setattr(supernode, "shorten_waits", lambda *_: why)
    flower = importlib.import_module("flwr.supernode.cli.flower_supernode")
    monkeypatch.setattr(flower, "flower_supernode", lambda: done.append("node"))
    monkeypatch.setattr(os, "_exit", done.append)
    supernode.main()
    assert done == [os.getppid(), "retry", "node", 1]
    said = capfd.readouterr().err
    assert "lost the server" in said
    assert why in said
    assert said.count("\n") == (2 if why else 1)
