import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import Context
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.client_app.site.bounds import watch_usage, without_paths
from fedsilo.client_app.site.private_state import drop_old_states
from fedsilo.core.errors import RefusedError
from tests.support.errors import refuses

Node = Callable[..., Context]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x is missing in /data/heart: run", "x is missing in (data-dir)/heart: run"),
        ("'/etc/passwd' is no", "'(a path of the site)' is no"),
        ("(source: https://a.org/b/c)", "(source: https://a.org/b/c)"),
        ("32/64 samples, and/or none", "32/64 samples, and/or none"),
        ("~/secret/file.csv, line 2", "(a path of the site), line 2"),
        ("/srv/state/run/north is gone", "(state-dir)/run/north is gone"),
        ("/mnt/a/Ann Smith/x.png: no", "(a path of the site): no"),
        ("'/mnt/a/Ann B Smith.png' is no", "'(a path of the site)' is no"),
        (
            "/mnt/a is neither /mnt/b nor c",
            "(a path of the site) is neither (a path of the site) nor c",
        ),
        ("file:/mnt/secret/x, file:///mnt/y", "(a path of the site), (a path of the site)"),
        ("~ann/secret/x is no file", "(a path of the site) is no file"),
        ("cannot open:/mnt/x", "cannot open:(a path of the site)"),
        ("/mnt/x is no folder. Make one", "(a path of the site) is no folder. Make one"),
    ],
)
def test_a_server_reads_no_path_of_a_site(context: Node, text: str, told: str) -> None:
    node = context({"site": "s1a", "data-dir": "/data", "state-dir": "/srv/state/"})
    assert without_paths(text, node) == told


@given(st.lists(st.text("abcdefgh-_.", min_size=1, max_size=8), min_size=1, max_size=5))
def test_no_made_up_path_stays(parts: list[str]) -> None:
    from flwr.app import RecordDict

    node = Context(1, 1, {"site": "s1a"}, RecordDict(), {})
    path = "/" + "/".join(parts)
    assert path not in without_paths(f"cannot open {path}: no", node)


def test_states_of_others_and_of_this_run_are_left_alone(tmp_path: Path) -> None:
    for run in ("old", "new"):
        for site in ("mine", "other"):
            folder = tmp_path / run / site
            folder.mkdir(parents=True)
            (folder / "round-000001-00.safetensors").write_bytes(b"x" * 100)
            (folder / "privacy-ledger.json").write_text("{}")
    drop_old_states(tmp_path, "mine", "new", 50)
    kept = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.safetensors"))
    assert kept == [
        "new/mine/round-000001-00.safetensors",
        "new/other/round-000001-00.safetensors",
        "old/other/round-000001-00.safetensors",
    ]
    assert (tmp_path / "old" / "mine" / "privacy-ledger.json").exists(), "it counts what is spent"


def work_for_ever(seconds: float, megabytes: int) -> None:
    with watch_usage(seconds, megabytes):
        while True:
            sum(range(1000))


def test_work_that_takes_too_long_is_stopped() -> None:
    began = time.monotonic()
    with refuses(RefusedError, "max-seconds"):
        work_for_ever(0.2, 0)
    assert time.monotonic() - began < 10


def test_a_process_that_is_too_large_is_stopped() -> None:
    with pytest.raises(RefusedError, match="more than the 1 megabytes"):
        work_for_ever(60.0, 1)


def test_the_timer_ends_with_the_block() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with watch_usage(60.0, 0):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == before


def test_another_thread_is_not_watched() -> None:
    done = []

    def work() -> None:
        with watch_usage(0.001, 0):
            time.sleep(0.01)
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done


def sleep_without_gradients() -> None:
    import torch

    with watch_usage(0.05, 0):
        torch.set_grad_enabled(False)
        time.sleep(10)


def test_stopped_work_leaves_gradients_on() -> None:
    """The signal may come while PyTorch turns gradients on again after ``no_grad``."""
    import torch

    try:
        with refuses(RefusedError, "max-seconds"):
            sleep_without_gradients()
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
