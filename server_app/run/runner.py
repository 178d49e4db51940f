"""One run: meet the sites, start or go on, train, write the run directory, print the table."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from flwr.serverapp import Grid
from rich.console import Console

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.datasets.io.state_files import save_state
from fedsilo.datasets.registry import cut_of, data_set, silo_count
from fedsilo.models.contract.errors import FedsiloError, RunDirectoryError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.server_app.config.operator_files import operator_terms
from fedsilo.server_app.config.settings import RunSettings, differences, resolve, run_values
from fedsilo.server_app.records.checkpoints import CheckpointHook
from fedsilo.server_app.records.evidence import evidence_document, without_bins
from fedsilo.server_app.records.privacy_account import PrivacyHook
from fedsilo.server_app.records.progress_hook import ProgressRecord
from fedsilo.server_app.records.recorders import FailureHook, MetricsHook, TrafficHook
from fedsilo.server_app.records.run_directory import (
    CUT,
    SILOS,
    STANDARDISATION,
    RunDirectory,
    config_document,
    named,
    only_writer,
    open_run_directory,
    silos_document,
)
from fedsilo.server_app.records.summary import (
    by_distribution,
    means,
    print_table,
    privacy_document,
    result_table,
)
from fedsilo.server_app.records.tracking import TrackingHook
from fedsilo.server_app.run.notices import say_what_is_odd, say_who_is_missing
from fedsilo.server_app.run.progress import ProgressHook
from fedsilo.server_app.run.progress_bars import make_console
from fedsilo.strategies.loop.drawing import refuse_site_count
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.loop.participants import Participants, meet_sites
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.loop.terms import Terms
from fedsilo.strategies.methods.registry import strategy_class
from fedsilo.strategies.wire.records import to_record

Finish = Callable[[RunDirectory, dict[str, Any]], None]  # adds to a run and its summary


def run(
    grid: Grid,
    settings: RunSettings,
    launch: Mapping[str, Any] | None = None,
    finish: Finish | None = None,
) -> RunDirectory:
    """Run ``settings`` over the sites of ``grid`` and return the run directory.

    Args:
        grid: Flower's grid or the in-process one.
        settings: what to run.
        launch: engine and resources, for config.toml, so that ``fedsilo resume`` takes the same.
        finish: called just before summary.json is written: adds published numbers to the summary
            and draws pictures.

    Raises:
        FedsiloError: nothing was half-written; what was finished before stays and can be resumed.
    """
    settings = named(settings)
    common = settings.common
    console = make_console()
    directory = open_run_directory(common.out, common.run_name, common.resume)
    _refuse_other_config(directory, settings)
    if (directory.path / "summary.json").is_file():
        console.print(f"{directory.path} holds a finished run: nothing to resume")
        return directory
    began = time.monotonic()
    participants = meet_sites(grid, common, silo_count(common), terms_of(settings))
    say_who_is_missing(participants, common, console)
    say_what_is_odd(participants, console)
    new = not common.resume
    with only_writer(directory, new), _nothing_left_of_nothing(directory, new):
        loop, recorders = _assemble(settings, participants, directory, console)
        _write_beginning(directory, settings, participants, launch or {})
        met = time.monotonic()
        with recorders.record.following():
            with closing(recorders.progress):
                loop.start(
                    grid,
                    to_record(loop.current().arrays),
                    num_rounds=common.rounds,
                    timeout=common.reply_timeout,
                )
            seconds = {"total": time.monotonic() - began, "rounds": time.monotonic() - met}
            summary = _write_end(directory, loop, recorders, seconds, finish)
    _show(directory, loop, recorders, console, summary)
    return directory


def terms_of(settings: RunSettings) -> Terms:
    """Return on what terms sites take part: the operator's and the method's."""
    common, own = settings.common, settings.own
    cls = strategy_class(common.method)
    unfit = partial(cls.why_unfit, common, own)
    return dataclasses.replace(operator_terms(common), unfit=unfit)


@contextmanager
def _nothing_left_of_nothing(directory: RunDirectory, new: bool) -> Iterator[None]:
    """Remove the directory of a new run that failed before its first checkpoint."""
    try:
        yield
    except FedsiloError:
        if new and not any(directory.checkpoints.glob("*")):
            shutil.rmtree(directory.path)
        raise


@dataclasses.dataclass(frozen=True)
class _Recorders:
    metrics: MetricsHook
    traffic: TrafficHook
    failures: FailureHook
    privacy: PrivacyHook
    progress: ProgressHook
    record: ProgressRecord


def _assemble(
    settings: RunSettings, participants: Participants, directory: RunDirectory, console: Console
) -> tuple[RoundLoop, _Recorders]:
    """Build the round loop with its hooks, at its first state or at the newest checkpoint's."""
    common = settings.common
    cls = strategy_class(common.method)
    refuse_site_count(common, len(participants.sites()))
    recorders = _recorders(common, directory, console)
    recording = [recorders.metrics, recorders.traffic, recorders.failures, recorders.privacy]
    checkpoint = CheckpointHook(directory.checkpoints, settings.decisive(), recording)
    tracking = TrackingHook(
        common.track, directory.path, recorders.metrics, recorders.traffic, common.resume
    )
    hooks = [*recording, checkpoint, tracking, recorders.progress, recorders.record]
    loop = RoundLoop(cls(common, settings.own, participants), hooks, str(directory.path))
    if common.resume:
        _refuse_other_data(directory, participants, cls.capabilities.late_join)
        loop.state = checkpoint.resume()
    loop.state = loop.state or loop.method.initial_state(participants.task())
    return loop, recorders


def _recorders(common: CommonSettings, directory: RunDirectory, console: Console) -> _Recorders:
    cls = strategy_class(common.method)
    title = f"{cls.title} on {common.dataset}, seed {common.seed}"
    metrics, traffic = MetricsHook(directory), TrafficHook(directory)
    privacy = PrivacyHook(common, directory.path / "privacy-asked.json")
    return _Recorders(
        metrics,
        traffic,
        FailureHook(),
        privacy,
        ProgressHook(metrics, console, cls, title),
        ProgressRecord(directory, common, title, traffic, privacy),
    )


def _refuse_other_config(directory: RunDirectory, settings: RunSettings) -> None:
    path = directory.path / "config.toml"
    if not path.is_file():
        return
    if other := differences(resolve(run_values(path)).decisive(), settings.decisive()):
        raise RunDirectoryError(
            f"{directory.path} holds a run of another config: {other}; resume with the same "
            "settings or choose another 'run-name'"
        )


def _refuse_other_data(
    directory: RunDirectory, participants: Participants, late_join: bool
) -> None:
    """Refuse to go on with other sites or data; a method that lets sites join late takes more."""
    path = directory.path / "silos.json"
    if not path.is_file():
        return
    before, now = directory.read_json("silos.json"), silos_document(participants)
    if late_join:
        now = {site: facts for site, facts in now.items() if site in before}
    for site in before.keys() & now.keys():
        if (was := before[site].get("agreed")) != (is_now := now[site].get("agreed")):
            raise RunDirectoryError(
                f"'site-weights' agrees on {is_now or 'nothing'} for site {site}, and {path} has "
                f"{was or 'nothing'}: resume with the same file, or choose another 'run-name'"
            )
    if before != now:
        raise RunDirectoryError(
            f"the sites or their data are not those of {path}: resume with the same sites and "
            "data, or choose another 'run-name'"
        )


def _write_beginning(
    directory: RunDirectory,
    settings: RunSettings,
    participants: Participants,
    launch: Mapping[str, Any],
) -> None:
    """Write what is known before the first round; a resumed run keeps what stands there."""
    directory.write_json(SILOS, silos_document(participants))
    if participants.simulated() and (cut := cut_of(settings.common)):
        directory.write_json(CUT, cut)
    config = directory.path / "config.toml"
    if not config.is_file():
        write_atomically(config, config_document(settings, launch))


def _write_end(
    directory: RunDirectory,
    loop: RoundLoop,
    recorders: _Recorders,
    seconds: dict[str, float],
    finish: Finish | None,
) -> dict[str, Any]:
    """Write the model, privacy.json, pictures and, last, summary.json: by it a run is whole."""
    state, method = loop.current(), loop.method
    name = method.common.method
    statistics = method.participants.figures()
    figures = statistics and {part: values.tolist() for part, values in vars(statistics).items()}
    if model := method.model(state):
        facts = {
            "method": name,
            "round": state.round,
            "extras": dict(state.extras),
            "keepers": list(state.stateful_sites),
        }
        if figures:
            facts["figures"] = figures
        save_state(directory.path / "model.safetensors", model, facts)
    elif figures:  # the sites' own models need them
        directory.write_json(STANDARDISATION, figures)
    disclosures = method.disclosures()
    leaves = [*method.participants.leaves(), *disclosures.leaves]
    guarantee = recorders.privacy.guarantee(method.participants)
    totals = recorders.traffic.totals()
    privacy = privacy_document(name, leaves, totals, guarantee, disclosures.noise)
    directory.write_json("privacy.json", privacy)
    test = recorders.metrics.values(state.round, "test")
    documents = dict(method.documents(state, test))
    if evidence := evidence_document(test):
        documents["evidence.json"] = evidence
    for name, document in documents.items():
        directory.write_json(name, document)
    results = _figures(loop, recorders)
    cost = {
        "seconds": {
            **{name: round(value, 3) for name, value in seconds.items()},
            "sites": recorders.traffic.seconds(),
        },
        "peak-memory-bytes": recorders.traffic.peak_memory,
        "unrepeatable-operations": sorted(recorders.traffic.unrepeatable),
        "bytes": totals,
    }
    summary = {**results, **cost, "privacy": privacy}
    try:
        if finish:
            finish(directory, summary)
    except Exception:  # a picture that cannot be drawn costs no run
        directory.write_json("summary.json", summary)
        raise
    directory.write_json("summary.json", summary)
    return summary


def _figures(loop: RoundLoop, recorders: _Recorders) -> dict[str, Any]:
    """Return what a run found: test figures, validation figures, and what happened on the way."""
    state, method, common = loop.current(), loop.method, loop.method.common
    distribution_of = _distribution_of(method)
    test = without_bins(recorders.metrics.values(state.round, "test"))
    val = recorders.metrics.values(state.round, "val")
    return {
        "method": common.method,
        "title": method.title,
        "dataset": common.dataset,
        "seed": common.seed,
        "rounds": state.round,
        "sites": test,
        "mean": means(test),
        "distributions": by_distribution(test, distribution_of),
        "validation": {"mean": means(val), "distributions": by_distribution(val, distribution_of)},
        "published": None,
        "published-unlike": None,
        "stopped": _why_it_ended(loop) or None,
        "marks": method.marks(state),
        "failures": recorders.failures.failures,
    }


def _why_it_ended(loop: RoundLoop) -> str:
    """Say why there were fewer rounds than asked for; empty: there were not."""
    return loop.stop.reason or loop.method.why_finished(loop.current())


def _distribution_of(method: Method) -> dict[str, str]:
    return {site: facts.distribution for site, facts in method.participants.facts.items()}


def _show(
    directory: RunDirectory,
    loop: RoundLoop,
    recorders: _Recorders,
    console: Console,
    summary: Mapping[str, Any],
) -> None:
    state, method = loop.current(), loop.method
    values = recorders.metrics.values(state.round, "test")
    common = method.common
    if why := _why_it_ended(loop):
        console.print(why, highlight=False, soft_wrap=True, markup=False)
    title = f"{method.title} on {common.dataset}, round {state.round}, seed {common.seed}"
    published = summary["published"]
    shown = data_set(common.dataset).headline
    if values:
        table = result_table(values, _distribution_of(method), title, published, shown)
        print_table(console, table)
    if published:
        console.print(
            "published: the paper's own numbers, measured in its own setting", highlight=False
        )
    elif unlike := summary["published-unlike"]:
        told = f"no published numbers: the paper measured another setting; {unlike}"
        console.print(told, highlight=False, soft_wrap=True, markup=False)
    console.print(f"run directory: {directory.path}", highlight=False, soft_wrap=True)
