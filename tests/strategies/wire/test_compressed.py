import struct
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.errors import SiteError
from fedsilo.strategies.wire.compressed import Compression, from_bf16, to_bf16
from fedsilo.strategies.wire.records import (
    ArrayError,
    NDArray,
    Packed,
    bundle,
    from_record,
    to_record,
)
from fedsilo.strategies.wire.reply import ArraySpec, Specs

Content = Callable[..., RecordDict]
WAYS = [Compression("fp32"), Compression("bf16")]
SENT = {"w": np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)}
TRAINED = {"w": np.array([[1.5, 2.0, 2.0], [4.0, 5.25, 6.0]], np.float32)}  # +0.5, -1, +0.25


def specs_of(arrays: Mapping[str, NDArray]) -> Specs:
    """Return the specs of float32 arrays of the same shapes."""
    return {name: ArraySpec(array.shape) for name, array in arrays.items()}


def floats(*values: float) -> NDArray:
    return np.array(values, np.float32)


def travelled(
    way: Compression, content: Content, leaving: dict[str, NDArray], sent: dict[str, NDArray]
) -> dict[str, NDArray]:
    packed = way.pack_updates(leaving, sent)
    return dict(way.decode_reply("s1a", content(packed), specs_of(leaving), sent).arrays)


def refusal(
    way: Compression, content: Content, data: bytes, sent: dict[str, NDArray] = SENT
) -> str:
    reply = content({"w": np.frombuffer(data, np.uint8)})
    with pytest.raises(SiteError) as caught:
        way.decode_reply("s1a", reply, specs_of(sent), sent)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("precision", "data"),
    [
        ("fp32", struct.pack("<6f", 0.5, 0.0, -1.0, 0.0, 0.25, 0.0)),
        ("bf16", struct.pack("<6H", 0x3F00, 0, 0xBF80, 0, 0x3E80, 0)),
    ],
)
def test_a_hand_made_update_is_its_numbers_in_order(
    precision: str, data: bytes, content: Content
) -> None:
    way = Compression(precision)
    packed = way.pack_updates(TRAINED, SENT)
    assert packed["w"].tobytes() == data
    assert (travelled(way, content, TRAINED, SENT)["w"] == TRAINED["w"]).all()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_travelled_is_the_update_to_half_a_step_of_its_precision(
    way: Compression, content: Content
) -> None:
    rng = np.random.default_rng(5)
    sent = {"w": rng.normal(size=(7, 9)).astype(np.float32), "b": floats(0.5)}
    update = {n: rng.normal(size=a.shape).astype(np.float32) for n, a in sent.items()}
    leaving = {n: a + update[n] for n, a in sent.items()}
    arrived = travelled(way, content, leaving, sent)
    step = 2.0**-8 if way.precision == "bf16" else 1e-6
    for name, array in leaving.items():
        off = np.abs(arrived[name] - array)
        assert (off <= step * np.abs(update[name]) + 1e-6).all()
        assert arrived[name].shape == array.shape
        assert arrived[name].dtype == np.float32


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_bundle_of_updates_is_opened_and_counted_as_if_apart(
    way: Compression, content: Content
) -> None:
    sent = {name: np.zeros(40, np.float32) for name in ("a", "b")}
    leaving = {name: np.arange(40, dtype=np.float32) for name in sent}
    packed = way.pack_updates(leaving, sent)
    apart = way.decode_reply("s1a", content(packed), specs_of(sent), sent)
    bundled = way.decode_reply("s1a", bundle(content(packed)), specs_of(sent), sent)
    assert bundled.bytes_up == apart.bytes_up
    for name in sent:
        assert (bundled.arrays[name] == apart.arrays[name]).all()


def test_statistics_whole_numbers_and_arrays_that_were_not_sent_stay_exact(
    content: Content,
) -> None:
    exact = {
        "norm.running_mean": floats(0.1, 1e9),
        "norm.num_batches": np.array(3, np.int64),
        "own": floats(0.1, 0.2),
    }
    sent = {"norm.running_mean": floats(5, 5), "norm.num_batches": np.array(1, np.int64)}
    packed = Compression("bf16").pack_updates(exact, sent)
    for name, array in exact.items():
        assert packed[name] is array


def test_a_reply_counts_the_bytes_that_travelled(content: Content) -> None:
    sent = {"w": np.zeros(10_000, np.float32)}
    leaving = {"w": np.arange(10_000, dtype=np.float32)}
    sizes = {}
    for way in WAYS:
        packed = way.pack_updates(leaving, sent)
        reply = way.decode_reply("s1a", content(packed), specs_of(sent), sent)
        sizes[way.precision] = reply.bytes_up
    assert sizes["fp32"] - sizes["bf16"] == 20_000


def test_bf16_down_is_half_the_bytes_and_costs_the_server_nothing(content: Content) -> None:
    """1 + 3/512 is 1 + 1/128 at the site; its training moves the server's own weight."""
    way, packed_before = Compression(down="bf16"), Packed()
    model = {"w": floats(1 + 3 / 512, 2.0), "norm.running_var": floats(1 + 3 / 512)}
    way.pack_weights(model, packed_before)
    sent = from_record(to_record(model, packed_before))
    assert sent["w"].dtype == np.uint16
    arrived = way.unpack_received(sent)
    assert arrived["w"].tolist() == [1 + 1 / 128, 2.0]
    assert arrived["norm.running_var"].tolist() == [1 + 3 / 512]
    trained = {"w": arrived["w"] + floats(0.25, -0.5), "norm.running_var": floats(7.0)}
    packed = way.pack_updates(trained, arrived)
    reply = way.decode_reply("s1a", content(packed), specs_of(model), model)
    assert reply.arrays["w"].tolist() == [1 + 3 / 512 + 0.25, 1.5]
    assert reply.arrays["norm.running_var"].tolist() == [7.0]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_update_that_is_not_finite_is_refused_by_name(precision: str, value: float) -> None:
    leaving = {"w": np.where(SENT["w"] == 3, np.float32(value), SENT["w"])}
    with pytest.raises(ArrayError, match=f"'w' contains non-finite .* as {precision}"):
        Compression(precision).pack_updates(leaving, SENT)


@pytest.mark.parametrize(
    ("way", "data", "why"),
    [
        (Compression("bf16"), bytes(11), "expected uint8"),
        (Compression("bf16"), bytes(13), "expected uint8"),
        (Compression("fp32"), b"", "expected uint8"),
        (Compression("bf16"), struct.pack("<6H", 0x7F80, *[0] * 5), "non-finite"),
        (Compression("bf16"), struct.pack("<6H", 0x7FC0, *[0] * 5), "non-finite"),
        (Compression("fp32"), struct.pack("<6f", np.nan, *[0] * 5), "non-finite"),
    ],
)
def test_altered_update_is_refused(
    way: Compression, data: bytes, why: str, content: Content
) -> None:
    assert why in refusal(way, content, data)


def test_an_update_that_is_no_array_of_bytes_is_refused(content: Content) -> None:
    reply = content({"w": TRAINED["w"]})
    with pytest.raises(SiteError, match="array 'w' is float32"):
        Compression("bf16").decode_reply("s1a", reply, specs_of(SENT), SENT)


numbers = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50)


def test_bf16_of_hand_made_numbers_is_the_nearest_and_of_two_the_even_one() -> None:
    """Between 1 and 2 bfloat16 has steps of 1/128."""
    values = floats(1.0, -2.5, 0.0, 1 + 3 / 512, 1 + 1 / 256, 1 + 3 / 256)
    assert from_bf16(to_bf16(values)).tolist() == [1.0, -2.5, 0.0, 1 + 1 / 128, 1.0, 1 + 2 / 128]


@given(numbers)
def test_bf16_of_any_numbers_is_pytorchs(values: list[float]) -> None:
    own = from_bf16(to_bf16(floats(*values)))
    assert own.tolist() == torch.tensor(values).bfloat16().float().tolist()
