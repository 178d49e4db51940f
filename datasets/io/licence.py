"""On what terms a public data set may be used: what is said before it is brought or named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fedsilo.datasets.io.locations import PublicFiles
from fedsilo.models.contract.errors import DataError

Origin = Literal["public", "own", "made-up"]
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


@dataclass(frozen=True)
class Licence:
    """The licence of a public data set.

    Attributes:
        licence: its name, as the source states it or as it is known.
        source: where that is stated, or where the files come from.
        size: bytes to bring, about; 0: the source does not say.
        terms: what a user must agree to before it is brought, beside giving credit; empty: nothing.
    """

    licence: str
    source: str
    size: int = 0
    terms: str = ""

    def size_text(self) -> str:
        """Return the size as people say it."""
        for unit, name in _UNITS:
            if self.size >= unit:
                return f"{self.size / unit:.3g} {name}"
        return f"{self.size} bytes" if self.size else "not stated"

    def lines(self) -> Iterator[str]:
        """Yield what is said of it, a line each."""
        yield f"licence: {self.licence}"
        yield f"source: {self.source}"
        yield f"size: {self.size_text()}"
        yield f"terms: {self.terms or 'none beyond the licence'}"


def licence_of(files: PublicFiles) -> Licence:
    """Return the licence of public files, of the size of all together."""
    sizes = [file.size for file in files.files]
    return Licence(files.licence, files.url, sum(sizes) if all(sizes) else 0, files.terms)


def refuse_unaccepted(name: str, licence: Licence, accepted: bool) -> None:
    """Refuse to bring a data set whose terms nobody has agreed to.

    Raises:
        DataError: names the terms, and the option.
    """
    if licence.terms and not accepted:
        raise DataError(
            f"data set '{name}' has terms ({licence.terms}; {licence.source}): nothing was "
            "brought; repeat with --accept-licence if you agree"
        )
