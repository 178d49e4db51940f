"""Mutations of a reply's records: of arrays and their bytes, bundles, metrics, names and errors."""

import io
import json
import math
import pickle
import struct
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedsilo.core.messages import ARRAYS, METRICS
from fedsilo.strategies.wire.records import BUNDLE, bundle
from tests.fuzz.mutations import (
    NUMBERS,
    TEXTS,
    hostile_text,
    hostile_value,
    mutate_bytes,
    mutate_tree,
)

Content = RecordDict
_DTYPES = ("<f8", ">f4", "<f2", "<i4", "|u1", "<c16", "|b1", "<U4", "|S3", "<M8[s]", "|O", "|V8")
_SHAPES = (
    *("(2000000000000,)", "(1099511627776, 2)", "(-1,)", "()", "(0,)", "(3, 0)", "(1,)*40"),
    *(
        "(9223372036854775807,)",
        "(True,)",
        "(1.0,)",
        "('a',)",
        f"({'9' * 400},)",
        "(4294967296, 0)",
    ),
)


def copied(content: Content) -> Content:
    """Return a copy whose records can be changed; arrays are never changed themselves."""
    return RecordDict({name: type(record)(dict(record)) for name, record in content.items()})


def mutate_reply(rng: Random, content: Content, done: list[str]) -> Content:
    """Return a reply with one or two things changed, sometimes as a bundle."""
    changed = copied(content)
    for _ in range(rng.choice([1, 1, 1, 2])):
        ways = [*_METRIC_WAYS, *_RECORD_WAYS]
        if changed.array_records.get(ARRAYS):
            ways += [*_ARRAY_WAYS, *_ARRAY_WAYS]
            if any(array.dtype == "uint8" for array in changed.array_records[ARRAYS].values()):
                ways += [_update] * len(ways)
        way = rng.choice(ways)
        done.append(way.__name__.strip("_"))
        try:
            way(rng, changed, done)
        except Exception:  # what was mutated once may be beyond a second time
            done.append("not possible")
    if rng.random() < 0.4:
        try:
            changed = bundle(changed)
        except Exception:
            done.append("cannot be bundled")
        else:
            _mutate_bundle(rng, changed, done)
    return changed


def _mutate_bundle(rng: Random, content: Content, done: list[str]) -> None:
    """Change the bytes or the header of one bundle, half the times that there is one."""
    for name, record in list(content.array_records.items())[:1]:
        if list(record) == [BUNDLE] and rng.random() < 0.5:
            data = record[BUNDLE].numpy().tobytes()
            way = rng.choice([mutate_bytes, _changed_header, _many_empty, _claimed])
            done.append(f"bundle: {way.__name__}")
            content[name] = ArrayRecord(
                {BUNDLE: Array(np.frombuffer(way(rng, data, done), np.uint8))}
            )


def _changed_header(rng: Random, data: bytes, done: list[str]) -> bytes:
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    text = json.dumps(mutate_tree(rng, header, done)).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def _many_empty(rng: Random, data: bytes, done: list[str]) -> bytes:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    text = json.dumps({f"w{n}": entry for n in range(rng.choice([10, 200_000]))}).encode()
    return struct.pack("<Q", len(text)) + text


def _claimed(rng: Random, data: bytes, done: list[str]) -> bytes:
    length = rng.choice([2**40, 2**62, 2**31, 1])
    entry = {"dtype": rng.choice(["F32", "F4", "F8_E4M3", "BF16", "C64", "BOOL"])}
    entry |= {"shape": [length], "data_offsets": [0, rng.choice([4 * length, 4, 0])]}
    text = json.dumps({"w": entry}).encode()
    return struct.pack("<Q", rng.choice([len(text), 2**63, 100_000_001])) + text + bytes(64)


def npy(dtype: str, shape: str, data: bytes, fortran: bool = False, version: int = 1) -> bytes:
    """Return an npy file whose header says whatever it is told to."""
    order = "True" if fortran else "False"
    header = f"{{'descr': '{dtype}', 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    length = struct.pack("<H" if version == 1 else "<I", len(header) + 1)
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + b"\n" + data


@cache
def _bomb() -> bytes:
    """Return a small archive that unpacks to 200 MB."""
    return _archive(np.zeros(200_000_000, np.uint8))


def _archive(array: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, array)
    return file.getvalue()


def _pick(rng: Random, content: Content) -> tuple[ArrayRecord, str, Array]:
    record = content.array_records[ARRAYS]
    name = rng.choice(sorted(record))
    return record, name, record[name]


def _values(rng: Random, content: Content, done: list[str]) -> None:
    record, name, packed = _pick(rng, content)
    array = np.array(packed.numpy())
    if array.size:
        value = rng.choice([*NUMBERS, 1e5, 1e6, 1e11, 3e38, -1e6])
        with np.errstate(over="ignore", invalid="ignore"):
            if rng.random() < 0.3:
                array[...] = value
            else:
                array.reshape(-1)[rng.randrange(array.size)] = value
        done.append(f"{name} = {value}")
    record[name] = Array(array)


def _scaled(rng: Random, content: Content, done: list[str]) -> None:
    record = content.array_records[ARRAYS]
    factor = rng.choice([-1.0, 0.0, 1e3, 1e6, 1e20, 1e38])
    with np.errstate(over="ignore", invalid="ignore"):
        for name in sorted(record):
            record[name] = Array((record[name].numpy() * factor).astype(np.float32))
    done.append(f"times {factor}")


def _bytes_of(rng: Random, content: Content, done: list[str]) -> None:
    record, name, packed = _pick(rng, content)
    changed = mutate_bytes(rng, packed.data, done)
    record[name] = Array(packed.dtype, packed.shape, packed.stype, changed)


def _update(rng: Random, content: Content, done: list[str]) -> None:
    """Change the values of an update in fewer bytes."""
    record = content.array_records[ARRAYS]
    name = rng.choice(sorted(n for n, array in record.items() if array.dtype == "uint8"))
    data = bytearray(record[name].numpy().tobytes())
    scales = (*NUMBERS, 1e5, 3e38, 1e-45, -1e-3)
    for start in rng.sample(range(0, len(data), 4), min(rng.choice([1, 1, 3]), len(data) // 4)):
        start = rng.choice([0, start])
        with np.errstate(over="ignore"):
            scale = np.float32(rng.choice(scales)).tobytes()
        part = rng.choice(
            [
                scale,
                struct.pack("<I", rng.choice([0, 1, len(data), 2**31, 2**32 - 1])),
                bytes([rng.randrange(256)]),
                b"\x80" * 4,
                b"\xff" * 4,
            ]
        )
        data[start : start + len(part)] = part
        done.append(f"{name}[{start}] = {part!r}")
    record[name] = Array(np.frombuffer(bytes(data), np.uint8))


def _header(rng: Random, content: Content, done: list[str]) -> None:
    record, name, packed = _pick(rng, content)
    array = packed.numpy()
    way = rng.choice(["dtype", "shape", "order", "text", "version"])
    dtype, shape, order, version = "<f4", repr(array.shape), False, 1
    if way == "dtype":
        dtype = rng.choice(_DTYPES)
    elif way == "shape":
        shape = rng.choice(_SHAPES)
    elif way == "order":
        order = True
    elif way == "version":
        version = rng.choice([2, 3])
    else:
        shape = rng.choice(["__import__('os').system('id')", "(" * 300, "1e999", "(1,", "x" * 9000])
    done.append(f"{name}: npy header's {way}: {dtype} {shape[:40]}")
    data = npy(dtype, shape, array.tobytes(), order, version)
    record[name] = Array(packed.dtype, packed.shape, packed.stype, data)


def _other_format(rng: Random, content: Content, done: list[str]) -> None:
    record, name, packed = _pick(rng, content)
    array = packed.numpy()
    data = rng.choice(
        [
            lambda: _archive(array),
            _bomb,
            lambda: pickle.dumps(array),
            lambda: pickle.dumps(_Evil()),
            lambda: b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
        ]
    )()
    done.append(f"{name}: another format {data[:4]!r}")
    record[name] = Array(packed.dtype, packed.shape, packed.stype, data)


class _Evil:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('a pickle was opened')",))


def _shape(rng: Random, content: Content, done: list[str]) -> None:
    record, name, packed = _pick(rng, content)
    array = packed.numpy()
    changes: list[Callable[[], Any]] = [
        lambda: array.reshape(-1),
        lambda: array[None],
        lambda: array[..., :0],
        lambda: np.float32(1),
        lambda: np.concatenate([array.reshape(-1)] * 2),
        lambda: np.zeros(0, np.float32),
        lambda: array.astype(
            rng.choice([np.float64, np.int32, np.float16, np.bool_, np.complex64])
        ),
        lambda: np.asfortranarray(array),
        lambda: array.astype(">f4"),
    ]
    if array.ndim:
        changes += [lambda: np.concatenate([array, array]), lambda: array[:0], lambda: array[:1]]
        changes += [lambda: np.zeros((70_000, *array.shape[1:]), np.float32)]
    changed = rng.choice(changes)()
    done.append(f"{name}: {array.shape} -> {changed.dtype} {changed.shape}")
    record[name] = Array(np.asarray(changed))


def _declared(rng: Random, content: Content, done: list[str]) -> None:
    """Change what the record says of an array beside its bytes."""
    record, name, packed = _pick(rng, content)
    dtype = rng.choice([packed.dtype, hostile_text(rng), "float64", "object"])
    shape = rng.choice([list(packed.shape), [2**40], [-1], [], [0] * 100])
    stype = rng.choice([packed.stype, hostile_text(rng), "pickle"])
    done.append(f"{name} declared {dtype[:20]!r} {shape[:3]} {stype[:20]!r}")
    record[name] = Array(dtype, tuple(shape), stype, packed.data)


def _array_names(rng: Random, content: Content, done: list[str]) -> None:
    record, name, packed = _pick(rng, content)
    way = rng.choice(["drop", "rename", "surplus", "many", "swap", "empty"])
    done.append(f"{way} {name}")
    if way in ("drop", "rename"):
        del record[name]
    if way in ("rename", "surplus"):
        record[hostile_text(rng)] = packed
    elif way == "many":
        for number in range(3000):
            record[f"{hostile_text(rng)[:50]}{number}"] = packed
    elif way == "swap":
        other = rng.choice(sorted(record))
        record[name], record[other] = record[other], packed
    elif way == "empty":
        content[ARRAYS] = ArrayRecord()


def _metric_value(rng: Random, content: Content, done: list[str]) -> None:
    record = content.metric_records.get(METRICS)
    if not record:
        return
    key = rng.choice(sorted(record))
    values = [*NUMBERS, 1.5, 1e12, 1e13, [1.0, 2.0], [], [math.nan], 2**62]
    value = rng.choice(values)
    if value is None or isinstance(value, bool):
        return
    record[key] = value
    done.append(f"{key} = {value}")


_MODELS = ("incoming", "trained", "unrepeatable", "outgoing", "")
_SPLITS = ("test", "val", "train", "update", "all", "")
_PIECES = (
    *("reliability", "certainty", "confidence", "uncertainty", "class", "routing", "accuracy"),
    *("count", "right", "mean", "false", "auc", "q05", "0", "1", "9", "10", "00", "-1", "x", ""),
    *("cleveland", "hungary", "s1a", "all", "loss", "trained-loss", "own-accuracy", "auc-from-"),
    *("accuracy-from-cleveland", "-from-x", "norm", "staleness", "1e9", "nan", "a" * 64),
)


def near_name(rng: Random) -> str:
    """Return a metric's name that is in the grammar, or nearly so."""
    pieces = [rng.choice(_PIECES) for _ in range(rng.choice([1, 1, 2, 3, 3, 3, 4]))]
    return ".".join([rng.choice(_MODELS), rng.choice(_SPLITS), *pieces])


def _metric_keys(rng: Random, content: Content, done: list[str]) -> None:
    record = content.metric_records.get(METRICS)
    if not record:
        return
    key, way = rng.choice(sorted(record)), rng.choice(["drop", "add", "split", "many", "model"])
    done.append(f"{way} {key}")
    if way == "drop":
        del record[key]
    elif way == "add":
        record[hostile_text(rng)] = rng.choice(NUMBERS)
    elif way == "split":
        model, split = (
            rng.choice(["incoming", "trained", "x"]),
            rng.choice(["test", "val", "x", ""]),
        )
        metric = rng.choice([*TEXTS, "class.0.count", "-1-1", "accuracy-from-x", "own-accuracy"])
        name = rng.choice([f"{model}.{split}.{metric}", near_name(rng), near_name(rng)])
        record[name] = rng.choice([0.5, 1, -1, 1e9])
    elif way == "model":
        record[f"{hostile_text(rng)}.test.accuracy"] = 0.5
    else:
        for number in range(rng.choice([100, 60_000])):
            record[f"incoming.test.figure{number}"] = 0.5


def _records(rng: Random, content: Content, done: list[str]) -> None:
    way = rng.choice(["drop", "extra", "config", "other kind", "many"])
    names = sorted(content)
    name = rng.choice(names)
    done.append(f"{way} {name}")
    if way == "drop":
        del content[name]
    elif way == "extra":
        content[hostile_text(rng)] = content[name]
    elif way == "config":
        content["config"] = ConfigRecord({hostile_text(rng): hostile_text(rng)})
    elif way == "other kind":
        content[name] = rng.choice([ConfigRecord({"a": 1}), MetricRecord({"a": 1}), ArrayRecord()])
    else:
        for number in range(1000):
            content[f"{name}{number}"] = content[name]


_ARRAY_WAYS = (
    *(_values, _values, _scaled, _bytes_of, _header, _header, _other_format, _shape, _shape),
    *(_declared, _array_names),
)
_METRIC_WAYS = (_metric_value, _metric_value, _metric_value, _metric_keys, _metric_keys)
_RECORD_WAYS = (_records,)


def _has_texts(value: Any) -> bool:
    """Tell whether a value is bytes, or a list of texts or of bytes, and not empty."""
    texts = isinstance(value, list) and all(isinstance(part, str | bytes) for part in value)
    return bool(value) and (texts or isinstance(value, bytes))


def _listed(rng: Random, value: Any) -> Any:
    """Return a list of texts or bytes, or bytes, with one thing in it changed."""
    at = rng.randrange(len(value))
    if isinstance(value, list):
        other = rng.choice([_listed(rng, value[at] or "?"), rng.choice(value)])
        return rng.choice([[*value[:at], other, *value[at + 1 :]], value[:at], value + value])
    if isinstance(value, str):
        return rng.choice([hostile_text(rng), value[:at], value * 2])
    changed = bytes([rng.randrange(256)])
    return rng.choice([value[:at] + changed + value[at + 1 :], value[:at], value * 2, bytes(at)])


def _mutated_json(rng: Random, text: str, done: list[str]) -> str:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):  # what was changed before is no JSON any more
        return hostile_text(rng)
    return json.dumps(mutate_tree(rng, tree, done))


def mutate_config(rng: Random, content: Content, done: list[str]) -> Content:
    """Return a hello or a survey's answer with one or two of its values changed."""
    changed = copied(content)
    name, record = rng.choice(sorted(changed.config_records.items()))
    for _ in range(rng.choice([1, 1, 2])):
        key = rng.choice(sorted(record))
        value = record[key]
        if isinstance(value, str) and value[:1] in ("{", "[") and rng.random() < 0.7:
            made: Any = _mutated_json(rng, value, done)
        elif _has_texts(value) and rng.random() < 0.7:
            made = _listed(rng, value)
        else:
            made = hostile_value(rng)
        way = rng.choice(["value"] * 8 + ["drop", "add"])
        if way == "drop":
            del record[key]
        elif way == "add":
            record[hostile_text(rng)] = hostile_text(rng)
        else:
            try:
                record[key] = made
            except (TypeError, ValueError):
                record[key] = rng.choice([b"bytes", str(made), [1.0, 2.0], True, 2**62, 1e308])
        done.append(f"{way} {name}.{key} {str(record.get(key))[:60]!r}")
    if rng.random() < 0.1:
        _records(rng, changed, done)
    return changed
