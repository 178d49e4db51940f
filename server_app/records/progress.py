"""The progress of a run in the files ``progress.json`` and ``progress.prom``.

The files are for people and alarms, and are rewritten all the time. They do not belong to the
result, so a resumed run does not read them. ``progress.prom`` is for node_exporter's textfile
collector.
"""

import json
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from fedsilo.core.errors import RunDirectoryError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.settings_schema import key_of

FILE, METRICS_FILE = "progress.json", "progress.prom"
Status = Literal["running", "finished", "failed", "interrupted"]

# A sum of larger ones could not be divided
_Count = Annotated[int, Field(ge=0, le=2**63)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Pairs of labels and value
_Samples = Sequence[tuple[dict[str, str], float]]
Metric = tuple[str, str, _Samples]  # name, help text and samples of a Prometheus metric


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        alias_generator=key_of,
        validate_by_name=True,
        serialize_by_alias=True,
    )


class SiteProgress(_Part):
    """The costs of a site's work so far. ``epsilon`` is None without differential privacy."""

    seconds: _Seconds = 0.0
    bytes_down: _Count = 0
    bytes_up: _Count = 0
    peak_memory_bytes: _Count = 0
    epsilon: _Seconds | None = None


class Progress(_Part):
    """The progress of a run.

    Attributes:
        version: version of this format.
        run: name of the run; ``title`` describes it.
        state: ``running`` until the run has ended; a killed run stays ``running``.
        why: the error of a run that failed, or empty.
        host, pid, process_started: the process that writes the file, so a reader can tell whether
            it still runs.
        started, updated, phase_started: times, UTC.
        round: the current round, counted from 1, of ``rounds``; ``finished_rounds`` are over.
        phase: the current phase, or an empty string between phases.
        asked, answered, away, failed: sites of the current phase. ``away`` are disconnected and
            have not answered; ``failed`` are left out of the phase, with the reason.
        left_out: number of messages without a usable reply, also before a resume.
        seconds: seconds since this process began; ``seconds_left`` is estimated from its rounds.
        server_memory_bytes: memory of the server's process.
        sites: the costs of each site, by name.
        max_epsilon: the run's cap on epsilon, or 0 if it has none.
    """

    version: Literal[1] = 1
    run: str
    title: str
    method: str
    dataset: str
    seed: Annotated[int, Field(ge=-(2**63), le=2**64)]
    state: Status = "running"
    why: str = ""
    host: str = Field(default_factory=socket.gethostname)
    pid: _Count
    process_started: _Seconds
    started: AwareDatetime
    updated: AwareDatetime
    round: _Count = 0
    rounds: _Count = 0
    finished_rounds: _Count = 0
    phase: str = ""
    phase_started: AwareDatetime | None = None
    asked: list[str] = Field(default_factory=list)
    answered: list[str] = Field(default_factory=list)
    away: list[str] = Field(default_factory=list)
    failed: dict[str, str] = Field(default_factory=dict)
    left_out: _Count = 0
    seconds: _Seconds = 0.0
    seconds_left: _Seconds | None = None
    server_memory_bytes: _Count = 0
    sites: dict[str, SiteProgress] = Field(default_factory=dict)
    max_epsilon: _Seconds = 0.0

    def bytes(self) -> dict[str, int]:
        """Return the total bytes over all sites: "down" to the sites and "up" from them."""
        total = {"down": 0, "up": 0}
        for site in self.sites.values():
            total["down"] += site.bytes_down
            total["up"] += site.bytes_up
        return total

    def epsilon(self) -> float | None:
        """Return the largest epsilon of any site, or None without differential privacy."""
        spent = [site.epsilon for site in self.sites.values() if site.epsilon is not None]
        return max(spent, default=None)


def read_progress(folder: Path) -> Progress | None:
    """Read ``progress.json`` in a run directory, or return None if there is no such file.

    Raises:
        RunDirectoryError: the file cannot be read, is a link or not a regular file, is damaged, or
            was written by another version of fedsilo.
    """
    path = folder / FILE
    fault = "is a link or not a regular file: restore the run's own file"
    try:
        # Reading a pipe would wait forever, and a link may lead to any file of the reader
        if not path.is_symlink() and (path.is_file() or not path.exists()):
            return Progress.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        fault = f"cannot be read: {error.strerror}"
    except ValidationError as error:
        fault = _describe_fault(error)
    raise RunDirectoryError(f"{path} {fault}")


def _describe_fault(error: ValidationError) -> str:
    """Describe why a progress file is invalid, and say what to do.

    The text continues a sentence that begins with the file's name. The first error decides. If it
    says that the JSON is invalid, the file may be half-written, so the advice is to wait or to
    resume the run. Any other fault means that another version wrote the file, or that somebody
    altered it.
    """
    first = error.errors()[0]
    # Half a file is not valid JSON: on a network drive, a reader may see a file being replaced
    if first["type"] == "json_invalid":
        return (
            "is damaged: wait until the run writes it again, or continue an interrupted run by "
            "'fedsilo resume'"
        )
    where = ".".join(map(str, first["loc"])) or "its top"
    return (
        f"was written by another version of fedsilo, or was altered (at '{where:.100}'): watch the "
        "run with the version of fedsilo that runs it"
    )


def mark_interrupted(folder: Path) -> None:
    """Change the state in progress.json and progress.prom from "running" to "interrupted".

    The phase and the remaining seconds are cleared. If progress.json is missing or has another
    state, nothing is written. Call this only if the run's process was killed before the process
    could write "interrupted".

    Raises:
        RunDirectoryError: progress.json cannot be read, is a link, is damaged, or is of another
            version.
    """
    progress = read_progress(folder)
    if progress and progress.state == "running":
        update = {"state": "interrupted", "phase": "", "seconds_left": None}
        write_progress(progress.model_copy(update=update), folder)


def write_progress(progress: Progress, folder: Path) -> None:
    """Write ``progress.json`` and ``progress.prom`` in the run directory ``folder``."""
    # Not 'lasting': a power cut may lose the progress, and waiting for the disk costs more
    write_atomically(folder / FILE, progress.model_dump_json(indent=2) + "\n", lasting=False)
    metrics = format_metrics(_list_metrics(progress), {"run": progress.run})
    write_atomically(folder / METRICS_FILE, metrics, lasting=False)


def metrics_text(progress: Progress) -> str:
    """Build the content of ``progress.prom``, in Prometheus's text format.

    Each sample has the run's name as a label. The text is that of ``format_metrics``.
    """
    return format_metrics(_list_metrics(progress), {"run": progress.run})


def format_metrics(metrics: Iterable[Metric], common: Mapping[str, str]) -> str:
    """Format metrics in Prometheus's text format, with the labels ``common`` on each value.

    Each metric has a name, a help text and samples, which are pairs of labels and a value. A
    sample's label replaces a common label of the same name. A metric without samples is left out. A
    metric whose name ends with "_total" is a counter, and every other metric is a gauge.
    """
    lines: list[str] = []
    for name, meaning, samples in metrics:
        if samples:
            kind = "gauge"
            if name.endswith("_total"):
                kind = "counter"
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        for labels, value in samples:
            pairs = []
            for label, text in {**common, **labels}.items():
                # JSON escapes the same characters as Prometheus: backslashes, quotes, line ends
                pairs.append(f"{label}={json.dumps(text, ensure_ascii=False)}")
            lines.append(f"{name}{{{','.join(pairs)}}} {value!r}")
    return "\n".join(lines) + "\n"


def _list_metrics(progress: Progress) -> Iterator[Metric]:
    """Yield the Prometheus metrics of a run's progress, each as (name, help text, samples).

    A sample is (labels, value). The metrics are, in this order:

    - the run's method, data set and state, as labels of the value 1,
    - the number of all rounds, then that of finished rounds,
    - the number of sites asked, answered, away and failed in the current phase,
    - the number of failures, then the bytes down and up,
    - the seconds, the peak memory and the epsilon of each site,
    - the server's memory, the seconds left, and the time of writing.

    An unknown number, such as the epsilon without differential privacy, gives no sample.
    """
    about = {"method": progress.method, "dataset": progress.dataset, "state": progress.state}
    yield "fedsilo_run_info", "What runs, and whether it has ended.", [(about, 1)]
    yield "fedsilo_run_rounds", "Rounds in all.", [({}, progress.rounds)]
    yield "fedsilo_run_finished_rounds", "Rounds that are over.", [({}, progress.finished_rounds)]
    sites = {
        "asked": progress.asked,
        "answered": progress.answered,
        "away": progress.away,
        "failed": progress.failed,
    }
    counts: _Samples = [({"state": state}, len(names)) for state, names in sites.items()]
    yield "fedsilo_run_phase_sites", "Sites of the current phase.", counts
    said = "Messages without a usable answer, also before a resume."
    yield "fedsilo_run_failures_total", said, [({}, progress.left_out)]
    ways: _Samples = [({"direction": way}, count) for way, count in progress.bytes().items()]
    yield "fedsilo_run_bytes_total", "Bytes down to the sites and up from them.", ways
    for key, name, meaning in (
        ("seconds", "fedsilo_site_seconds_total", "Seconds of a site's own work."),
        ("peak_memory_bytes", "fedsilo_site_peak_memory_bytes", "Peak memory of a site."),
        ("epsilon", "fedsilo_site_epsilon", "Epsilon that a site has spent in this run."),
    ):
        costs: list[tuple[dict[str, str], float]] = []
        for site, cost in progress.sites.items():
            value = getattr(cost, key)
            if value is not None:
                costs.append(({"site": site}, value))
        yield name, meaning, costs
    yield (
        "fedsilo_run_server_memory_bytes",
        "The server's memory.",
        [({}, progress.server_memory_bytes)],
    )
    left: list[tuple[dict[str, str], float]] = []
    if progress.seconds_left is not None:
        left.append(({}, progress.seconds_left))
    yield "fedsilo_run_seconds_left", "Seconds left, estimated from the rounds so far.", left
    moment = progress.updated.timestamp()
    yield "fedsilo_run_updated_timestamp_seconds", "When this was written.", [({}, moment)]


def clock(seconds: float) -> str:
    """Format a duration as ``m:ss``, or as ``h:mm:ss`` from one hour on, in whole seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"


def bytes_text(number: float) -> str:
    """Format bytes with a decimal unit and up to three significant digits, such as ``1.5 MB``.

    Units are B, kB, MB, GB and TB (powers of 1000). Numbers of bytes below 1 kB are whole. Zeros at
    the end of decimals are left out.
    """
    # A value of 999.5 or more is shown as 1 of the next unit, not as 1e+03
    if number < 999.5:
        return f"{number:.0f} B"
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        if number < 999.5:
            return f"{number:.3g} {unit}"
    return f"{number / 1000:.3g} TB"
