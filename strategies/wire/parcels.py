"""Messages between processes of one machine: pickled, with large parts in shared memory.

Only processes that a command forks for itself exchange them. Data from other machines are never
unpickled (``strategies/wire/records.py``).
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

from flwr.app import Message

from fedsilo.core.errors import ProcessError

if TYPE_CHECKING:
    from torch import Tensor

_LARGE = 2**16  # bytes; larger objects go to shared memory

Parcel = tuple[bytes, "Tensor | None"]  # a pickled message, and the large objects that it refers to


class _Pickler(pickle.Pickler):
    """Pickles everything but large bytes objects, which it collects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.large: list[bytes] = []
        self._end = 0

    def persistent_id(self, obj: Any) -> tuple[int, int] | None:
        """Keep a bytes object of 64 KiB or more out of the pickle, and return its place.

        The object is appended to ``large``. Its place is (start, end) in the joined bytes of this
        list. Any other object is pickled as usual, and the result is None.
        """
        if type(obj) is not bytes or len(obj) < _LARGE:
            return None
        self.large.append(obj)
        begin, self._end = self._end, self._end + len(obj)
        return begin, self._end


class _Unpickler(pickle.Unpickler):
    """Reads large bytes objects from shared memory."""

    def __init__(self, data: bytes, shared: Tensor | None) -> None:
        super().__init__(io.BytesIO(data))
        self._shared = memoryview(b"")
        if shared is not None:
            self._shared = shared.numpy().data

    def persistent_load(self, pid: tuple[int, int]) -> bytes:
        """Return a copy of the bytes from start to end (``pid``) in shared memory."""
        return bytes(self._shared[slice(*pid)])


class Packing:
    """Packs messages for another process, which reads their large data from shared memory.

    If several messages in a row have the same large data, the data are copied there only once.
    """

    def __init__(self) -> None:
        self._before: list[bytes] = []
        self._shared: Tensor | None = None

    def pack(self, message: Message) -> Parcel:
        """Pickle a message for another process, with its large parts in shared memory.

        Bytes objects of 64 KiB or more are large. If they are the same objects as in the last
        packed message, the shared memory of that message is used again.

        Returns:
            The pickled message and the tensor in shared memory. The tensor is None if no part is
            large.

        Raises:
            ProcessError: shared memory has no room.
        """
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(message)
        # The same objects as before lie in shared memory already. Equal bytes are not enough to
        # know that: comparing them would cost more than sharing them again
        if list(map(id, pickler.large)) != list(map(id, self._before)):
            # Emptied first, so that a failure leaves no parts that seem to be shared
            self._before, self._shared = [], None
            if pickler.large:
                self._shared = _share(pickler.large)
            self._before = pickler.large
        return file.getvalue(), self._shared


def _share(parts: list[bytes]) -> Tensor:
    """Copy large objects, joined in their order, into one uint8 tensor in shared memory.

    Another process can then read them without a copy through a pipe. At least one object must not
    be empty.

    Raises:
        ProcessError: shared memory has no room.
    """
    import torch
    import torch.multiprocessing  # lets multiprocessing pass on a tensor's memory

    together = bytearray().join(parts)
    try:
        shared: Tensor = torch.frombuffer(together, dtype=torch.uint8)
        shared.share_memory_()  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise ProcessError(
            f"shared memory has no room for {len(together)} bytes of a message: make /dev/shm "
            "larger (docker run --shm-size=2g), or take --engine inline"
        ) from None
    return shared


def unpack(parcel: Parcel) -> Message:
    """Unpickle the message in a parcel. Large parts are copied from shared memory."""
    message: Message = _Unpickler(*parcel).load()
    return message
