"""One run: meet the sites, start or go on, train, write the run directory, print the table."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from flwr.serverapp import Grid
from rich.console import Console

from datasets.silos import silo_names
from datasets.storage import save_state, write_atomically
from models.errors import FedsiloError, RunDirectoryError
from server_app.bars import make_console
from server_app.checkpoints import CheckpointHook
from server_app.config import RunSettings, differences, resolve, run_values
from server_app.curves import draw_curves
from server_app.progress import ProgressHook
from server_app.recorders import FailureHook, MetricsHook, TrafficHook
from server_app.run_directory import (
    RunDirectory,
    config_document,
    named,
    only_writer,
    open_run_directory,
    silos_document,
)
from server_app.summary import by_distribution, means, print_table, privacy_document, result_table
from strategies.base import FederatedStrategy
from strategies.registry import strategy_class
from strategies.roster import Roster, meet_sites
from strategies.state import RoundState, to_record


def run(grid: Grid, settings: RunSettings, launch: Mapping[str, Any] | None = None) -> RunDirectory:
    """Run ``settings`` over the sites of ``grid`` and return the run directory.

    Args:
        grid: Flower's grid or the in-process one.
        settings: what to run.
        launch: engine and resources, for config.toml, so that ``fedsilo resume`` takes the same.

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
    roster = meet_sites(grid, common)
    _say_who_is_missing(roster, common.silos, console)
    new = not common.resume
    with only_writer(directory, new), _nothing_left_of_nothing(directory, new):
        strategy, recorders = _assemble(settings, roster, directory, console)
        _write_beginning(directory, settings, roster, launch or {})
        met = time.monotonic()
        with closing(recorders.progress):
            strategy.start(
                grid,
                to_record(strategy.current().arrays),
                num_rounds=common.rounds,
                timeout=common.reply_timeout,
            )
        seconds = {"total": time.monotonic() - began, "rounds": time.monotonic() - met}
        _write_end(directory, settings, strategy, recorders, seconds)
    _show(directory, strategy, recorders, console)
    return directory


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
    progress: ProgressHook


def _say_who_is_missing(roster: Roster, silos: int, console: Console) -> None:
    absent = [site for site in silo_names(silos) if site not in roster.facts]
    if absent:
        console.print(
            f"{len(roster.facts)} of {silos} silos take part: {', '.join(roster.sites())}; "
            f"no SuperNode for {', '.join(absent)}",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )


def _assemble(
    settings: RunSettings, roster: Roster, directory: RunDirectory, console: Console
) -> tuple[FederatedStrategy, _Recorders]:
    """Build the strategy with its hooks, at its first state or at the newest checkpoint's."""
    common = settings.common
    cls = strategy_class(common.method)
    metrics = MetricsHook(directory)
    recorders = _Recorders(
        metrics,
        TrafficHook(directory),
        FailureHook(),
        ProgressHook(metrics, console, cls, f"{cls.title} on {common.dataset}, seed {common.seed}"),
    )
    recording = [recorders.metrics, recorders.traffic, recorders.failures]
    checkpoint = CheckpointHook(directory.checkpoints, settings.decisive(), recording)
    hooks = [*recording, checkpoint, recorders.progress]
    strategy = cls(common, settings.own, roster, hooks, str(directory.path))
    if common.resume:
        _refuse_other_data(directory, roster)
        strategy.state = checkpoint.resume()
    strategy.state = strategy.state or strategy.initial_state(roster.task())
    return strategy, recorders


def _refuse_other_config(directory: RunDirectory, settings: RunSettings) -> None:
    path = directory.path / "config.toml"
    if not path.is_file():
        return
    if other := differences(resolve(run_values(path)).decisive(), settings.decisive()):
        raise RunDirectoryError(
            f"{directory.path} holds a run of another config: {other}; resume with the same "
            "settings or choose another 'run-name'"
        )


def _refuse_other_data(directory: RunDirectory, roster: Roster) -> None:
    path = directory.path / "silos.json"
    if path.is_file() and directory.read_json("silos.json") != silos_document(roster):
        raise RunDirectoryError(
            f"the sites or their data are not those of {path}: resume with the same sites and "
            "data, or choose another 'run-name'"
        )


def _write_beginning(
    directory: RunDirectory, settings: RunSettings, roster: Roster, launch: Mapping[str, Any]
) -> None:
    """Write what is known before the first round; a resumed run keeps what stands there."""
    directory.write_json("silos.json", silos_document(roster))
    config = directory.path / "config.toml"
    if not config.is_file():
        write_atomically(config, config_document(settings, launch))


def _write_end(
    directory: RunDirectory,
    settings: RunSettings,
    strategy: FederatedStrategy,
    recorders: _Recorders,
    seconds: dict[str, float],
) -> None:
    """Write the model, privacy.json and, last, summary.json: its presence means a whole run."""
    state = strategy.current()
    method = settings.common.method
    if state.arrays:
        facts = {"method": method, "round": state.round, "extras": dict(state.extras)}
        save_state(directory.path / "model.safetensors", state.arrays, facts)
    privacy = privacy_document(method, strategy.leaves(), recorders.traffic.totals())
    directory.write_json("privacy.json", privacy)
    figures = _figures(strategy, state, recorders)
    cost = {
        "seconds": {
            **{name: round(value, 3) for name, value in seconds.items()},
            "sites": recorders.traffic.seconds(),
        },
        "peak-memory-bytes": recorders.traffic.peak_memory,
        "bytes": recorders.traffic.totals(),
    }
    directory.write_json("summary.json", {**figures, **cost, "privacy": privacy})
    draw_curves(directory)


def _figures(
    strategy: FederatedStrategy, state: RoundState, recorders: _Recorders
) -> dict[str, Any]:
    """Return what a run found: test figures, validation figures, and what happened on the way."""
    common = strategy.common
    distribution_of = _distribution_of(strategy)
    test = recorders.metrics.values(state.round, "test")
    val = recorders.metrics.values(state.round, "val")
    return {
        "method": common.method,
        "title": strategy.title,
        "dataset": common.dataset,
        "seed": common.seed,
        "rounds": state.round,
        "sites": test,
        "mean": means(test),
        "distributions": by_distribution(test, distribution_of),
        "validation": {"mean": means(val), "distributions": by_distribution(val, distribution_of)},
        "published": strategy.published() or None,
        "marks": strategy.marks(state),
        "failures": recorders.failures.failures,
    }


def _distribution_of(strategy: FederatedStrategy) -> dict[str, str]:
    return {site: facts.distribution for site, facts in strategy.roster.facts.items()}


def _show(
    directory: RunDirectory, strategy: FederatedStrategy, recorders: _Recorders, console: Console
) -> None:
    state = strategy.current()
    values = recorders.metrics.values(state.round, "test")
    common = strategy.common
    if why := strategy.why_finished(state):
        console.print(why, highlight=False, soft_wrap=True)
    title = f"{strategy.title} on {common.dataset}, round {state.round}, seed {common.seed}"
    published = strategy.published()
    print_table(console, result_table(values, _distribution_of(strategy), title, published))
    if published:
        console.print(
            "published: the paper's own numbers, measured in its own setting", highlight=False
        )
    console.print(f"run directory: {directory.path}", highlight=False, soft_wrap=True)
