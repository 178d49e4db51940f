"""Short memory, of a GPU or of the machine, is one line: who holds it, and what to lower."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message

from fedsilo.cli.main import main
from fedsilo.client_app.app import app
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.client_app.training.memory import memory_shortage
from fedsilo.core.errors import ERROR_CODES, MemoryShortageError
from fedsilo.core.messages import TRAIN
from fedsilo.core.settings.common_settings import GPU_SHARE, CommonSettings
from fedsilo.core.settings_schema import Value

GIB = 2**30
# As PyTorch writes it
FULL = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.11 GiB of "
    "which 1.10 GiB is free. Including non-PyTorch memory, this process has 3.00 GiB memory in use."
)
SETTINGS = CommonSettings(method="uefl", batch_size=64)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Return a function that gives GPU 1 of 80 GiB so many free GiB, and this process so many."""

    def set_up(free: float, own: float) -> None:
        memory = {1: (int(free * GIB), 80 * GIB)}
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: memory[index])
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: int(own * GIB))

    return set_up


def explained(error: Exception, **more: int) -> str:
    found = memory_shortage(error, SETTINGS, more.pop("training", 1) > 0, **more)
    assert isinstance(found, MemoryShortageError)
    assert "\n" not in str(found)
    return str(found)


def test_another_program_on_the_card_is_to_be_ended(card: Callable[[float, float], None]) -> None:
    card(1, 3)
    told = explained(torch.OutOfMemoryError(FULL))
    for part in ("GPU 1", "2.50 GiB", "'uefl'", "80.0 GiB", "3.0", "76.0", "nvidia-smi", "resume"):
        assert part in told


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, ("'train.batch-size' below 64", "'train.micro-batch' below 64")),
        ({"micro_batch": 8}, ("'train.micro-batch' below 8",)),
    ],
)
def test_a_run_that_needs_too_much_names_what_to_lower(
    changes: dict[str, int], named: tuple[str, ...], card: Callable[[float, float], None]
) -> None:
    card(2, 77)
    settings = CommonSettings(batch_size=64, **changes)  # type: ignore[arg-type]
    told = str(memory_shortage(torch.OutOfMemoryError(FULL), settings, training=True))
    assert all(part in told for part in named)
    assert "nvidia-smi" not in told


def test_sites_of_one_batch_a_share_and_a_measurement_name_their_own_remedy(
    card: Callable[[float, float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    card(2, 40)
    together = explained(torch.OutOfMemoryError(FULL), together=9)
    assert "'machine.vectorised' below 9" in together
    assert "batch-size" not in together
    assert "batch-size" not in explained(torch.OutOfMemoryError(FULL), training=0)
    monkeypatch.setenv(GPU_SHARE, "0.25")
    shared = explained(torch.OutOfMemoryError(FULL))
    assert "'client-resources-num-gpus'" in shared
    assert "0.25" in shared


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "GPU 0"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `c`"), "GPU 0"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "this machine"),
        (MemoryError(), "this machine"),
    ],
)
def test_libraries_and_the_machine_run_out_too(error: Exception, place: str) -> None:
    """Without a driver nobody says who holds the memory."""
    told = explained(error)
    assert told.startswith(f"{place} has no memory left in a run of method 'uefl':")
    assert ("'machine.device' cpu" in told) == (place == "GPU 0")


def test_a_machine_without_memory_is_not_told_to_leave_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(GPU_SHARE, "0.25")
    told = str(memory_shortage(MemoryError(), CommonSettings(batch_size=64, micro_batch=8), True))
    assert told.endswith(": start another run with 'train.micro-batch' below 8")


def test_other_errors_are_none_of_memory() -> None:
    for error in (RuntimeError("expected scalar type"), ValueError("out of range")):
        assert memory_shortage(error, SETTINGS, training=True) is None


def _fail(training: LocalTraining) -> float:
    """Run out of memory after a large tensor was made, which the frame holds."""
    held = torch.zeros(8)
    _fail.held = weakref.ref(held)  # type: ignore[attr-defined]
    raise torch.OutOfMemoryError(FULL)


def test_a_site_answers_with_the_code_and_lets_its_tensors_go(
    message: Callable[..., Message],
    context: Callable[..., Context],
    weights: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LocalTraining, "run", _fail)
    gc.disable()
    try:
        reply = app(message(TRAIN, weights), context({"partition-id": 0}))
        assert _fail.held() is None  # type: ignore[attr-defined]
    finally:
        gc.enable()
    assert reply.error.code == ERROR_CODES["memory"]
    assert "GPU 1 has no memory left" in reply.error.reason


def test_a_run_that_runs_out_ends_in_one_line_and_resumes_to_the_same_bytes(
    tiny: Callable[..., dict[str, Value]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second of three sites runs out in round 2, as if another program had taken the card."""
    values = tiny("fedavg", dataset="heart-synthetic", network="logistic")
    values = {name: value for name, value in values.items() if not name.startswith("split.")}
    words = ["simulate", "fedavg", "--engine", "inline", "--no-pictures", "--out", str(tmp_path)]
    for name, value in values.items():
        words += ["--set", f"{name}={value}"]
    train, keys = LocalTraining.run, []

    def run(training: LocalTraining) -> float:
        keys.append(training.key)
        if training.key == (2, "hungary"):
            raise torch.OutOfMemoryError(FULL)
        return train(training)

    assert main([*words, "--name", "whole"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(LocalTraining, "run", run)
        capsys.readouterr()
        assert main([*words, "--name", "short"]) == 1
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "error[" in one]
    for part in ("site hungary", "round 2", "'fedavg'", "'train.batch-size'", "resume"):
        assert part in line
    failures = (tmp_path / "short" / "failures.jsonl").read_text()
    assert '"code": "memory"' in failures
    assert main(["resume", str(tmp_path / "short")]) == 0
    for name in ("model.safetensors", "metrics.csv"):
        assert (tmp_path / "short" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
