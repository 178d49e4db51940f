import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict

from fedsilo.models.contract.errors import SiteError
from fedsilo.strategies.wire.compressed import Compression
from fedsilo.strategies.wire.records import (
    ArrayError,
    NDArray,
    Packed,
    bundle,
    from_record,
    to_record,
)
from fedsilo.strategies.wire.reply import shapes

Content = Callable[..., RecordDict]
WAYS = [
    Compression(precision, share)
    for precision in ("fp32", "bf16", "int8")
    for share in (1.0, 0.5, 0.25, 0.01)
]
SENT = {"w": np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)}
TRAINED = {"w": np.array([[1.5, 2.0, 2.0], [4.0, 5.25, 6.0]], np.float32)}  # +0.5, -1, +0.25


def half(count: int) -> Any:
    return np.full(count, 0.5, np.float32)


def floats(*values: float) -> NDArray:
    return np.array(values, np.float32)


def travelled(
    way: Compression, content: Content, leaving: dict[str, NDArray], sent: dict[str, NDArray]
) -> dict[str, NDArray]:
    packed, _ = way.packed(leaving, sent, {}, half)
    return dict(way.reply("s1a", content(packed), shapes(leaving), sent).arrays)


def refusal(
    way: Compression, content: Content, data: bytes, sent: dict[str, NDArray] = SENT
) -> str:
    reply = content({"w": np.frombuffer(data, np.uint8)})
    with pytest.raises(SiteError) as caught:
        way.reply("s1a", reply, shapes(sent), sent)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_top_half_in_fp32_of_hand_made_update_is_a_byte_of_places_and_three_numbers() -> None:
    packed, left = Compression("fp32", 0.5).packed(TRAINED, SENT, {}, half)
    # Entries 0, 2 and 4 of six, from the highest bit
    assert packed["w"].tobytes() == bytes([0b10101000]) + struct.pack("<3f", 0.5, -1.0, 0.25)
    assert left["w"].tolist() == [[0, 0, 0], [0, 0, 0]]


def test_top_sixth_in_int8_of_hand_made_update_keeps_the_rest(content: Content) -> None:
    way = Compression("int8", 1 / 6)
    packed, left = way.packed(TRAINED, SENT, {}, half)
    assert packed["w"].tobytes() == struct.pack("<f", np.float32(1 / 127)) + bytes(
        [0b00100000, 129]
    )
    np.testing.assert_allclose(left["w"], [[0.5, 0, 0], [0, 0.25, 0]], atol=1e-7)
    reply = way.reply("s1a", content(packed), shapes(SENT), SENT)
    np.testing.assert_allclose(reply.arrays["w"], [[1, 2, 2], [4, 5, 6]], rtol=1e-6)


def test_few_of_many_entries_are_named_by_indexes(content: Content) -> None:
    sent, leaving = {"w": np.zeros(1000, np.float32)}, {"w": np.zeros(1000, np.float32)}
    leaving["w"][[700, 3]] = 2.0, -1.0
    way = Compression("bf16", 0.002)
    packed, _ = way.packed(leaving, sent, {}, half)
    assert packed["w"].tobytes() == struct.pack("<2I2H", 3, 700, 0xBF80, 0x4000)
    assert (travelled(way, content, leaving, sent)["w"] == leaving["w"]).all()


def test_memory_of_hand_made_update_is_added_the_next_time() -> None:
    way = Compression("fp32", 1 / 6)
    _, left = way.packed(TRAINED, SENT, {}, half)
    assert left["w"].tolist() == [[0.5, 0, 0], [0, 0.25, 0]]
    packed, again = way.packed(SENT, SENT, left, half)  # nothing was trained
    assert packed["w"].tobytes() == bytes([0b10000000]) + struct.pack("<f", 0.5)
    assert again["w"].tolist() == [[0, 0, 0], [0, 0.25, 0]]


def test_without_feedback_nothing_is_kept() -> None:
    assert Compression("int8", 0.5, feedback=False).packed(TRAINED, SENT, {}, half)[1] == {}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_travelled_and_what_was_left_are_the_update(
    way: Compression, content: Content
) -> None:
    rng = np.random.default_rng(5)
    sent = {"w": rng.normal(size=(7, 9)).astype(np.float32), "b": floats(0.5)}
    leaving = {n: (a + rng.normal(size=a.shape)).astype(np.float32) for n, a in sent.items()}
    packed, left = way.packed(leaving, sent, {}, half)
    reply = way.reply("s1a", content(packed), shapes(leaving), sent)
    for name, array in leaving.items():
        both = reply.arrays[name] + left.get(name, np.float32(0))
        np.testing.assert_allclose(both, array, atol=1e-6)
        assert reply.arrays[name].shape == array.shape
        assert reply.arrays[name].dtype == np.float32


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_bundle_of_updates_is_opened_and_counted_as_if_apart(
    way: Compression, content: Content
) -> None:
    sent = {name: np.zeros(40, np.float32) for name in ("a", "b")}
    leaving = {name: np.arange(40, dtype=np.float32) for name in sent}
    packed, _ = way.packed(leaving, sent, {}, half)
    apart = way.reply("s1a", content(packed), shapes(sent), sent)
    bundled = way.reply("s1a", bundle(content(packed)), shapes(sent), sent)
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
    packed, left = Compression("int8", 0.1).packed(exact, sent, {}, half)
    assert left == {}
    for name, array in exact.items():
        assert packed[name] is array


def test_a_reply_counts_the_bytes_that_travelled(content: Content) -> None:
    sent = {"w": np.zeros(10_000, np.float32)}
    leaving = {"w": np.arange(10_000, dtype=np.float32)}
    sizes = {}
    for precision, share in (("fp32", 1.0), ("bf16", 1.0), ("int8", 1.0), ("int8", 0.1)):
        packed, _ = Compression(precision, share).packed(leaving, sent, {}, half)
        reply = Compression(precision, share).reply("s1a", content(packed), shapes(sent), sent)
        sizes[precision, share] = reply.bytes_up
    plain = sizes["fp32", 1.0] - 40_000
    assert sizes["bf16", 1.0] == plain + 20_000
    assert sizes["int8", 1.0] == plain + 4 + 10_000
    assert sizes["int8", 0.1] == plain + 4 + 1250 + 1000


def test_bf16_down_is_half_the_bytes_and_costs_the_server_nothing(content: Content) -> None:
    """1 + 3/512 is 1 + 1/128 at the site; its training moves the server's own weight."""
    way, packed_before = Compression(down="bf16"), Packed()
    model = {"w": floats(1 + 3 / 512, 2.0), "norm.running_var": floats(1 + 3 / 512)}
    way.pack(model, packed_before)
    sent = from_record(to_record(model, packed_before))
    assert sent["w"].dtype == np.uint16
    arrived = way.received(sent)
    assert arrived["w"].tolist() == [1 + 1 / 128, 2.0]
    assert arrived["norm.running_var"].tolist() == [1 + 3 / 512]
    trained = {"w": arrived["w"] + floats(0.25, -0.5), "norm.running_var": floats(7.0)}
    packed, left = way.packed(trained, arrived, {}, half)
    assert left == {}
    reply = way.reply("s1a", content(packed), shapes(model), model)
    assert reply.arrays["w"].tolist() == [1 + 3 / 512 + 0.25, 1.5]
    assert reply.arrays["norm.running_var"].tolist() == [7.0]


@pytest.mark.parametrize("precision", ["bf16", "int8", "fp32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_update_that_is_not_finite_is_refused_by_name(precision: str, value: float) -> None:
    leaving = {"w": np.where(SENT["w"] == 3, np.float32(value), SENT["w"])}
    with pytest.raises(ArrayError, match=f"'w' contains non-finite .* as {precision}"):
        Compression(precision, 0.5).packed(leaving, SENT, {}, half)


SCALE = struct.pack("<f", 0.01)


@pytest.mark.parametrize(
    ("way", "data", "why"),
    [
        (Compression("int8"), SCALE + bytes(5), "expected uint8"),
        (Compression("int8"), SCALE + bytes(7), "expected uint8"),
        (Compression("int8"), b"", "expected uint8"),
        (Compression("int8"), struct.pack("<f", np.nan) + bytes(6), "its scale is nan"),
        (Compression("int8"), struct.pack("<f", np.inf) + bytes(6), "its scale is inf"),
        (Compression("int8"), struct.pack("<f", -0.5) + bytes(6), "its scale is -0.5"),
        (Compression("int8"), struct.pack("<f", 3e38) + bytes([127] * 6), "leads to non-finite"),
        (Compression("int8"), SCALE + bytes([128, *[0] * 5]), "a value is below -127"),
        (Compression("int8", 0.5), SCALE + bytes([0b11000000] + [0] * 3), "2 entries, not 3"),
        (Compression("int8", 0.5), SCALE + bytes([0b11111111] + [0] * 3), "8 entries, not 3"),
        (Compression("int8", 0.5), SCALE + bytes([0b11000001] + [0] * 3), "entry 7 of 6"),
        (Compression("bf16"), struct.pack("<6H", 0x7F80, *[0] * 5), "non-finite"),
        (Compression("bf16"), struct.pack("<6H", 0x7FC0, *[0] * 5), "non-finite"),
        (Compression("fp32"), struct.pack("<6f", np.nan, *[0] * 5), "non-finite"),
    ],
)
def test_altered_update_is_refused(
    way: Compression, data: bytes, why: str, content: Content
) -> None:
    assert why in refusal(way, content, data)


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (7, 1000, "entry 1000 of 1000"),
        (7, 2**32 - 1, "entry 4294967295 of 1000"),
        (7, 7, "there twice"),
        (8, 7, "not in order"),
    ],
)
def test_altered_indexes_are_refused(first: int, second: int, why: str, content: Content) -> None:
    sent, way = {"w": np.zeros(1000, np.float32)}, Compression("fp32", 0.002)
    assert why in refusal(way, content, struct.pack("<2I2f", first, second, 1, 1), sent)


def test_an_update_that_is_no_array_of_bytes_is_refused(content: Content) -> None:
    reply = content({"w": TRAINED["w"]})
    with pytest.raises(SiteError, match="array 'w' is float32"):
        Compression("int8").reply("s1a", reply, shapes(SENT), SENT)
