"""The failures of a run, in ``failures.jsonl``: one line for each message without a usable reply.

The lines outlive the process that wrote them. Unlike the tables, the file is not cut back to the
checkpoint of a resumed run, because the failure that ended a run came after its last checkpoint.
"""

import json
import os
from typing import Any

from fedsilo.core.errors import RunDirectoryError
from fedsilo.core.one_line import one_line
from fedsilo.server_app.records.run_directory import RunDirectory

FAILURES = "failures.jsonl"
KEYS = ("round", "phase", "site", "code", "cause")


class FailureLog:
    """Reads and appends to the failures of one run.

    Attributes:
        path: the file.
        entries: the failures in the order they happened, including those before a resume. Each is a
            mapping with the keys ``KEYS``; the site is empty if the whole run failed.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.path = directory.path / FAILURES
        self.entries = read_failures(directory)

    def add(self, round_: int, phase: str, site: str, code: str, cause: str) -> None:
        """Append a failure to ``failures.jsonl`` and to ``entries``, unless an equal entry exists.

        A resumed run may repeat a round with the same failure, which is then recorded only once.
        The new line is flushed to the disk before this function returns.

        Args:
            round_: the number of the round, or 0 if a new run has not begun round 1.
            phase: the phase of the round, such as "train". It is empty if the run itself failed.
            site: the site's name, or "unknown". It is empty if the run itself failed.
            code: the kind of failure, such as "no-answer".
            cause: the reason, which is cut to one line of at most 1000 characters.

        Raises:
            RunDirectoryError: the file cannot be written.
        """
        values = (round_, phase, site, code, one_line(cause, 1000))
        entry: dict[str, Any] = dict(zip(KEYS, values, strict=True))
        if entry in self.entries:
            return
        line = json.dumps(entry, ensure_ascii=False) + "\n"
        try:
            # One write, so that a process that is killed leaves a whole line or none. No link is
            # followed, because it could lead out of the directory
            handle = os.open(
                self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644
            )
            try:
                os.write(handle, line.encode())
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise RunDirectoryError(
                f"cannot append to {self.path} ({error.strerror}): resume the run once the file "
                "can be written"
            ) from None
        self.entries.append(entry)

    def in_summary(self) -> list[dict[str, Any]]:
        """Return the failures in the form in which summary.json lists them, oldest first.

        Each is a mapping with the keys "round", "phase", "site", "code" and "reason". In
        failures.jsonl the key "reason" is called "cause".
        """
        listed = []
        for entry in self.entries:
            rest = {key: value for key, value in entry.items() if key != "cause"}
            listed.append({**rest, "reason": entry["cause"]})
        return listed


def read_failures(directory: RunDirectory) -> list[dict[str, Any]]:
    """Read a run's failures.jsonl, and return one mapping for each line.

    The keys are "round", "phase", "site", "code" and "cause". If there is no such file, the list is
    empty.

    Raises:
        RunDirectoryError: the file cannot be read, a line is not valid JSON, or a line does not
            have exactly these keys in this order.
    """
    path = directory.file(FAILURES)
    if not path.exists():
        return []
    failures = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            # Other keys, or another order, mean that another version or person wrote the line
            if tuple(entry) != KEYS:
                raise ValueError(f"its keys must be {', '.join(KEYS)}")
            failures.append(entry)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = one_line(error, 100)
        raise RunDirectoryError(
            f"{path}, line {len(failures) + 1} is damaged ({reason}): restore the run's own file"
        ) from None
    return failures
