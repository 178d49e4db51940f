import ctypes
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.client_app.training import compute
from fedsilo.client_app.training.compute import (
    Compute,
    Streamed,
    choose_compute,
    collect_unrepeatable_operations,
    compute_of,
    scaled_step,
)
from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.settings.common_settings import GPU_SHARE, CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from tests.support.errors import refuses

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)


@pytest.mark.parametrize(
    "device", ["tpu", "gpu", "", "CPU", "cpu:0", "auto:1", "cuda:x", "cuda:-1"]
)
def test_a_device_that_is_none_is_refused_with_the_allowed_ones(device: str) -> None:
    with refuses(SettingError, "device"):
        choose_compute(device, "auto", 1)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_that_is_not_there_is_refused(device: str) -> None:
    with refuses(SettingError, device):
        choose_compute(device, "auto", 1)


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_of_too_high_a_number_is_refused() -> None:
    with refuses(SettingError, "cuda:1", "1"):
        choose_compute("cuda:1", "auto", 1)


@pytest.mark.usefixtures("no_gpu")
def test_auto_is_full_precision_on_the_cpu_where_there_is_no_gpu() -> None:
    assert choose_compute("auto", "auto", 1) == Compute(CPU, bf16=False)


@pytest.mark.usefixtures("one_gpu")
def test_auto_is_bf16_on_the_gpu_where_there_is_one() -> None:
    assert choose_compute("auto", "auto", 1) == Compute(
        torch.device("cuda:0"), bf16=True, channels_last=True
    )
    assert not choose_compute("cuda", "fp32", 1).bf16
    assert choose_compute("cpu", "auto", 1) == Compute(CPU, bf16=False)


@pytest.mark.usefixtures("one_gpu")
def test_auto_is_full_precision_where_a_gpu_only_emulates_bf16(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation
    )
    assert not choose_compute("auto", "auto", 1).bf16
    assert not caplog.records
    assert choose_compute("auto", "bf16", 1).bf16, "who asks for it by name gets it"
    (record,) = caplog.records
    assert "'machine.precision'" in record.getMessage()


@pytest.mark.usefixtures("one_gpu")
def test_bf16_is_that_of_the_gpu_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch answers for the current GPU: here the first one has bf16, and the second one not."""
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: current[-1] == 0
    )
    assert choose_compute("cuda:0", "auto", 1).bf16
    assert not choose_compute("cuda:1", "auto", 1).bf16


@pytest.mark.usefixtures("one_gpu")
def test_memory_format_auto_is_channels_last_on_a_gpu_alone() -> None:
    last = {
        (device, wanted): choose_compute(device, "fp32", 1, memory_format=wanted).channels_last
        for device in ("cpu", "cuda")
        for wanted in ("auto", "contiguous", "channels-last")
    }
    assert [pair for pair, is_last in last.items() if is_last] == [
        ("cpu", "channels-last"),
        ("cuda", "auto"),
        ("cuda", "channels-last"),
    ]


_FREES_20_MIB_BEFORE_AND_AFTER = """
import psutil, torch
from fedsilo.client_app.training.compute import choose_compute
torch.ones(8)
def kept():
    before = psutil.Process().memory_info().rss
    torch.ones(5 * 2**20)
    return round((psutil.Process().memory_info().rss - before) / 2**20)
print(kept())
choose_compute("cpu", "fp32", 1)
print(kept())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_a_process_that_computes_keeps_what_it_freed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FREES_20_MIB_BEFORE_AND_AFTER],
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = map(int, done.stdout.split())
    assert abs(before) <= 2
    assert abs(after - 20) <= 2


@pytest.mark.parametrize(
    ("network", "wanted", "last"),
    [
        ("auto", "auto", True),
        ("conv", "auto", True),
        ("vgg16-bn", "auto", True),
        ("conv", "contiguous", False),
        ("conv", "channels-last", True),
        ("resnet22", "auto", False),
        ("timm:resnet18", "auto", False),
    ],
)
def test_channels_are_last_on_a_cpu_for_networks_that_gain(
    network: str, wanted: str, last: bool
) -> None:
    settings = CommonSettings(device="cpu", network=network, memory_format=wanted)
    assert compute_of(settings).channels_last is last


def test_channels_last_on_a_cpu_is_refused_for_other_networks() -> None:
    settings = CommonSettings(device="cpu", network="resnet22", memory_format="channels-last")
    with refuses(SettingError, "machine.memory-format", "resnet22", "auto"):
        compute_of(settings)


@pytest.mark.parametrize("last", [True, False])
def test_images_and_convolutions_are_placed_in_the_memory_format(last: bool) -> None:
    compute = Compute(CPU, bf16=False, channels_last=last)
    convolution = compute.place(torch.nn.Conv2d(3, 4, 2))
    image = compute.bring(torch.rand(2, 3, 5, 5))
    for tensor in (image, convolution.weight, convolution(image)):
        assert tensor.is_contiguous(memory_format=torch.channels_last) is last
    assert compute.bring(torch.rand(4, 2)).is_contiguous()


def test_a_gradient_is_the_same_in_either_memory_format_but_for_rounding() -> None:
    # In float64: in float32 another order of the same additions may take ReLU to its other side
    images, labels = torch.rand(8, 1, 8, 8).double(), torch.arange(8) % 2
    gradients = []
    for last in (False, True):
        compute = Compute(CPU, bf16=False, channels_last=last)
        settings = CommonSettings(network="conv", width=4, dropout=0.0)
        network = compute.place(build_classifier(settings, NetworkShape((1, 8, 8), 2)).double())
        network.loss(compute.bring(images), labels).backward()
        gradients.append([p.grad for p in network.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 4
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("one_gpu")
def test_fp16_is_of_a_gpu_and_never_of_a_cpu() -> None:
    half = choose_compute("auto", "fp16", 1)
    assert half == Compute(torch.device("cuda:0"), bf16=False, fp16=True, channels_last=True)
    with refuses(SettingError, "bf16", "fp32", "auto"):
        choose_compute("cpu", "fp16", 1)


def test_a_step_of_gradients_that_overflow_is_left_out_and_halves_the_scale() -> None:
    scaler = Compute(CPU, bf16=False, fp16=True).scaler()
    weight, beside = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimisers = [torch.optim.SGD([one], lr=0.5) for one in (weight, beside)]

    def step(loss: torch.Tensor) -> bool:
        weight.grad = beside.grad = None
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return scaled_step(optimisers, scaler)

    assert not step(weight.sum() * torch.inf + beside.sum())
    assert (weight.item(), scaler.get_scale()) == (1.0, 512.0)
    assert beside.item() == 0.5, "its own gradient was finite"
    assert step(2 * weight.sum() + 4 * beside.sum())
    assert weight.grad is not None
    assert weight.grad.item() == 2.0, "what follows the step sees it as it is"
    assert (weight.item(), beside.item()) == (1 - 0.5 * 2, 0.5 - 0.5 * 4)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("deterministic", "wanted", "warn_only"),
    [("true", True, False), ("warn", True, True), ("false", False, False)],
)
def test_what_is_not_deterministic_is_refused_named_or_let_be(
    deterministic: str, wanted: bool, warn_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bool, bool]] = []
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda on, warn_only: asked.append((on, warn_only))
    )
    for name in ("benchmark", "allow_tf32"):
        monkeypatch.setattr(torch.backends.cudnn, name, True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    choose_compute("cuda", "fp32", 1, deterministic)
    assert asked == [(wanted, warn_only)]
    assert torch.backends.cudnn.benchmark is not wanted
    assert torch.utils.deterministic.fill_uninitialized_memory is False
    assert torch.backends.cudnn.allow_tf32 is False
    choose_compute("cpu", "fp32", 1, deterministic)
    assert len(asked) == 1, "of a CPU nothing is asked"


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("share", "enforced"), [("0.5", [0.5]), ("1.0", []), ("0.0", []), ("much", [])]
)
def test_a_clients_share_of_a_gpus_memory_is_enforced(
    share: str, enforced: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, device: given.append(part)
    )
    monkeypatch.setattr(compute, "_be_repeatable", lambda precision, deterministic: None)
    monkeypatch.setenv(GPU_SHARE, share)
    choose_compute("cuda", "fp32", 1)
    assert given == enforced


def test_threads_are_set_for_the_process() -> None:
    for threads in (2, 1):
        choose_compute("cpu", "auto", threads)
        assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("precision", "kind"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_forward_passes_run_in_the_chosen_precision(precision: str, kind: torch.dtype) -> None:
    with choose_compute("cpu", precision, 1).autocast():
        assert torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == kind


def test_nothing_is_copied_on_the_cpu() -> None:
    chosen, tensor, network = Compute(CPU, False), torch.ones(1), torch.nn.Linear(1, 1)
    assert chosen.bring(tensor) is tensor
    assert chosen.place(network) is network


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def _put() -> None:
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


@pytest.mark.usefixtures("deterministic")
def test_an_operation_is_named_each_time_and_other_warnings_pass() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    for _ in range(2):
        with (
            warnings.catch_warnings(record=True) as passed,
            collect_unrepeatable_operations() as found,
        ):
            _put()
            warnings.warn("something else", stacklevel=1)
        assert found == {"put_"}
        assert [str(warning.message) for warning in passed] == ["something else"]
    with collect_unrepeatable_operations() as found:
        torch.ones(2) + 1
    assert found == set()


def test_attention_of_several_algorithms_is_named_and_warnings_are_as_before() -> None:
    assert not torch.is_warn_always_enabled()
    with collect_unrepeatable_operations() as found:
        assert torch.is_warn_always_enabled()
        warnings.warn(
            "Memory Efficient attention defaults to a non-deterministic algorithm. To explicitly "
            "enable determinism call torch.use_deterministic_algorithms(True, warn_only=False).",
            stacklevel=1,
        )
    assert found == {"Memory-Efficient-attention"}
    assert not torch.is_warn_always_enabled()


@pytest.mark.usefixtures("deterministic")
def test_an_operation_is_refused_by_its_name_and_with_the_mend() -> None:
    torch.use_deterministic_algorithms(True)
    with (
        refuses(SiteError, "put_", "warn"),
        collect_unrepeatable_operations(),
    ):
        _put()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with collect_unrepeatable_operations() as found:  # the fix
        _put()
    assert found == {"put_"}
    with pytest.raises(RuntimeError, match="another"), collect_unrepeatable_operations():
        raise RuntimeError("another")


@given(
    shape=st.sampled_from([(40,), (40, 3), (40, 2, 4, 5)]),
    batches=st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=12), max_size=8),
)
def test_a_streamed_tensor_gives_the_rows_that_were_asked_for(
    shape: tuple[int, ...], batches: list[list[int]]
) -> None:
    tensor = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
    streamed = Streamed(tensor, CPU)
    taken = [(streamed.pick(torch.tensor(rows)), rows) for rows in batches]
    for batch, rows in taken:  # none was written over by a later one
        assert torch.equal(batch, tensor[rows])


def test_images_are_streamed_channels_last_from_two_buffers_at_most() -> None:
    tensor = torch.rand(20, 3, 4, 4)
    streamed = Streamed(tensor, CPU)
    for size in (4, 8, 8, 2):
        batch = streamed.pick(torch.arange(size))
        assert batch.is_contiguous(memory_format=torch.channels_last)
    assert [len(buffer) for buffer in streamed._buffers] == [8, 8]


def test_a_copy_to_a_second_gpu_is_awaited_there(monkeypatch: pytest.MonkeyPatch) -> None:
    event = MagicMock()
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    streamed = Streamed(torch.rand(4, 2), torch.device("cuda:1"))
    pinned = MagicMock()  # real ones need a GPU
    pinned.__len__.return_value = 4
    streamed._buffers = [pinned, pinned]
    streamed.pick(torch.tensor([0, 1]))
    event.record.assert_called_once_with("stream of cuda:1")


def test_on_the_cpu_rows_of_a_tensor_are_picked_from_it() -> None:
    tensor = torch.rand(5, 2)
    pick = Compute(CPU, bf16=False).hold(tensor)
    assert torch.equal(pick(torch.tensor([3, 0])), tensor[[3, 0]])


def test_rows_are_streamed_to_a_gpu_if_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = torch.arange(6.0).reshape(3, 2)
    gpu = Compute(torch.device("cuda"), bf16=False)
    monkeypatch.setattr(compute, "_HELD", rows.nbytes - 1)
    assert isinstance(gpu.hold(rows).__self__, Streamed)  # type: ignore[attr-defined]


def test_peak_memory_is_in_bytes_on_every_system(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = types.SimpleNamespace(ru_maxrss=1000)
    monkeypatch.setattr(compute.resource, "getrusage", lambda who: usage)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    cpu = Compute(CPU, bf16=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert cpu.peak_memory() == 1_024_000
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cpu.peak_memory() == 1000
    assert Compute(torch.device("cuda"), bf16=False).peak_memory() == 7
