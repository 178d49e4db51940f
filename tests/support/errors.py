"""Errors as programs recognise them: the class with its code, and the facts in the message."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedsilo.core.errors import FedsiloError


def names(message: str, fact: object) -> bool:
    """Say whether a message has ``fact`` as a word of its own, not as a part of another one."""
    word = re.escape(str(fact))
    return re.search(rf"(?<![\w-]){word}(?![\w-]|\.\w)", message) is not None


Caught = pytest.ExceptionInfo[FedsiloError]


@contextmanager
def refuses(kind: type[FedsiloError], *facts: object) -> Iterator[Caught]:
    """Expect an error with the code of ``kind`` whose message names each of ``facts``.

    Facts are keys, values, files, sites and rounds. The sentence around them may be reworded.
    """
    with pytest.raises(kind) as caught:
        yield caught
    message = str(caught.value)
    assert caught.value.code == kind.code, message
    unnamed = [fact for fact in facts if not names(message, fact)]
    assert not unnamed, f"the error does not name {unnamed}: {message}"
