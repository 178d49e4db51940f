"""What the ``fedsilo`` command does, as functions: run, compare, read again, report, predict.

    from fedsilo.server_app.api import compare, load_run, simulate

    run = simulate("fedavg-digits", settings={"rounds": 5}, seed=1)
    run.metrics.query("split == 'test' and metric == 'accuracy'")

The command line and these functions call the same code and raise the same errors, each one line:
``fedsilo.models.contract.errors.FedsiloError`` and its kinds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.records.finished_run import FinishedRun, finished_run
from fedsilo.server_app.records.recorder import METRICS_HEADER, TRAFFIC_HEADER

if TYPE_CHECKING:
    from fedsilo.server_app.studies.compare.over_seeds import Comparison
    from fedsilo.server_app.studies.export.command import Export
    from fedsilo.server_app.studies.predict.calibration import Calibration
    from fedsilo.server_app.studies.predict.model import SiteModel

Engine = Literal["ray", "inline"]
Reader = Literal["research", "clinic", "dpo"]


@dataclass(frozen=True)
class Run:
    """A finished run; each file is read when it is first asked for."""

    finished: FinishedRun

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.finished.path

    @property
    def summary(self) -> Mapping[str, Any]:
        """``summary.json``: final figures, seconds, bytes, failures (docs/run-directory.md)."""
        return self.finished.summary

    @cached_property
    def settings(self) -> dict[str, Value]:
        """Every setting of the run, by its key."""
        return self.finished.settings.as_mapping()

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """``metrics.csv``: a row a figure, ``round, site, split, metric, value``."""
        frame = pd.DataFrame(self.finished.metrics, columns=list(METRICS_HEADER))
        return frame.astype({"round": int, "value": float})

    @cached_property
    def traffic(self) -> pd.DataFrame:
        """``traffic.csv``: a row a message, with ``bytes_down``, ``bytes_up`` and ``seconds``."""
        frame = pd.DataFrame(self.finished.traffic, columns=list(TRAFFIC_HEADER))
        return frame.astype({"round": int, "bytes_down": int, "bytes_up": int, "seconds": float})

    @cached_property
    def sites(self) -> pd.DataFrame:
        """A row a site: ``site, distribution, train, val, test`` (samples) and ``dropped``."""
        rows = [
            {
                "site": site,
                "distribution": facts["distribution"],
                **facts["sizes"],
                "dropped": facts["dropped"],
            }
            for site, facts in self.finished.silos.items()
        ]
        return pd.DataFrame(rows)

    def model(
        self,
        site: str | None = None,
        *,
        data_dir: Path | str | None = None,
        state_dir: Path | str | None = None,
    ) -> SiteModel:
        """Return the model as it ended, opened where the data of a site are.

        Its ``network`` is an ``nn.Module`` in eval mode that takes its ``inputs(split)``, samples
        decoded and standardised; its ``module()`` goes from samples as they are read to class
        probabilities.

        Args:
            site: the site's name; None: the first whose data are here, if all have one model.
            data_dir: the data directory; None: the run's own.
            state_dir: the site's private state; None: the run directory's.

        Raises:
            FedsiloError: there is no such site, or nothing of its model or data is here.
        """
        from fedsilo.server_app.studies.predict.model import open_model

        return open_model(self.path, site, _path(data_dir), _path(state_dir))

    def predictions(
        self, site: str | None = None, split: str = "test", *, data_dir: Path | str | None = None
    ) -> pd.DataFrame:
        """Return what the model answers for a split of a site, as ``predict`` does.

        Raises:
            FedsiloError: as ``model``, or the split is none, empty, or another than the run's.
        """
        return predict(self, site=site, split=split, data_dir=data_dir)


def load_run(path: Path | str) -> Run:
    """Read a finished run again.

    Raises:
        RunDirectoryError: there is no run, or it has not ended.
    """
    return Run(finished_run(Path(path)))


def simulate(
    experiment: str,
    *,
    settings: Mapping[str, Value] | None = None,
    config: Path | str | None = None,
    file: Path | str | None = None,
    out: Path | str | None = None,
    name: str | None = None,
    seed: int | None = None,
    engine: Engine = "inline",
    supernodes: int | None = None,
) -> Run:
    """Run an experiment of ``simulation.yaml``, as ``fedsilo simulate`` does, and return it.

    Args:
        experiment: its name.
        settings: settings over the experiment's, by key: ``{"rounds": 5, "uefl.gamma": 0.2}``.
        config: a TOML file of settings.
        file: the ``simulation.yaml``; None: the working folder's, else fedsilo's own.
        out: the folder of run directories; None: the settings' own, else ``runs``.
        name: of the run directory; None: made of method, data set, seed and time.
        seed: instead of the experiment's.
        engine: ``inline``: in this process; ``ray``: by ``flwr run``.
        supernodes: simulated sites; None: all silos.

    Raises:
        FedsiloError: a setting is wrong, the run directory exists, or the run failed.
    """
    from fedsilo.server_app.run.planning import RunSources, planned, start
    from fedsilo.server_app.studies.finish import finish_run

    own: dict[str, Value] = dict(settings or {})
    own |= {} if seed is None else {"seed": seed}
    own |= {"run-name": name} if name else {}
    sources = RunSources(file=_path(file), config=_path(config), out=_path(out))
    run_settings, resources = planned(experiment, sources, supernodes=supernodes, overrides=own)
    return load_run(start(run_settings, resources, engine, finish=finish_run).path)


def resume(run_dir: Path | str) -> Run:
    """Go on with a run that was cut short, by the engine that it began with, and return it.

    Raises:
        FedsiloError: there is no run, or it failed again.
    """
    from fedsilo.server_app.run.planning import replanned, start
    from fedsilo.server_app.studies.finish import finish_run

    settings, resources, engine = replanned(Path(run_dir))
    return load_run(start(settings, resources, engine, finish=finish_run).path)


def compare(
    experiments: Sequence[str],
    *,
    seeds: int = 3,
    settings: Mapping[str, Value] | None = None,
    config: Path | str | None = None,
    file: Path | str | None = None,
    out: Path | str | None = None,
    metrics: Sequence[str] = (),
    tests: Sequence[str] = (),
    paired: bool = False,
    split: str = "test",
    own_splits: bool = False,
    jobs: int = 0,
) -> Comparison:
    """Run what is missing of experiments over seeds, as ``fedsilo compare`` does.

    Its ``results`` are a frame of a row per experiment, group, metric and seed, its ``tested`` the
    tests. Runs lie in ``<out>/<experiment>-seed<n>``.

    Args:
        experiments: their names.
        seeds: seeds 0 to ``seeds - 1``.
        settings: settings over those of each experiment, by key.
        config: a TOML file of settings.
        file: the ``simulation.yaml``; None: the working folder's, else fedsilo's own.
        out: the folder of run directories; None: the settings' own, else ``runs``.
        metrics: names or patterns; none: the data set's headline.
        tests: metrics of which to test whether experiments differ.
        paired: whether those tests are of the differences by seed.
        split: ``test`` or ``val``.
        own_splits: whether each seed draws a split of its own.
        jobs: runs at once; 0: one a core.

    Raises:
        FedsiloError: a setting is wrong, or a run failed; finished runs stay and are used again.
    """
    from fedsilo.server_app.run.planning import RunSources
    from fedsilo.server_app.studies.compare.over_seeds import ComparisonOptions, SeedRuns
    from fedsilo.server_app.studies.compare.over_seeds import compare as compared

    changes = tuple(f"{key}={json.dumps(value)}" for key, value in (settings or {}).items())
    sources = RunSources(file=_path(file), config=_path(config), changes=changes, out=_path(out))
    asked = ComparisonOptions(
        split=split,
        metrics=",".join(metrics) or None,
        tests=",".join(tests) or None,
        paired=paired,
    )
    return compared(
        experiments, SeedRuns(sources=sources, seeds=seeds, own_splits=own_splits), asked, jobs=jobs
    )


def report(
    runs: Sequence[Run | Path | str],
    out: Path | str,
    *,
    reader: Reader = "research",
    audit_log: Path | str | None = None,
    site_file: Path | str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a page about finished runs, as ``fedsilo report`` does; return its place.

    Args:
        runs: runs, run directories, or folders of such.
        out: the HTML file.
        reader: for whom it is.
        audit_log: of ``dpo``: a hospital's own audit log.
        site_file: of ``dpo``: a hospital's own site file.
        overwrite: whether a file that is there goes.

    Raises:
        FedsiloError: the file exists, or a run or a file cannot be used.
    """
    from fedsilo.server_app.studies.report.report import ReportOptions, write_report

    asked = ReportOptions(reader=reader, audit_log=_path(audit_log), site_file=_path(site_file))
    return write_report([_folder(run) for run in runs], Path(out), asked, overwrite=overwrite)


def predict(
    run: Run | Path | str,
    *,
    site: str | None = None,
    images: Path | str | None = None,
    manifest: Path | str | None = None,
    table: Path | str | None = None,
    split: str | None = None,
    out: Path | str | None = None,
    coverage: float | None = None,
    calibration: Path | str | None = None,
    data_dir: Path | str | None = None,
    state_dir: Path | str | None = None,
) -> pd.DataFrame:
    """Predict new cases with a finished run's model, as ``fedsilo predict`` does.

    Args are those of ``predict.request.PredictRequest``: one of ``images``,
    ``manifest``, ``table`` and ``split`` is given; ``out`` is written too, if it is named.

    Returns:
        The rows of the CSV file: ``predicted``, ``p.<class>``, ``entropy`` and so on.

    Raises:
        FedsiloError: the model or the inputs cannot be opened, or the output is there already.
    """
    from fedsilo.server_app.studies.predict.prediction import predict as predicted
    from fedsilo.server_app.studies.predict.request import PredictRequest

    request = PredictRequest(
        run_dir=_folder(run),
        site=site,
        images=_path(images),
        manifest=_path(manifest),
        table=_path(table),
        split=split,
        out=_path(out),
        coverage=coverage,
        calibration=_path(calibration),
        data_dir=_path(data_dir),
        state_dir=_path(state_dir),
    )
    return predicted(request).frame()


def calibrate(
    run: Run | Path | str,
    site: str,
    *,
    coverage: float = 0.9,
    out: Path | str | None = None,
    data_dir: Path | str | None = None,
    state_dir: Path | str | None = None,
) -> Calibration:
    """Calibrate a finished run's model at a site, as ``fedsilo calibrate`` does.

    Raises:
        FedsiloError: the model cannot be opened, or the site has too few validation rows.
    """
    from fedsilo.server_app.studies.predict.calibration import calibrate as calibrated

    folders = (_path(out), _path(data_dir), _path(state_dir))
    return calibrated(_folder(run), site, coverage, *folders)


def export(
    run: Run | Path | str,
    form: str = "pt2",
    *,
    site: str | None = None,
    out: Path | str | None = None,
    data_dir: Path | str | None = None,
    state_dir: Path | str | None = None,
) -> Export:
    """Write a finished run's model as a program of its own, as ``fedsilo export`` does.

    Raises:
        FedsiloError: the model cannot be opened or written in this form, the program answers
            otherwise, or the folder is there already.
    """
    from fedsilo.server_app.studies.export.command import export as exported

    folders = (_path(out), _path(data_dir), _path(state_dir))
    return exported(_folder(run), form, site, *folders)


def card(run: Run | Path | str, *, site: str | None = None, out: Path | str | None = None) -> str:
    """Return the model card of a finished run, as ``fedsilo card`` writes it.

    Raises:
        FedsiloError: the run has not ended, there is no such site, or the file is there already.
    """
    from fedsilo.server_app.studies.export.card import card as written

    return written(_folder(run), site, _path(out))


def _folder(run: Run | Path | str) -> Path:
    return run.path if isinstance(run, Run) else Path(run)


def _path(given: Path | str | None) -> Path | None:
    return None if given is None else Path(given)
