"""Plans and runs the runs of a comparison, one for each experiment and seed.

A run is in ``<out>/<experiment>-seed<n>``. A finished run with the same settings is used again, and
an interrupted run is resumed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsilo.comparison.slurm import Jobs
from fedsilo.comparison.trials import Failure, make_pool, run_missing, runs_at_once
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import DataError, FedsiloError, RunDirectoryError, RunFailedError
from fedsilo.core.files.locations import find_places
from fedsilo.core.one_line import format_count
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import load_silo
from fedsilo.engines.planning import plan_run, start
from fedsilo.pictures.learning_curves import draw_pictures
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.settings import RunSettings, differences, resolve
from fedsilo.server_app.records.run_directory import CONFIG, RunDirectory, runs_folder


@dataclass(frozen=True)
class Job:
    """A planned run of an experiment with one seed, with the resources of its sites."""

    experiment: str
    settings: RunSettings
    resources: Mapping[str, Value]
    engine: str = "inline"

    @property
    def sites(self) -> int:
        """The number of sites that the run simulates."""
        return int(self.resources["num-supernodes"])

    @property
    def directory(self) -> FinishedRun:
        """The run's directory, which may not exist yet."""
        common = self.settings.common
        return FinishedRun(runs_folder(common.out) / common.run_name)

    def is_finished(self) -> bool:
        """Tell whether the job's run has ended already, so that it need not run again.

        The result is False if its directory has no run yet, or a run that has not ended.

        Raises:
            RunDirectoryError: the directory has another run than this job's, whether or not it has
                ended. Its settings, number of sites or data differ, or the data cannot be read.
        """
        run = self.directory
        if not (run.path / CONFIG).is_file():
            return False
        # A run with other data would show other numbers under this experiment's name
        other = self._other_settings(run) or self._other_data(run.silos)
        if other:
            raise RunDirectoryError(
                f"the run in {run.path} cannot be used again: {other}; choose another --out, or "
                "remove that run"
            )
        return RunDirectory(run.path).has_ended()

    def _other_settings(self, run: FinishedRun) -> str:
        """Describe the differences in settings or number of sites from ``run``; empty if none."""
        if len(run.silos) != self.sites:
            return f"{len(run.silos)} sites took part, but {self.sites} are wanted"
        return differences(run.settings.decisive(), self.settings.decisive())

    def _other_data(self, silos: Mapping[str, Any]) -> str:
        """Describe in a phrase how the sites' data have changed since a run.

        Args:
            silos: the run's ``silos.json``, with each site's fingerprints (hashes of the rows) and
                schema. A site without fingerprints is compared only by schema.

        Returns:
            A phrase with the names of the changed sites. If the data cannot be read, the phrase has
            the error instead. The text is empty if nothing has changed. It is also empty if this
            machine has no data folder, because nothing can be compared then.
        """
        common = self.settings.common
        try:
            today = [load_silo(site, common) for site in silos]
        except DataError as error:
            folder = find_places(common.data_dir, common.cache_dir).data
            if folder is None or not folder.is_dir():
                return ""
            return f"its data cannot be read now ({error})"
        changed = []
        for silo in today:
            before = silos[silo.name]
            # A hospital at trust 'sums' or 'nobody' sent no fingerprints
            same_rows = before["fingerprints"] in ({}, silo.fingerprints)
            if not same_rows or before.get("schema", "") != silo.schema:
                changed.append(silo.name)
        if not changed:
            return ""
        return f"the data of {', '.join(changed)} have changed"


def plan_job(
    experiment: str,
    seed: int,
    sources: RunSources,
    engine: str,
    supernodes: int | None,
    own_splits: bool,
) -> Job:
    """Plan an experiment's run with one seed: its settings and the resources of its sites.

    Nothing is run here. The name of the run is ``<experiment>-seed<seed>``, and decides its
    directory.

    Args:
        experiment: the experiment's name.
        seed: the seed of the run.
        sources: where the settings come from, such as files and single changes.
        engine: the engine that shall run the job.
        supernodes: the number of simulated sites. None for the experiment's number or, without one,
            for all silos.
        own_splits: whether the seed also shuffles the rows into splits. The run's name then has
            "split" in place of "seed".

    Raises:
        SettingError: a setting is wrong.
    """
    overrides: dict[str, Value] = {"seed": seed, "run.name": f"{experiment}-seed{seed}"}
    if own_splits:
        # Another name, because otherwise a run with the common split would be used in its place
        overrides |= {"split.fold-seed": seed, "run.name": f"{experiment}-split{seed}"}
    settings, resources = plan_run(experiment, sources, supernodes=supernodes, overrides=overrides)
    return Job(experiment, settings, resources, engine)


def runs_of(jobs: Sequence[Job]) -> dict[str, list[FinishedRun]]:
    """Group the runs of ``jobs`` by experiment.

    Whether the directory of a run exists is not checked.

    Returns:
        Experiment -> its runs. Experiments and runs keep the order of ``jobs``. A run is a
        ``FinishedRun`` of the job's directory, whose files are read only when they are used.
    """
    runs: dict[str, list[FinishedRun]] = {}
    for job in jobs:
        runs.setdefault(job.experiment, []).append(job.directory)
    return runs


@dataclass(frozen=True)
class _Work:
    """One run for a worker process: its settings by key, its resources and its engine."""

    values: Mapping[str, Value]
    resources: Mapping[str, Value]
    engine: str


def run_all(jobs: Sequence[Job], at_once: Jobs, tell: Callable[[str], None]) -> None:
    """Run or resume all jobs, several at once, each in a new process or as a Slurm job.

    Pictures are drawn after each run. Without jobs, nothing is done.

    Args:
        jobs: the planned runs that have not finished yet.
        at_once: the number of runs at once, or 0 for as many as the cores allow. For runs on a
            cluster, the parameters of Slurm.
        tell: is called with a line about the number of runs, then with one for each finished run.

    Raises:
        RunFailedError: a run failed. Runs that had not started by then are not started.
    """
    if not jobs:
        return
    # The cluster decides how many of its jobs run at once
    workers, width = 0, "with Slurm"
    if isinstance(at_once, int):
        workers = runs_at_once(at_once, max(job.settings.common.threads for job in jobs))
        width = f"{workers} at once"
    tell(f"{format_count(len(jobs), 'run')}, {width}")
    ended: list[str] = []

    def report_end(work: _Work, failure: Failure | None) -> None:
        name = str(work.values["run.name"])
        if failure:
            raise RunFailedError(f"{name} failed: {failure.text}")
        ended.append(name)
        tell(f"{len(ended)}/{len(jobs)} {name}")

    # A new process for each run, because a run leaves memory and caches behind
    with make_pool(at_once, jobs[0].directory.path.parent, workers, runs_per_worker=1) as pool:
        run_missing(pool, _run_or_resume, [_work_of(job) for job in jobs], report_end)


def _run_or_resume(work: _Work) -> Failure | None:
    """Run or resume one run, and draw its pictures.

    Returns:
        None if the run succeeded; otherwise its error's code and text.
    """
    try:
        # The settings travel by key, because a plugin's class is unknown in a new process
        directory = start(resolve(work.values), work.resources, work.engine)
    except FedsiloError as error:
        return Failure(error.code, str(error))
    draw_pictures(directory, print)
    return None


def _work_of(job: Job) -> _Work:
    """Collect all that a worker process needs to run a job: settings by key, resources and engine.

    If the run's directory already exists, the setting 'run.resume' is True, so the run is resumed.
    """
    values = job.settings.as_mapping() | {"run.resume": job.directory.path.is_dir()}
    return _Work(values, job.resources, job.engine)
