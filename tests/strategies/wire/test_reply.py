import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, RecordDict

from fedsilo.core.errors import RunDirectoryError, SiteError
from fedsilo.strategies.wire.records import bundle
from fedsilo.strategies.wire.reply import ArraySpec, Specs, Spill, decode
from tests.support.errors import refuses

Content = Callable[..., RecordDict]
SPEC = {"w": ArraySpec((2, 3))}
GOOD = np.zeros((2, 3), np.float32)
NAN = float("nan")


def refusal(reply: RecordDict, expected: Specs) -> str | None:
    """Return why a reply is refused, None if it is not."""
    try:
        decode("s1a", reply, expected)
    except SiteError as error:
        return str(error)
    return None


def test_a_reply_that_keeps_the_contract_is_not_refused(content: Content) -> None:
    assert refusal(content({"w": GOOD}, **{"incoming.val.loss": 0.3}), SPEC) is None


def test_a_reply_of_metrics_alone_is_fine_where_no_array_is_expected(content: Content) -> None:
    assert refusal(content(), {}) is None


def test_a_reply_of_many_records_is_refused(content: Content) -> None:
    reply = content({"w": GOOD})
    for number in range(20):
        reply[f"arrays{number}"] = reply["arrays"]
    told = "21 records of arrays, more than 16: was it altered?"
    assert refusal(reply, SPEC) == told


def test_a_reply_without_metrics_is_refused(content: Content) -> None:
    reply = content({"w": GOOD})
    del reply["metrics"]
    assert refusal(reply, SPEC) == "the reply has no metrics"


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"loss": NAN}, "metric 'loss' is nan"),
        ({"loss": float("inf")}, "metric 'loss' is inf"),
        ({"loss": [0.1, 0.2]}, "metric 'loss'"),
        ({"num_examples": NAN}, "metric 'num-examples' is nan"),
    ],
)
def test_bad_metrics_are_refused_by_name(
    content: Content, metrics: dict[str, Any], said: str
) -> None:
    assert said in str(refusal(content({"w": GOOD}, **metrics), SPEC))


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (None, "missing ['w'], surplus []"),
        ({}, "missing ['w'], surplus []"),
        ({"v": GOOD}, "missing ['w'], surplus ['v']"),
        ({"w": GOOD, "v": GOOD}, "missing [], surplus ['v']"),
        ({"w": GOOD.T}, "array 'w' is float32 (3, 2), expected float32 (2, 3)"),
        ({"w": GOOD[None]}, "array 'w' is float32 (1, 2, 3)"),
        ({"w": np.float32(0)}, "array 'w' is float32 ()"),
        ({"w": GOOD.astype(np.float64)}, "array 'w' is float64 (2, 3), expected float32"),
        ({"w": GOOD.astype(np.int32)}, "array 'w' is int32"),
        ({"w": GOOD * np.float32(NAN)}, "array 'w' contains non-finite values"),
        ({"w": GOOD + np.float32(np.inf)}, "array 'w' contains non-finite values"),
    ],
)
def test_bad_arrays_are_refused_by_name(
    content: Content, arrays: dict[str, Any] | None, said: str
) -> None:
    assert said in str(refusal(content(arrays), SPEC))


@pytest.mark.parametrize("value", [NAN, float("inf"), 10**400, [0.5]])
def test_decode_refuses_a_metric_that_is_no_finite_number(content: Content, value: Any) -> None:
    reply = content(seconds=value) if not isinstance(value, int) else content()
    if isinstance(value, int):  # Flower's own record takes none so large
        with pytest.raises(SiteError, match="finite number"):
            decode("s1a", _Metrics({**dict(reply["metrics"]), "seconds": value}), {})
    else:
        assert "finite number" in str(refusal(reply, {}))


class _Metrics(RecordDict):
    """A reply whose metrics are those that it is given."""

    def __init__(self, metrics: dict[str, Any]) -> None:
        super().__init__({})
        self._given = metrics

    @property
    def metric_records(self) -> Any:
        return {"metrics": self._given}


@pytest.mark.parametrize(
    "key", ["", "a b", "x\n", "[red]", "k" * 65, "-a", "incoming.-a", "incoming.test.-a", "a.b"]
)
def test_decode_refuses_a_metric_whose_name_is_not_plain(key: str) -> None:
    with pytest.raises(SiteError, match=r"^a metric is called "):
        decode("s1a", _Metrics({key: 0.5}), {})


def test_decode_refuses_more_metrics_than_any_method_asks_for() -> None:
    with refuses(SiteError, 50001, 50000):
        decode("s1a", _Metrics({f"m{n}": 0.5 for n in range(50_001)}), {})


def test_decode_gives_arrays_metrics_and_bytes(content: Content) -> None:
    reply = decode("s1a", content({"w": GOOD}, loss=0.25), SPEC)
    assert reply.site == "s1a"
    np.testing.assert_array_equal(reply.arrays["w"], GOOD)
    assert reply.metrics == {
        "num-examples": 36.0,
        "seconds": 0.5,
        "peak-memory-bytes": 1000.0,
        "loss": 0.25,
    }
    assert reply.bytes_up > GOOD.nbytes


def test_decode_opens_a_bundle_and_refuses_one_that_is_too_large(content: Content) -> None:
    arrays = {"v": np.float32([1]), "w": np.float32([[1, 2, 3], [4, 5, 6]])}
    spec = {"v": ArraySpec((1,)), "w": ArraySpec((2, 3))}
    found = decode("s1a", bundle(content(arrays)), spec).arrays
    assert list(found) == ["v", "w"]
    np.testing.assert_array_equal(found["w"], arrays["w"])
    large = {"v": np.zeros(2**21, np.float32), "w": arrays["w"]}
    assert "are expected" in str(refusal(bundle(content(large)), spec))


def test_a_bundled_reply_counts_the_bytes_of_the_same_reply_in_a_simulation(
    content: Content,
) -> None:
    spec = {"w": ArraySpec((2, 3)), "bias": ArraySpec((3,)), "scale": ArraySpec(())}
    reply = content({n: np.zeros(of.shape, np.float32) for n, of in spec.items()})
    apart, bundled = (decode("s1a", sent, spec) for sent in (reply, bundle(reply)))
    assert bundled.bytes_up == apart.bytes_up > 0


def test_two_arrays_of_one_name_in_a_bundle_are_refused_in_one_line(content: Content) -> None:
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    header = ('{"w":' + entry % (0, 4) + ',"w":' + entry % (4, 8) + "}").encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    reply = content({"safetensors": np.frombuffer(data, np.uint8)})
    reason = refusal(reply, {"w": ArraySpec((1,))})
    assert str(reason).startswith("record 'arrays' cannot be opened")
    assert "\n" not in str(reason)


@pytest.mark.parametrize(("value", "keeps"), [(1, True), (0, False), (None, False)])
def test_reply_says_whether_its_site_keeps_state(
    content: Content, value: int | None, keeps: bool
) -> None:
    reply = content()
    if value is not None:
        reply["metrics"]["kept-state"] = value
    assert decode("s1a", reply, {}).keeps_state is keeps


def packed(array: Any, **changes: Any) -> Array:
    """Return an array on the wire whose record says something else of it than its payload."""
    good = Array(array)
    told = {"dtype": good.dtype, "shape": good.shape, "stype": good.stype, "data": good.data}
    return Array(**{**told, **changes})


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (packed(GOOD, data=b"no array at all"), "array 'w' cannot be unpacked: "),
        (packed(GOOD, data=b""), "array 'w' cannot be unpacked: "),
        (packed(GOOD, data=Array(GOOD).data[:-5]), "array 'w' cannot be unpacked: "),
        (packed(GOOD, stype="pickle"), "array 'w' cannot be unpacked: "),
        (
            packed(GOOD.astype(np.float64), dtype="float32"),
            "array 'w' is float64 (2, 3), expected float32 (2, 3)",
        ),
        (
            packed(np.zeros((4, 3), np.float32), shape=(2, 3)),
            "array 'w' is float32 (4, 3), expected float32 (2, 3)",
        ),
    ],
)
def test_what_counts_is_the_payload_not_what_its_record_says(
    content: Content, array: Array, said: str
) -> None:
    reply = content({"w": GOOD})
    reply["arrays"]["w"] = array
    assert said in str(refusal(reply, SPEC))


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_none_in_a_spec_stands_for_any_length_and_only_there(content: Content, rows: int) -> None:
    spec = {"w": ArraySpec((None, 3))}
    assert refusal(content({"w": np.zeros((rows, 3), np.float32)}), spec) is None
    told = refusal(content({"w": np.zeros((rows, 4), np.float32)}), spec)
    assert "expected float32 ('any', 3)" in str(told)


@pytest.mark.parametrize("payload", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00\x10\x00{(((\n"])
def test_bytes_that_are_no_array_are_a_refusal_and_not_a_crash(
    payload: bytes, content: Content
) -> None:
    reply = content({"w": GOOD})
    bad = Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=payload)
    reply.array_records["arrays"]["w"] = bad
    reason = refusal(reply, SPEC)
    assert reason is not None
    assert reason.startswith("array 'w' cannot be unpacked")
    assert "\n" not in reason


@pytest.mark.parametrize("in_memory", [0, 2**20])
def test_kept_arrays_are_read_as_they_were(in_memory: int, tmp_path: Path) -> None:
    spill = Spill(str(tmp_path), in_memory)
    arrays = {f"a{n}": np.arange(n, dtype=np.float32).reshape(n, 1) for n in (0, 1, 3000)}
    arrays |= {"scalar": np.float64(2.5) * np.ones(()), "words": np.uint32([[1, 2], [3, 4]])}
    arrays["fortran"] = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    sites = [spill.keep(arrays | {"site": np.float32([site])}) for site in range(3)]
    for site, kept in enumerate(sites):
        assert list(kept) == [*arrays, "site"]
        assert kept["site"] == site
        for name, array in arrays.items():
            assert (kept[name].dtype, kept[name].shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(kept[name], array)
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    spill.close()


def test_what_fits_stays_in_memory_and_the_rest_does_not() -> None:
    spill = Spill(in_memory=5000)
    arrays = {"a": np.zeros(1000, np.float32)}
    first, second = spill.keep(arrays), spill.keep(arrays)
    spill.close()
    assert first["a"].size == 1000
    with pytest.raises(ValueError, match="closed"):
        second["a"]


def test_a_full_disk_is_reported_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(RunDirectoryError) as told:
        Spill(str(tmp_path), 0).keep({"a": np.ones(1)})
    assert str(told.value) == (
        f"the replies of a round cannot be kept in {tmp_path} (No space left on device): make "
        "room there and resume"
    )
