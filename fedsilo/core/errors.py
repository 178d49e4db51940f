"""The errors that fedsilo raises on purpose: one line that names the fault, its place and the fix.

Each class has a ``code`` by which programs recognise it. For the codes in ``ERROR_CODES``, a site's
error also carries a number. The documentation's page on errors shows the docstrings of the classes.
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from fedsilo.core.one_line import abbreviate, join_names, one_line

# Flower sends its own numbers in the same field, from 0 upwards: ours must not meet them
ERROR_CODES = {"epsilon-spent": 1001, "refused": 1002, "withheld": 1003, "memory": 1004}


_LONGEST = 1500  # characters of a message
# The end of a message says what to do, so these characters are never cut off
_END = 400
_QUOTED = 100  # the most characters of a quoted name
_LISTED = 30  # the most names that a message lists


class FedsiloError(Exception):
    """Base of every error whose message is meant for the user and needs no traceback.

    The message is always one printable line, whatever it quotes. If the message is too long, its
    middle is left out.
    """

    code: ClassVar[str] = ""

    def __init__(self, text: object = "") -> None:
        super().__init__(abbreviate(text, _LONGEST, _END))

    def _render_traceback_(self) -> list[str]:
        """Build the lines that IPython and notebooks print in place of a traceback.

        The lines are the error's message and then its notes.
        """
        return [error_line(self), *getattr(self, "__notes__", ())]


class SettingError(FedsiloError):
    """A setting or an option is unknown, of the wrong type, out of range or contradicts another.

    Fix: change the setting that the message names. ``fedsilo settings`` lists all of them with
    their ranges, ``fedsilo COMMAND --help`` the options. Nothing has been trained or written.
    """

    code = "setting"


class DataError(FedsiloError):
    """A data file or a silo's content cannot be used.

    Fix: correct the file, line or column that the message names, or name another folder by
    ``--data-dir``. ``fedsilo datasets --data-dir DATA`` says which files are missing, and
    ``fedsilo fetch`` downloads those of public data sets.
    """

    code = "data"


class FileNamesError(DataError):
    """As ``data``; the message quotes names of files that were found, which may be patients'.

    Fix: read the whole message at the hospital, in the site's own log. The server learns only
    that the site's data cannot be used.
    """

    code = "file-names"


class SiteError(FedsiloError):
    """A site failed or sent an unusable answer, or too few sites are left.

    Fix: follow the reason that the message gives for each site; ``fedsilo doctor site`` finds most
    of them before a run. Then ``fedsilo resume RUN-DIR`` continues from the last checkpoint.
    With ``min-sites`` a run continues without a failed site.
    """

    code = "site"


class MemoryShortageError(SiteError):
    """A site's GPU, or the machine, has no memory left for the run.

    Fix: end the other programs that hold the memory, then ``fedsilo resume RUN-DIR`` continues from
    the last checkpoint with the same settings. If the run itself needs too much, start a new one
    with what the message names, such as a smaller ``train.batch-size``.
    """

    code = "memory"


class RefusedError(SiteError):
    """The hospital's own rules, not a fault, keep an answer at the site.

    Fix: ask the hospital to allow what the message names in its site file, or ask for less: fewer
    rounds, another method, a stricter ``trust``. No setting of a run overrides a site file.
    """

    code = "refused"


class WithheldError(SiteError):
    """A hospital could not answer, and does not say why to a server that it does not trust.

    Fix: ask the hospital to read its own log, which has the whole message. Even the text of an
    error can say something of one patient, so at ``trust: sums`` and ``trust: nobody`` it is the
    same for every fault that comes after the data were opened.
    """

    code = "withheld"


class EpsilonSpentError(RefusedError):
    """One more noisy message would bring epsilon above a cap.

    Fix: the run ends here by design. Plan the next one with ``fedsilo privacy plan``: more noise,
    fewer rounds or larger batches. Only the hospital can raise its ``max-epsilon``.
    """

    code = "epsilon-spent"


class FitError(FedsiloError):
    """The patients of all sites together determine no regression, so no coefficient is reported.

    Fix: leave out the column that the message names, or choose another outcome. A column that is
    constant, follows from others, or separates the outcomes has no coefficient.
    """

    code = "fit"


class CheckpointError(FedsiloError):
    """A stored state is cut short, altered, or belongs to another run.

    Fix: restore the file that the message names from a copy, or start the run again under another
    ``--name``. A resumed run must have the settings with which it began.
    """

    code = "checkpoint"


class RunDirectoryError(FedsiloError):
    """A run directory exists already, is missing, has no finished run, or a file has another form.

    Fix: check the path; ``fedsilo resume RUN-DIR`` finishes an interrupted run, and ``--name``
    chooses another directory. If the message names a file, restore it from the run's own copy; if
    it names a plugin, give your copy by ``--plugin``.
    """

    code = "run-directory"


class RunFailedError(FedsiloError):
    """One of the runs that a command started did not end well.

    Fix: correct what the message says of that run, and give the command again: finished runs stay
    and are used. If a process died, memory may be short: start fewer at once by ``--jobs``.
    """

    code = "run-failed"


class ExportError(FedsiloError):
    """A model cannot be exported, or the exported one gives other answers.

    Fix: choose another ``--format``; the message says which part of the network is at fault. A
    program that gives other answers than the model is not written.
    """

    code = "export"


class ProcessError(FedsiloError):
    """A process could not be started, or did not end well.

    Fix: run the command again with ``fedsilo --verbose`` to see what Flower or Ray printed, or use
    ``--engine inline``, which starts no process.
    """

    code = "process"


def error_line(error: FedsiloError) -> str:
    """Build the line that a command prints for an error: "fedsilo: error[code]: message".

    The brackets are left out if the error has no code.
    """
    return f"fedsilo: error{f'[{error.code}]' if error.code else ''}: {error}"


def unknown_key(key: str, known: Iterable[str]) -> SettingError:
    """Build the error for an unknown setting, which suggests similar known keys.

    A key is ``<group>.<name>``, or a name without a group. The first rule that applies gives the
    suggestion:

    - If the name without the group is a known key, that key: 'rounds' for 'train.rounds'.
    - If known keys end with ``.<key>``, all of them: 'uefl.gamma' for 'gamma'.
    - If difflib finds known keys with a similarity of at least 0.5, the most similar one.

    If no known key has the group of ``key``, the error also lists all groups. Otherwise, if there
    is no suggestion, it lists the first 30 known keys in alphabetical order. A ``key`` of more than
    100 characters is cut. The caller raises the error.

    Args:
        key: the unknown key, as the user wrote it.
        known: the keys that exist.
    """
    names, key = sorted(known), one_line(key, _QUOTED)
    # A method's setting without its group is the commonest mistake: 'gamma' for 'uefl.gamma'
    near = [name for name in names if name.endswith(f".{key}")]
    # So is a group that the setting does not have: 'train.rounds' for 'rounds'
    group, dot, bare = key.partition(".")
    if dot and bare in names:
        near = [bare]
    if not near:
        near = difflib.get_close_matches(key.replace("_", "-"), names, n=1, cutoff=0.5)
    hint = ""
    if near:
        guess = " or ".join(f"'{name}'" for name in near)
        hint = f"; did you mean {guess}?"
    groups = sorted({name.partition(".")[0] for name in names if "." in name})
    if group != key and group not in groups:
        shown = ", ".join(groups)
        return SettingError(f"setting '{key}': no group '{group}' exists (groups: {shown}){hint}")
    return SettingError(f"unknown setting '{key}'{hint or f'; known keys: {join_names(names)}'}")


def unknown_name(what: str, name: str, known: Iterable[str]) -> SettingError:
    """Build the error for an unknown name, which suggests the most similar known name.

    A known name is suggested if difflib finds a similarity of at least 0.54. Otherwise the error
    lists the first 30 known names in alphabetical order. For more than 30 experiments or methods,
    it instead names the command ``fedsilo experiments`` or ``fedsilo methods``, which lists them.
    The caller raises the error.

    Args:
        what: the kind of thing that has the name, such as 'method' or 'experiment'.
        name: the unknown name.
        known: the names that exist.
    """
    names, name = sorted(map(str, known)), one_line(name, _QUOTED)
    # This cutoff is low enough that 'acc' finds 'accuracy'; difflib's default of 0.6 does not
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.54)
    if near:
        hint = f"; did you mean '{near[0]}'?"
    elif len(names) > _LISTED and what in ("experiment", "method"):
        hint = f": 'fedsilo {what}s' lists all {len(names)}"
    else:
        hint = f": known are {join_names(names)}"
    return SettingError(f"unknown {what} '{name}'{hint}")


def describe_system_error(error: OSError) -> str:
    """Build the line "file: reason" for an OSError. "system" replaces a missing file name."""
    reason = error.strerror or str(error)
    return one_line(f"{error.filename or 'system'}: {reason}", 1000)


def missing_extra(what: str, extra: str, otherwise: str = "") -> str:
    """Build a sentence that says which extra of fedsilo a feature needs, and how to install it.

    An extra is a group of optional packages. The sentence has no full stop.

    Args:
        what: the feature, as the words before "needs the extra".
        extra: the name of the extra in pyproject.toml.
        otherwise: an alternative such as "leave it out", which follows ", or" at the end of the
            sentence; empty for none.
    """
    command = f"{what} needs the extra '{extra}': pip install 'fedsilo[{extra}]'"
    return f"{command}, or {otherwise}" if otherwise else command


@contextmanager
def needs_extra(what: str, extra: str, otherwise: str = "") -> Iterator[None]:
    """Turn an ImportError in the ``with`` block into an error that says which extra to install.

    An extra is a group of optional packages of fedsilo. Any ImportError counts, whichever module is
    missing. Other errors are not changed.

    Args:
        what: the feature, as the words before "needs the extra" in the error.
        extra: the name of the extra in pyproject.toml.
        otherwise: an alternative such as "leave it out", which ends the error; empty for none.

    Raises:
        SettingError: the block raises an ImportError.
    """
    try:
        yield
    except ImportError:
        raise SettingError(missing_extra(what, extra, otherwise)) from None
