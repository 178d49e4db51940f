"""Replies in fewer bytes that no site makes: each refused by its site and round, nothing lost."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsilo.core.errors import SiteError
from fedsilo.core.messages import ARRAYS, EVALUATE
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.wire.compressed import Compression
from fedsilo.strategies.wire.records import NDArray, bundle
from tests.fuzz.reply_mutations import npy

SIZE = 1000
WAYS = {precision: Compression(precision) for precision in ("fp32", "bf16")}
BF16 = WAYS["bf16"]
SENT = {"w": np.zeros(SIZE, np.float32), "b.running_mean": np.ones(3, np.float32)}
STEP = np.where(np.arange(SIZE) % 100 == 7, np.float32(2), SENT["w"])  # at 7, 107, ... 907
INFINITE, LARGE, NOT_A_NUMBER = 0x7F80, 0x49F4, 0x7FC0  # bits of bfloat16; the second is 2e6


def update(way: Compression) -> bytes:
    """Return the honest bytes of ``STEP``."""
    return way.pack_updates({"w": STEP}, SENT)["w"].tobytes()


def beginning(bits: int) -> Array:
    """Return a bf16 update whose first number has these bits."""
    return array(struct.pack("<H", bits) + update(BF16)[2:])


def array(data: bytes) -> Array:
    return Array(np.frombuffer(data, np.uint8))


def claiming(shape: str) -> Array:
    """Return an array whose header claims ``shape`` and whose bytes are of an honest update."""
    return Array("uint8", (2 * SIZE,), "numpy.ndarray", npy("|u1", shape, update(BF16)))


BAD: dict[str, tuple[Compression, dict[str, Any], str]] = {
    "cut short": (BF16, {"w": array(update(BF16)[2:])}, "expected uint8 (2000,)"),
    "four bytes a number": (BF16, {"w": array(update(WAYS["fp32"]))}, "expected uint8 (2000,)"),
    "a number that is nan": (BF16, {"w": beginning(NOT_A_NUMBER)}, "leads to non-finite values"),
    "an infinite number": (BF16, {"w": beginning(INFINITE)}, "leads to non-finite values"),
    "a number of 2e6": (BF16, {"w": beginning(LARGE)}, "'w' has a number beyond 1e+06"),
    "no update": (BF16, {"w": None}, "missing ['w']"),
    "no statistics": (BF16, {"b.running_mean": None}, "missing ['b.running_mean']"),
    "one more": (BF16, {"w.scale": array(bytes(4))}, "surplus ['w.scale']"),
    "a trillion entries": (BF16, {"w": claiming("(1000000000000,)")}, "needs 1000000000"),
    "as many as 64 bits say": (BF16, {"w": claiming("(9223372036854775807,)")}, "no array is"),
    "weights as they are": (BF16, {"w": Array(STEP)}, "float32 (1000,), expected uint8 (2000,)"),
    "statistics as an update": (
        BF16,
        {"b.running_mean": array(bytes(6))},
        "'b.running_mean' is uint8 (6,), expected float32 (3,)",
    ),
}


@pytest.fixture
def reply(content: Any, measured: dict[str, float]) -> Callable[..., RecordDict]:
    """Return a builder of an honest reply with some of its arrays replaced, or None for none."""

    def build(way: Compression, changed: dict[str, Any]) -> RecordDict:
        usual = {"w": array(update(way)), "b.running_mean": Array(SENT["b.running_mean"])}
        arrays = {name: one for name, one in (usual | changed).items() if one is not None}
        made: RecordDict = content(**measured)
        made[ARRAYS] = ArrayRecord(arrays)
        return made

    return build


Meet = Callable[[Compression, RecordDict, int], NDArray]


@pytest.fixture
def meet(
    started: Any, fake_app: Any, content: Any, recorder: Any, measured: Any, reply: Any
) -> Meet:
    """Return a function that runs a round in which s2a gives a reply; the model's 'w' after it."""

    def run(way: Compression, odd: RecordDict, min_sites: int) -> NDArray:
        def giving(trained: RecordDict) -> Callable[[Message], RecordDict]:
            ended = content(**measured)
            return lambda m: ended if m.metadata.message_type == EVALUATE else trained

        recorder.failures.clear()
        app = fake_app(giving(reply(way, {})), s2a=giving(odd))
        # Weights of both ways travel down as bf16, so that fp32 comes back as updates too
        wire = {"wire_precision": way.precision, "wire_down": "bf16"}
        common = {"rounds": 1, "min_sites": min_sites, "max_update_norm": 0.0, **wire}
        _, loop = started(app, state=State(dict(SENT)), **common)
        after: NDArray = loop.state.arrays["w"]
        return after

    return run


def refused(said: str) -> None:
    """Check that an error is one line which can be printed, and begins with site and round."""
    assert said.startswith("site s2a, round 1, phase train: ")
    assert said.isprintable()
    assert len(said) < 700


CLAIMS = {"a trillion entries", "as many as 64 bits say"}  # which no bundle is made of


@pytest.mark.parametrize(
    ("name", "bundled"), [(n, False) for n in BAD] + [(n, True) for n in BAD if n not in CLAIMS]
)
def test_a_bad_update_is_refused_by_site_and_round_and_the_others_are_averaged(
    name: str, bundled: bool, meet: Meet, reply: Any
) -> None:
    way, changed, said = BAD[name]
    odd = bundle(reply(way, changed)) if bundled else reply(way, changed)
    with pytest.raises(SiteError) as caught:
        meet(way, odd, 0)
    refused(str(caught.value))
    assert said in str(caught.value)
    assert meet(way, odd, 2).tolist() == meet(way, reply(way, {}), 3).tolist()


def test_a_run_goes_on_without_the_site_of_a_bad_update_and_says_so(
    meet: Meet, reply: Any, recorder: Any
) -> None:
    after = meet(BF16, reply(BF16, {"w": beginning(NOT_A_NUMBER)}), 2)
    np.testing.assert_allclose(after, STEP, rtol=1e-6)
    ((round_, phase, site, reason),) = recorder.failures
    assert (round_, phase, site) == (1, "train", "s2a")
    assert reason.startswith("the update of 'w' cannot be opened: ")


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Compression, bytes]:
    """Return some bytes in place of an honest update: altered, cut, longer, or of any kind."""
    way = draw(st.sampled_from(list(WAYS.values())))
    data = bytearray(update(way))
    kind = draw(st.sampled_from(["bytes", "random", "cut", "longer", "words"]))
    if kind == "random":
        data = bytearray(draw(st.binary(min_size=len(data), max_size=len(data))))
    elif kind == "cut":
        data = data[: draw(st.integers(0, len(data) - 1))]
    elif kind == "longer":
        data += draw(st.binary(min_size=1, max_size=5000))
    for _ in range(draw(st.integers(1, 4)) if kind in ("bytes", "words") else 0):
        value = draw(st.integers(0, 255 if kind == "bytes" else 2**32 - 1))
        part = value.to_bytes(1 if kind == "bytes" else 4, "little")
        start = draw(st.integers(0, len(data) - len(part)))
        data[start : start + len(part)] = part
    return way, bytes(data)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=damaged())
def test_whatever_bytes_an_update_has_it_is_refused_or_moves_the_model_by_plausible_numbers(
    made: tuple[Compression, bytes], meet: Meet, reply: Any, recorder: Any
) -> None:
    way, data = made
    after = meet(way, reply(way, {"w": array(data)}), 2)
    assert after.shape == (SIZE,)
    assert np.isfinite(after).all()
    if recorder.failures:
        assert after.tolist() == meet(way, reply(way, {}), 3).tolist()
        with pytest.raises(SiteError) as caught:
            meet(way, reply(way, {"w": array(data)}), 0)
        refused(str(caught.value))
    else:
        assert len(data) == len(update(way))
        assert np.abs(after).max() <= (1e6 + 2 + 2) / 3
