"""The state of a hospital's node: its messages by the audit log, its epsilon by the ledger.

Only the hospital's own files are read, on its own machine; the server learns nothing of it.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from fedsilo.client_app.site.policy import SiteFile, parse_site_file
from fedsilo.core.files.atomic_files import open_regular
from fedsilo.core.files.site_names import folder_name
from fedsilo.core.files.text_files import file_fault
from fedsilo.core.one_line import format_count
from fedsilo.deployment.kit import KitError, read_kit
from fedsilo.deployment.rules import SITE
from fedsilo.server_app.records.progress import Metric, bytes_text

_OUTCOMES = ("answered", "refused", "failed")
_LOG, _LEDGER = "audit.jsonl", "privacy-ledger.json"


@dataclass(frozen=True)
class HospitalState:
    """The messages that a hospital has answered over all runs, and its epsilon."""

    site: str
    messages: Counter[str] = field(default_factory=Counter)  # outcome -> messages
    bytes_in: int = 0
    bytes_out: int = 0
    last: str = ""  # ISO 8601 time of the last message; empty before the first
    # Over all runs; None without a ledger. A cap of 0 means that there is none
    epsilon: float | None = None
    max_epsilon: float = 0.0

    def facts(self) -> list[tuple[str, str]]:
        """List the hospital's state for display, as pairs (name, text).

        The pairs are the numbers of messages answered, refused and failed, the bytes received and
        sent, and the time of the last message. Before the first message, this time is "none". If
        the hospital has a privacy ledger, the epsilon spent over all runs follows, with its cap if
        one is set.
        """
        facts = []
        for outcome in _OUTCOMES:
            facts.append((outcome, format_count(self.messages[outcome], "message")))
        facts += [("received", bytes_text(self.bytes_in)), ("sent", bytes_text(self.bytes_out))]
        facts.append(("last message", self.last or "none"))
        if self.epsilon is not None:
            spent = f"{self.epsilon:.4g}"
            if self.max_epsilon:
                spent += f" of {self.max_epsilon:g}"
            facts.append(("epsilon", spent))
        return facts

    def metrics(self) -> list[Metric]:
        """List the state as metrics for Prometheus, each as (name, meaning, samples).

        A sample is a pair of labels and a value. The metrics are the messages that were answered,
        refused and failed, and the bytes in each direction. The time of the last message, the spent
        epsilon, and the hospital's cap on epsilon follow if they are known.
        """
        messages = [({"outcome": name}, self.messages[name]) for name in _OUTCOMES]
        sizes = [({"direction": "in"}, self.bytes_in), ({"direction": "out"}, self.bytes_out)]
        found: list[Metric] = [
            ("fedsilo_hospital_messages_total", "Messages, by their outcome.", messages),
            ("fedsilo_hospital_bytes_total", "Bytes of messages and replies.", sizes),
        ]
        if self.last:
            moment = datetime.fromisoformat(self.last).timestamp()
            name = "fedsilo_hospital_last_message_timestamp_seconds"
            found.append((name, "Time of the last message.", [({}, moment)]))
        if self.epsilon is not None:
            meaning = "Epsilon spent over all runs."
            found.append(("fedsilo_hospital_epsilon", meaning, [({}, self.epsilon)]))
        if self.max_epsilon:
            meaning = "The hospital's cap on epsilon."
            found.append(("fedsilo_hospital_max_epsilon", meaning, [({}, self.max_epsilon)]))
        return found


class HospitalReader:
    """Reads the state of the hospital whose kit was opened in ``folder``.

    The log grows for years, so each call reads only the lines since the call before.

    Raises:
        KitError: the folder is not an opened kit with a site file.
        SettingError: the site file is not valid.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().resolve()
        site = read_kit(self.folder).card.site
        self._own = self.folder / "state" / ".own" / folder_name(site)
        self._rules = self._read_rules()
        self._log = self._own / _LOG
        if self._rules.audit_log:
            self._log = Path(os.path.realpath(self._rules.audit_log))
        self._state = HospitalState(site, max_epsilon=self._rules.max_epsilon)
        self._offset = 0
        # When the ledger was last written, because composing epsilon takes a while
        self._ledger_written = 0

    def _read_rules(self) -> SiteFile:
        path = self.folder / SITE
        if not path.is_file() or file_fault(path):
            raise KitError(f"{path} is missing or not a file: start the hospital once")
        return parse_site_file(path.read_text(encoding="utf-8"))

    def read(self) -> HospitalState:
        """Update the state from the hospital's audit log and its privacy ledger, and return it.

        The ledger is the file that adds up the epsilon spent over all runs. Only new lines of the
        log, and only a changed ledger, are read. Without a log, no messages are counted. Without a
        ledger, the spent epsilon is None.

        Raises:
            OSError: a file cannot be read.
            CheckpointError: the ledger is damaged.
        """
        if self._log.is_file():
            self._read_lines()
        self._read_ledger()
        return self._state

    def _read_lines(self) -> None:
        """Count the messages that the node has written to its audit log since the last call.

        A message is one line, which is counted only when it is complete. A log that has become
        shorter is a new log, so counting starts again from zero.
        """
        # Bytes, because the offset from which the next call continues is a number of bytes
        with os.fdopen(open_regular(self._log, os.O_RDONLY), "rb") as log:
            # Somebody began a new log under the same name
            if os.fstat(log.fileno()).st_size < self._offset:
                self._offset = 0
                state = self._state  # the part from the rules and the ledger stays
                self._state = HospitalState(
                    state.site, max_epsilon=state.max_epsilon, epsilon=state.epsilon
                )
            log.seek(self._offset)
            for text in log:
                # The node is still writing this line
                if not text.endswith(b"\n"):
                    break
                self._offset += len(text)
                self._count(text)

    def _count(self, text: bytes) -> None:
        """Add one line of the audit log, which stands for one message, to the hospital's state.

        The number of messages with the line's outcome, such as "answered", goes up by one. The
        line's bytes are added to those received and sent, and its time becomes that of the last
        message. A line that cannot be parsed, for example because a power cut tore it, is skipped.
        """
        state = self._state
        try:
            line = json.loads(text)
            moment = datetime.fromisoformat(str(line["time"]))
            sizes = int(line["bytes-in"]), int(line["bytes-out"])
            outcome = str(line["outcome"])
        except (ValueError, KeyError, TypeError):
            return  # the power failed before the line was complete, so the answer never left
        state.messages[outcome] += 1
        self._state = replace(
            state,
            bytes_in=state.bytes_in + sizes[0],
            bytes_out=state.bytes_out + sizes[1],
            last=moment.isoformat(),
        )

    def _read_ledger(self) -> None:
        path = self._own / _LEDGER
        if not path.is_file() or path.stat().st_mtime_ns == self._ledger_written:
            return
        # Flower comes with it, which a hospital without a ledger does not need here
        from fedsilo.client_app.privacy.ledger import Ledger

        self._ledger_written = path.stat().st_mtime_ns
        ledger = Ledger(path, self._rules.max_epsilon, self._rules.delta, of_all_runs=True)
        self._state = replace(self._state, epsilon=ledger.epsilon())
