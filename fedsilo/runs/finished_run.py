"""A finished run, read again: what it was told, what it found, and its model.

    run = FinishedRun.open(Path("runs/hearts"))
    run.settings["rounds"], run.summary["mean"], run.metrics
    run.shown().summary  # without what rests on too few patients
    run.model().module()  # a module from samples to probabilities

``fedsilo.load_run`` returns this class, and every command that reads a run opens it by this class.
``records.run_directory.RunDirectory`` writes the files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NewType

from fedsilo.core.arguments import (
    AnyPath,
    AnyRun,
    Plugins,
    folder_of,
    path_of,
    plugin_texts,
)
from fedsilo.core.errors import (
    DataError,
    RunDirectoryError,
    SettingError,
)
from fedsilo.core.one_line import as_word
from fedsilo.core.site_facts import SPLITS
from fedsilo.datasets.registry import data_set
from fedsilo.runs.published.published_numbers import Published, published_numbers
from fedsilo.runs.shown import Document, Floors, Row
from fedsilo.server_app.config.settings import (
    RunConfig,
    RunSettings,
    read_recorded,
    read_run_config,
    resolve_recorded,
)
from fedsilo.server_app.config.trusted_plugins import name_plugins
from fedsilo.server_app.records.run_directory import (
    CONFIG,
    MODEL,
    SILOS,
    SUMMARY,
    RunDirectory,
    refuse_links,
)

if TYPE_CHECKING:  # pandas and PyTorch take a second to import, and a report needs neither
    import pandas as pd

    from fedsilo.client_app.lab import Lab
    from fedsilo.runs.trained_model import TrainedModel

_SEED = re.compile(r"-(seed|split)\d+$")  # the end that `fedsilo compare` gives names


@dataclass(frozen=True)
class FinishedRun:
    """The directory of a run; each file is read once, at its first use.

    Whatever reads a file raises a ``RunDirectoryError`` that names it if it is missing, damaged or
    of another form.

    Attributes:
        path: the run directory.
        name: the name of the run; by default the folder's.
        experiment: the name that runs share if they differ only in their seed; by default the
            folder's without its seed.
        whole: of a view, the run that has everything; None for the run itself.
    """

    path: Path
    name: str = ""
    experiment: str = ""
    whole: FinishedRun | None = None

    def __post_init__(self) -> None:
        """Refuse links out of the directory, before any file is read."""
        refuse_links(self.path)
        if not self.name:
            folder = self.path.resolve().name
            object.__setattr__(self, "name", folder)
            object.__setattr__(self, "experiment", _SEED.sub("", folder))

    @classmethod
    def open(cls, path: Path) -> FinishedRun:
        """Open the finished run in a folder.

        Raises:
            RunDirectoryError: the folder does not exist or is a file, its run has not ended, or
                another version of fedsilo made it.
        """
        if path.is_file():
            raise RunDirectoryError(f"{path} is a file: name the run's directory")
        if not path.is_dir():
            raise RunDirectoryError(f"run directory {path} does not exist: name one that does")
        if not RunDirectory(path).has_ended():
            raise RunDirectoryError(
                f"the run in {path} has not ended: continue it by 'fedsilo resume {as_word(path)}'"
            )
        run = cls(path)
        if (path / CONFIG).is_file():
            _ = run.config  # refuses another format at once, before any file is used
        return run

    @cached_property
    def config(self) -> RunConfig:
        """The content of ``config.toml``: settings by key, engine, versions of the software."""
        config = read_run_config(self.path / CONFIG)
        # Decoded data are written to the cache, so a foreign run directory must not choose it
        return dataclasses.replace(config, settings=config.settings | {"data.cache-dir": ""})

    @cached_property
    def settings(self) -> RunSettings:
        """The settings of the run, also by key: ``settings["rounds"]``.

        They have this user's cache directory, and are not checked against each other.
        """
        try:
            return read_recorded(self.config.settings)
        except SettingError as error:
            raise RunDirectoryError(f"{self.path / CONFIG}: {error}") from None

    @cached_property
    def summary(self) -> Document:
        """``summary.json``: final metrics, seconds, bytes, failures (docs/run-directory.md)."""
        summary: Document = RunDirectory(self.path).read_json(SUMMARY)
        return summary

    @cached_property
    def paper(self) -> Published:
        """The numbers of the paper for a run in this setting, or why the paper has none."""
        return published_numbers(read_run_config(self.path / CONFIG).settings, self.silos)

    @cached_property
    def silos(self) -> Document:
        """``silos.json``: site -> its sizes, label counts, class names and fingerprints."""
        silos: Document = RunDirectory(self.path).read_json(SILOS)
        return silos

    @cached_property
    def metric_rows(self) -> list[Row]:
        """The rows of ``metrics.csv``, as text: round, site, split, metric, value."""
        return RunDirectory(self.path).read_csv("metrics.csv")

    @cached_property
    def traffic_rows(self) -> list[Row]:
        """The rows of ``traffic.csv``, as text; earlier versions counted no steps."""
        rows = RunDirectory(self.path).read_csv("traffic.csv")
        return [{"steps": "0", "samples": "0", **row} for row in rows]

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """``metrics.csv``: a row per number, ``round, site, split, metric, value``."""
        return _frame(self.metric_rows, "round,site,split,metric,value", value=float)

    @cached_property
    def traffic(self) -> pd.DataFrame:
        """``traffic.csv``: a row per message with its bytes, seconds, optimiser steps, samples."""
        numbers = {"bytes_down": int, "bytes_up": int, "seconds": float}
        numbers |= dict.fromkeys(("steps", "samples"), int)
        columns = f"round,phase,site,{','.join(numbers)}"
        return _frame(self.traffic_rows, columns, **numbers)

    @cached_property
    def sites(self) -> pd.DataFrame:
        """A row per site: ``site, distribution, train, val, test`` (samples) and ``dropped``."""
        import pandas as pd

        rows = []
        for site, facts in self.silos.items():
            row = {"site": site, "distribution": facts["distribution"], **facts["sizes"]}
            rows.append(row | {"dropped": facts["dropped"]})
        return pd.DataFrame(rows)

    def last_metrics(self, split: str) -> dict[str, dict[str, float]]:
        """Return the metrics of the last round: site -> metric -> value."""
        last = str(self.summary["rounds"])
        values: dict[str, dict[str, float]] = {}
        for row in self.metric_rows:
            if row["round"] == last and row["split"] == split:
                values.setdefault(row["site"], {})[row["metric"]] = float(row["value"])
        return values

    def chosen_sites(self, wanted: Sequence[str] = ()) -> list[str]:
        """Return the run's sites in its order, all or those in ``wanted``.

        Raises:
            SettingError: a wanted site is not in the run.
        """
        return chosen_of(list(self.silos), wanted, str(self.path))

    def class_names(self, site: str = "") -> list[str]:
        """Return the names of a site's classes, numbers where the data set has none.

        Without ``site`` they are those of the first.
        """
        facts = self.silos[site or next(iter(self.silos))]
        counts: Sequence[Any] = next(iter(facts["label_counts"].values()), [])
        return list(facts["classes"]) or [f"class {label}" for label in range(len(counts))]

    def noun(self, number: int) -> str:
        """Return the word for so many samples: a row of a table is a patient."""
        one = "patient" if data_set(str(self.summary["dataset"])).is_table else "image"
        return one if number == 1 else f"{one}s"

    @property
    def is_simulated(self) -> bool:
        """Whether its sites were simulated: a hospital says by which software it takes part."""
        return not any("software" in facts for facts in self.silos.values())

    @property
    def trust(self) -> str:
        """The level of trust that it was made for."""
        return str(self.summary["privacy"]["trust"]["level"])

    @property
    def floor(self) -> int:
        """The fewest patients that a shown metric may rest on."""
        return self.settings.common.sums_min_count

    @property
    def withheld(self) -> list[str]:
        """The sites of whose test samples some metric is not shown because of the floor."""
        hidden = self.floors.hidden_classes
        return [site for site in self.silos if hidden(site, "test") != frozenset()]

    @property
    def sent(self) -> list[Row]:
        """The rows of ``metrics.csv`` that the sites sent, whatever is shown of their values."""
        whole = self.whole or self
        return self.floors.sent_rows(whole.metric_rows)

    @cached_property
    def floors(self) -> Floors:
        """The rules of what may be shown."""
        last = {split: self.last_metrics(split) for split in SPLITS}
        return Floors(self.settings.common, self.silos, int(self.summary["rounds"]), last)

    def shown(self, name: str = "", experiment: str = "") -> Shown:
        """Return the run without the metrics and counts that no page may show, see ``shown.py``.

        The view is opened from the same values; ``name`` and ``experiment`` replace the run's own.
        """
        view = FinishedRun(self.path, name or self.name, experiment or self.experiment, whole=self)
        # The view's files are read already; what its properties would cache is put there
        vars(view).update(
            config=self.config,
            settings=self.settings,
            floors=self.floors,
            silos=self.floors.shown_silos(),
            metric_rows=self.floors.shown_rows(self.metric_rows),
            summary=self.floors.shown_summary(self.summary),
        )
        return Shown(view)

    def local_settings(self, data_dir: Path | None = None) -> RunSettings:
        """Return the settings by which data and networks are opened on this machine.

        ``data_dir`` replaces the run's data folder.

        Raises:
            RunDirectoryError: settings contradict each other.
        """
        try:
            settings = resolve_recorded(self.config.settings)
        except SettingError as error:
            raise RunDirectoryError(f"{self.path / CONFIG}: {error}") from None
        if not data_dir:
            return settings
        return RunSettings(
            dataclasses.replace(settings.common, data_dir=str(data_dir)), settings.own
        )

    def lab(
        self,
        site: str,
        data_dir: Path | None = None,
        state_dir: Path | None = None,
        best: bool = False,
        split: str = "",
    ) -> Lab:
        """Open a site as its method's ``Lab``, as in the last round; it can open the network.

        For the arguments see ``trained_site.open_site``.

        Raises:
            FedsiloError: no part of the model is on this machine, or the split has changed.
        """
        from fedsilo.runs.trained_site import open_site

        whole = self.whole or self
        rounds = int(whole.summary["rounds"])
        settings = self.local_settings(data_dir)
        return open_site(
            self.path, settings, whole.silos, rounds, site, state_dir, best=best, split=split
        )

    def model(
        self,
        site: str | None = None,
        *,
        data_dir: AnyPath | None = None,
        state_dir: AnyPath | None = None,
        best: bool = False,
    ) -> TrainedModel:
        """Return the final model, opened with the data of a site.

        Its ``network`` is an ``nn.Module`` in eval mode; it takes ``inputs(split)``, which are
        decoded and standardised samples. Its ``module()`` maps samples as they are read to class
        probabilities.

        Without ``site``, the first site whose data are on this machine is used, if all sites share
        one model. ``best`` selects the model of the best round ('server.early-stopping-metric').

        Raises:
            FedsiloError: the run has no such site; its model or data are not on this machine or
                have changed; or each site has a model of its own and none is named.
        """
        state = path_of(state_dir)
        if site is not None:
            (site,) = self.chosen_sites([site])
            return self._model_of(site, path_of(data_dir), state, best)
        if state is not None:
            raise SettingError(f"--state-dir {state} is one site's state: name the site by --site")
        shared = None
        if best or (self.path / MODEL).is_file():
            shared = self._model_of_first(path_of(data_dir), best)
        if shared is None or shared.own:
            raise SettingError(
                f"{self.path}: with method '{self.settings.common.method}' and these settings each "
                f"site has a model of its own: name one by --site ({', '.join(self.silos)})"
            )
        return shared

    def _model_of(
        self, site: str, data_dir: Path | None, state_dir: Path | None, best: bool
    ) -> TrainedModel:
        from fedsilo.runs.trained_model import open_model

        lab = self.lab(site, data_dir, state_dir, best)
        whole = self.whole or self
        return open_model(lab, self.path, str(whole.summary["title"]), whole.silos, best)

    def _model_of_first(self, data_dir: Path | None, best: bool) -> TrainedModel:
        """Open the model at the first site whose data are here, or raise the first site's error."""
        errors: list[DataError] = []
        for site in self.silos:
            try:
                return self._model_of(site, data_dir, None, best)
            except DataError as error:
                errors.append(error)
        raise errors[0]

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the final table, without what a page must not show."""
        from fedsilo.datasets.registry import DATA_SETS, data_set
        from fedsilo.pages.notebook import html_of_lines
        from fedsilo.server_app.records.summary import summary_lines

        shown = self.shown()
        name = shown.summary["dataset"]
        metrics = data_set(name).headline if name in DATA_SETS else _METRICS
        lines = [*summary_lines(shown.summary, shown.silos, metrics)]
        if shown.withheld:
            lines.append(
                f"Some metrics of {', '.join(shown.withheld)} are not shown, because they rest on "
                f"fewer than {shown.floor} patients, or would reveal a metric that does."
            )
        return html_of_lines([*lines, str(self.path)])

    def predictions(
        self,
        site: str | None = None,
        split: str = "test",
        *,
        data_dir: AnyPath | None = None,
        best: bool = False,
    ) -> pd.DataFrame:
        """Predict a split of a site, as ``fedsilo.predict`` does.

        Raises:
            FedsiloError: as ``model``, or the split is unknown or empty, or differs from the run's.
        """
        # By its public name, because this room must not import the rooms that use it
        public = import_module("fedsilo")
        found = public.predict(self, site=site, split=split, data_dir=data_dir, best=best)
        frame: pd.DataFrame = found.frame()
        return frame


# What a notebook shows of a run on a plugin's data set, whose code is not imported for that
_METRICS = ("accuracy", "balanced-accuracy", "auc", "loss")

# A run that went through ``FinishedRun.shown``: what writes a page asks for one by this type
Shown = NewType("Shown", FinishedRun)


def load_run(path: AnyRun, *, plugin: Plugins = None) -> FinishedRun:
    """Read a finished run; ``plugin`` are the reader's own copies of the run's plugins."""
    name_plugins(plugin_texts(plugin))
    return FinishedRun.open(folder_of(path))


def same_split(runs: Iterable[FinishedRun]) -> bool | None:
    """Tell whether all runs (one or more) used the same split; None if sites send no digests."""
    splits = []
    for run in runs:
        digests = {site: facts["fingerprints"] for site, facts in run.silos.items()}
        if not all(digests.values()):
            return None
        splits.append(digests)
    return all(split == splits[0] for split in splits)


def chosen_of(sites: list[str], wanted: Sequence[str], where: str) -> list[str]:
    """Return all sites, or only those in ``wanted``; SettingError if a wanted site is unknown.

    ``where`` names the run in the message.
    """
    for site in wanted:
        if site not in sites:
            raise SettingError(f"{where} has no site '{site}': choose one of {', '.join(sites)}")
    if not wanted:
        return sites
    return [site for site in sites if site in wanted]


def _frame(rows: list[Row], columns: str, **types: Any) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows, columns=columns.split(",")).astype({"round": int} | types)
