"""The errors that fedsilo raises on purpose: one line each, what was wrong, where, what to do.

Each kind has a ``code``, by which a program knows it. Of a site's errors the server sees a number
beside the text: ``ERROR_CODES``, where the code has one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from fedsilo.models.contract.one_line import shortened

ERROR_CODES = {"epsilon-spent": 1001, "refused": 1002}  # far from Flower's own, which begin at 0


_LONGEST = 1500  # characters of a message
_END = 400  # of them are never cut off: the end says what to do


class FedsiloError(Exception):
    """Base of every error whose message is meant for the user and needs no traceback.

    Whatever it quotes, its message is one printable line; the middle of a longer one is left out.
    """

    code: ClassVar[str] = ""

    def __init__(self, text: object = "") -> None:
        super().__init__(shortened(text, _LONGEST, _END))


class SettingError(FedsiloError):
    """A run setting is unknown, of the wrong type, out of range or contradicts another."""

    code = "setting"


class DataError(FedsiloError):
    """A data file or a silo's content cannot be used."""

    code = "data"


class FileNamesError(DataError):
    """It quotes names of files that were found, which at a hospital may be patients'."""

    code = "file-names"


class SiteError(FedsiloError):
    """A site failed or sent an unusable answer, or too few sites are left."""

    code = "site"


class RefusedError(SiteError):
    """The hospital's own rules, not a fault, keep an answer at the site."""

    code = "refused"


class EpsilonSpentError(RefusedError):
    """One more noisy message would bring epsilon above a cap."""

    code = "epsilon-spent"


class CheckpointError(FedsiloError):
    """A stored state is cut short, altered, or belongs to another run."""

    code = "checkpoint"


class RunDirectoryError(FedsiloError):
    """A run directory exists already, is missing, or has no finished run."""

    code = "run-directory"


class ExportError(FedsiloError):
    """A model cannot be exported, or the exported one gives other answers."""

    code = "export"


def missing_extra(what: str, extra: str, otherwise: str = "") -> str:
    """Return the sentence that says which extra ``what`` needs, and the command that installs it.

    ``otherwise`` is what else the user can do, such as "leave out --pdf".
    """
    command = f"{what} needs the extra '{extra}': pip install 'fedsilo[{extra}]'"
    return f"{command}, or {otherwise}" if otherwise else command


@contextmanager
def needs_extra(what: str, extra: str, otherwise: str = "") -> Iterator[None]:
    """Raise a SettingError by ``missing_extra`` if an import of the block fails."""
    try:
        yield
    except ImportError:
        raise SettingError(missing_extra(what, extra, otherwise)) from None
