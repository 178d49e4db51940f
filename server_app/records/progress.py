"""What ``progress.json`` and ``progress.prom`` of a run directory say: how far a run is.

They are for people and alarms, rewritten all the time, and no part of a run's result: a resumed run
does not read them. ``progress.prom`` has the form of node_exporter's textfile collector.
"""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.models.contract.errors import RunDirectoryError
from fedsilo.models.contract.settings_schema import key_of

FILE, METRICS_FILE = "progress.json", "progress.prom"
Status = Literal["running", "finished", "failed", "interrupted"]

# A sum of larger ones could not be divided
_Count = Annotated[int, Field(ge=0, le=2**63)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        alias_generator=key_of,
        validate_by_name=True,
        serialize_by_alias=True,
    )


class SiteProgress(_Part):
    """What a site's work has cost so far; ``epsilon`` only with differential privacy."""

    seconds: _Seconds = 0.0
    bytes_down: _Count = 0
    bytes_up: _Count = 0
    peak_memory_bytes: _Count = 0
    epsilon: _Seconds | None = None


class Progress(_Part):
    """How far a run is.

    Attributes:
        version: version of this format.
        run: name of the run; ``title`` describes it.
        state: ``running`` until the run has ended; a killed run says so forever.
        why: the error of a run that failed.
        host, pid, process_started: the process that writes this, to detect that it was killed.
        started, updated, phase_started: times, UTC.
        round: the current one, from 1, of ``rounds``; ``finished_rounds`` are over.
        phase: the current one, or an empty string between phases.
        asked, answered, away, failed: sites of that phase; away are those that have not answered
            and are disconnected, failed those that the run continues without, with the reason.
        left_out: how often a site was left out since this process began.
        seconds: since this process began; ``seconds_left`` is estimated from its rounds.
        server_memory_bytes: memory of the server's process.
        sites: by name.
        max_epsilon: the run's limit, or 0 if it has none.
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
        """Return all bytes, down to the sites and up from them."""
        sites = self.sites.values()
        return {"down": sum(s.bytes_down for s in sites), "up": sum(s.bytes_up for s in sites)}

    def epsilon(self) -> float | None:
        """Return the most that a site has spent, or None without differential privacy."""
        return max((s.epsilon for s in self.sites.values() if s.epsilon is not None), default=None)


def read_progress(folder: Path) -> Progress | None:
    """Return a run directory's progress, or None if it has no ``progress.json``.

    Raises:
        RunDirectoryError: it cannot be read, or is of another version of fedsilo.
    """
    path = folder / FILE
    if path.is_symlink() or (path.exists() and not path.is_file()):  # a pipe would be waited for
        raise RunDirectoryError(f"{path} is not a file of its own: restore the run's own file")
    try:
        return Progress.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
    if first["type"] == "json_invalid":
        raise RunDirectoryError(
            f"{path} is damaged: a running run rewrites it; 'fedsilo resume' continues one that "
            "was interrupted"
        )
    where = ".".join(map(str, first["loc"])) or "its top"
    raise RunDirectoryError(
        f"{path} is of another version of fedsilo, or was altered (at '{where:.100}'): watch the "
        "run with the fedsilo that runs it"
    )


def mark_interrupted(folder: Path) -> None:
    """Write that a run was interrupted, whose own process was ended before it could."""
    progress = read_progress(folder)
    if progress and progress.state == "running":
        update = {"state": "interrupted", "phase": "", "seconds_left": None}
        write_progress(progress.model_copy(update=update), folder)


def write_progress(progress: Progress, folder: Path) -> None:
    """Write both files of a run directory."""
    write_atomically(folder / FILE, progress.model_dump_json(indent=2) + "\n", lasting=False)
    write_atomically(folder / METRICS_FILE, metrics_text(progress), lasting=False)


def metrics_text(progress: Progress) -> str:
    """Return ``progress.prom``, in Prometheus's text format."""
    lines: list[str] = []
    for name, meaning, samples in _families(progress):
        if samples:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        for labels, value in samples:
            # JSON escapes what Prometheus does: backslashes, quotes and line ends
            pairs = [
                f"{label}={json.dumps(text, ensure_ascii=False)}"
                for label, text in {"run": progress.run, **labels}.items()
            ]
            lines.append(f"{name}{{{','.join(pairs)}}} {value!r}")
    return "\n".join(lines) + "\n"


_Samples = list[tuple[dict[str, str], float]]


def _families(p: Progress) -> Iterator[tuple[str, str, _Samples]]:
    """Yield name, meaning and samples of each metric."""
    about = {"method": p.method, "dataset": p.dataset, "state": p.state}
    yield "fedsilo_run_info", "What runs, and whether it has ended.", [(about, 1)]
    yield "fedsilo_run_rounds", "Rounds in all.", [({}, p.rounds)]
    yield "fedsilo_run_finished_rounds", "Rounds that are over.", [({}, p.finished_rounds)]
    sites = {"asked": p.asked, "answered": p.answered, "away": p.away, "failed": p.failed}
    counts: _Samples = [({"state": state}, len(names)) for state, names in sites.items()]
    yield "fedsilo_run_phase_sites", "Sites of the current phase.", counts
    ways: _Samples = [({"direction": way}, count) for way, count in p.bytes().items()]
    yield "fedsilo_run_bytes_total", "Bytes down to the sites and up from them.", ways
    for key, name, meaning in (
        ("seconds", "fedsilo_site_seconds_total", "Seconds of a site's own work."),
        ("peak_memory_bytes", "fedsilo_site_peak_memory_bytes", "Peak memory of a site."),
        ("epsilon", "fedsilo_site_epsilon", "Epsilon that a site has spent in this run."),
    ):
        costs = {site: getattr(cost, key) for site, cost in p.sites.items()}
        yield name, meaning, [({"site": s}, v) for s, v in costs.items() if v is not None]
    yield "fedsilo_run_server_memory_bytes", "The server's memory.", [({}, p.server_memory_bytes)]
    left: _Samples = [] if p.seconds_left is None else [({}, p.seconds_left)]
    yield "fedsilo_run_seconds_left", "Seconds left, estimated from the rounds so far.", left
    moment = p.updated.timestamp()
    yield "fedsilo_run_updated_timestamp_seconds", "When this was written.", [({}, moment)]


def clock(seconds: float) -> str:
    """Return seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def bytes_text(number: float) -> str:
    """Return bytes with a decimal unit: ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:  # more is shown as 1 of the next unit, not as 1e+03
            return f"{number:.0f} B" if unit == "B" else f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
