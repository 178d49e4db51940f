"""What a pickle of CIFAR's python batches holds, read without a pickle machine: no code is run.

Python's own unpickler calls what a file names. Here the file's opcodes are walked and those that
build dictionaries, lists, texts and numbers are done; of calls only the making of a numpy array of
bytes is understood, and noted down instead of made. All else is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.models.contract.errors import DataError

_MOST_BYTES = 2**30  # 6 times CIFAR-100's training file
_MAKERS = {
    "numpy.core.multiarray _reconstruct",
    "numpy._core.multiarray _reconstruct",
    "numpy ndarray",
    "numpy dtype",
    "_codecs encode",
}
_SKIPPED = ("PROTO", "FRAME", "STOP")
_VALUES = (
    *("BININT", "BININT1", "BININT2", "LONG1", "INT", "LONG"),
    *("BINUNICODE", "SHORT_BINUNICODE", "UNICODE", "BINBYTES", "SHORT_BINBYTES"),
)
_TEXTS = ("STRING", "BINSTRING", "SHORT_BINSTRING")  # Python 2's, which hold bytes
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_PUT = ("PUT", "BINPUT", "LONG_BINPUT")
_GET = ("GET", "BINGET", "LONG_BINGET")


class _RefusedError(Exception):
    """What the pickle holds is nothing that a batch holds; the text says what."""


@dataclass
class _Made:
    """What the pickle calls: the maker's name and arguments, and the state given to the result."""

    maker: str
    arguments: Any = ()
    state: Any = None


class _Mark:
    """Where a run of items begins on the stack."""


def read_batch(path: Path) -> dict[bytes, Any]:
    """Return a python batch: its lists of labels and names, and its images as uint8 array.

    Keys and texts are bytes, as Python 2 wrote them.

    Raises:
        DataError: the file cannot be read, is cut short, no such pickle, or wants to run code.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"{path} is larger than any batch of CIFAR: download it again")
        content = _walk(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except _RefusedError as error:
        raise DataError(
            f"{path} {error}, which no batch of CIFAR does; nothing of it was run: download it "
            "again from its public source"
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            f"{path} is cut short or no python batch of CIFAR ({type(error).__name__}): download "
            "it again"
        ) from None
    return content


def _walk(content: bytes) -> dict[bytes, Any]:
    """Do a pickle's opcodes one after the other; a ``LookupError`` where the stack is empty."""
    machine = _Machine()
    for opcode, argument, _ in pickletools.genops(content):
        machine.do(opcode.name, argument)
    held = machine.stack.pop()
    if not isinstance(held, dict) or machine.stack:
        raise ValueError("no dictionary")
    return {_as_bytes(key): _as_array(value) for key, value in held.items()}


def _as_bytes(text: Any) -> bytes:
    """Return a key of Python 2 or 3 as bytes."""
    return text if isinstance(text, bytes) else str(text).encode()


def _as_array(value: Any) -> Any:
    """Return the array that ``value`` notes down; anything else as it is."""
    return _array(value) if isinstance(value, _Made) else value


def _array(noted: _Made) -> npt.NDArray[np.uint8]:
    """Return an array of bytes; a ``ValueError`` or ``TypeError`` if it is none in C order."""
    if not noted.maker.endswith("_reconstruct"):
        raise _RefusedError(f"holds an object of '{noted.maker}'")
    _, shape, dtype, fortran, pixels = noted.state
    if not isinstance(dtype, _Made) or dtype.arguments[0] not in ("u1", b"u1", "|u1", b"|u1"):
        raise _RefusedError("holds an array of other than bytes")
    if fortran:
        raise _RefusedError("holds an array whose columns come first")
    if not isinstance(pixels, bytes):
        raise TypeError("no bytes")
    return np.frombuffer(pixels, np.uint8).reshape(shape)


def _encoded(text: Any, encoding: Any = "") -> bytes:
    """Return bytes that Python 3 wrote by protocol 2: as a text and its encoding."""
    if encoding != "latin1" or not isinstance(text, str):
        raise ValueError("another encoding than latin1")
    return text.encode("latin-1")


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        """Do an opcode."""
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _TEXTS:
            self.stack.append(argument.encode("latin-1"))
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name == "MARK":
            self.stack.append(_Mark)
        elif name in _PUT:
            self.memo[argument] = self.stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name in _GET:
            self.stack.append(self.memo[argument])
        elif name not in _SKIPPED:
            self._combine(name, argument)

    def _combine(self, name: str, argument: Any) -> None:
        """Do an opcode that makes one thing of several."""
        done: dict[str, Callable[[], None]] = {
            "APPEND": lambda: self._append([self.stack.pop()]),
            "APPENDS": lambda: self._append(self._marked()),
            "LIST": lambda: self.stack.append(self._marked()),
            "SETITEM": lambda: self._update([*self._popped(2)]),
            "SETITEMS": lambda: self._update(self._marked()),
            "DICT": lambda: self.stack.append(_pairs(self._marked())),
            "TUPLE": lambda: self.stack.append(tuple(self._marked())),
            "TUPLE1": lambda: self.stack.append(self._popped(1)),
            "TUPLE2": lambda: self.stack.append(self._popped(2)),
            "TUPLE3": lambda: self.stack.append(self._popped(3)),
            "GLOBAL": lambda: self._name(argument),
            "STACK_GLOBAL": lambda: self._name(" ".join(self._popped(2))),
            "REDUCE": self._note_call,
            "BUILD": self._note_state,
        }
        if name not in done:
            raise _RefusedError(f"holds the pickle opcode {name}")
        done[name]()

    def _popped(self, count: int) -> tuple[Any, ...]:
        """Take so many items off the stack."""
        if len(self.stack) < count:
            raise LookupError("the stack is empty")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        return items

    def _marked(self) -> list[Any]:
        """Take the items since the last mark, and the mark."""
        place = len(self.stack) - 1 - self.stack[::-1].index(_Mark)
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def _append(self, items: list[Any]) -> None:
        held = self.stack[-1]
        if not isinstance(held, list):
            raise TypeError("items of no list")
        held.extend(items)

    def _update(self, items: list[Any]) -> None:
        held = self.stack[-1]
        if not isinstance(held, dict):
            raise TypeError("items of no dictionary")
        held.update(_pairs(items))

    def _name(self, named: str) -> None:
        """Note down a name that a batch may use; nothing is imported."""
        if named not in _MAKERS:
            raise _RefusedError(f"wants to run {named.replace(' ', '.')[:80]!r}")
        self.stack.append(_Made(named))

    def _note_call(self) -> None:
        made, arguments = self._popped(2)
        if not isinstance(made, _Made) or not isinstance(arguments, tuple):
            raise TypeError("a call of no name")
        encoded = made.maker == "_codecs encode"
        self.stack.append(_encoded(*arguments) if encoded else _Made(made.maker, arguments))

    def _note_state(self) -> None:
        made, state = self._popped(2)
        if not isinstance(made, _Made):
            raise TypeError("a state of no object")
        made.state = state
        self.stack.append(made)


def _pairs(items: list[Any]) -> dict[Any, Any]:
    """Return keys and values that follow one another as a dictionary."""
    if len(items) % 2 or not all(isinstance(key, str | bytes) for key in items[::2]):
        raise ValueError("keys that are no texts")
    return dict(zip(items[::2], items[1::2], strict=True))
