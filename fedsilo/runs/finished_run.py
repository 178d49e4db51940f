"""A finished run, read again: its settings, its results, and its model.

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

from fedsilo.core.arguments import AnyPath, AnyRun, Plugins, folder_of, path_of, plugin_texts
from fedsilo.core.errors import RunDirectoryError, SettingError
from fedsilo.core.one_line import as_word
from fedsilo.core.site_facts import SPLITS
from fedsilo.core.tasks import CLASSIFICATION, SEGMENTATION, TASKS
from fedsilo.datasets.registry import data_set
from fedsilo.models.tasks.task import task_named
from fedsilo.runs.run_files import RunFiles
from fedsilo.server_app.config.settings import (
    RunSettings,
    resolve_recorded,
)
from fedsilo.server_app.config.trusted_plugins import name_plugins
from fedsilo.server_app.records.run_directory import (
    CONFIG,
    MODEL,
    RunDirectory,
    refuse_links,
)
from fedsilo.server_app.records.shown import Floors, Row

# pandas and PyTorch take a second to import, and a report needs neither
if TYPE_CHECKING:
    import pandas as pd

    from fedsilo.client_app.lab import Lab
    from fedsilo.runs.trained_model import TrainedModel

_SEED = re.compile(r"-(seed|split)\d+$")  # the end that `fedsilo compare` gives names


@dataclass(frozen=True)
class FinishedRun(RunFiles):
    """A run that has ended: its files, its results that may be shown, and its model.

    Attributes:
        path: the run directory.
        name: the name of the run; by default the folder's name.
        experiment: the name that runs share if they differ only in their seed; by default the
            folder's name without its end ``-seed<n>`` or ``-split<n>``.
        whole: for a view from ``shown``, the run with all metrics; None for the run itself.
    """

    name: str = ""
    experiment: str = ""
    whole: FinishedRun | None = None

    def __post_init__(self) -> None:
        """Refuse symbolic links out of the directory, and set default names if ``name`` is empty.

        Given names stay unchanged, even an empty ``experiment``.
        """
        refuse_links(self.path)
        if not self.name:
            # A frozen dataclass refuses assignments; this is its only way to fill its own fields
            folder = self.path.resolve().name
            object.__setattr__(self, "name", folder)
            object.__setattr__(self, "experiment", _SEED.sub("", folder))

    @classmethod
    def open(cls, path: Path) -> FinishedRun:
        """Open the finished run in the folder ``path``.

        Raises:
            RunDirectoryError: ``path`` is not a folder, the run in it has not ended, or another
                version of fedsilo made the run.
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
            _ = run.config  # raises the error about another format before any file is used
        return run

    def chosen_sites(self, wanted: Sequence[str] = ()) -> list[str]:
        """Return the ``wanted`` sites in the run's order. If ``wanted`` is empty, return all sites.

        Raises:
            SettingError: a wanted site is not in the run.
        """
        return select_sites(list(self.silos), wanted, str(self.path))

    @property
    def task(self) -> str:
        """The name of the run's task. The files of a classification run do not name it."""
        return str(self.summary.get("task", CLASSIFICATION))

    def stratum_names(self, site: str = "") -> list[str]:
        """Return the names of the groups in which a run counts the samples of ``site``.

        Usually these groups are the classes, named as by ``class_names``. For survival, they are
        the censored patients and those with the event. For a task that only counts all samples
        together, there are no groups, and the list is empty. An empty ``site`` stands for the run's
        first site.
        """
        if TASKS[self.task].strata == 1:
            return []
        names = self.class_names(site)
        if TASKS[self.task].strata == 0 or not names:
            return names
        return task_named(self.task).stratum_names(names)

    def class_names(self, site: str = "") -> list[str]:
        """Return the names of the classes at ``site``, by default the run's first site.

        If the site sent only counts of its classes and no names, the names are ``class 0``, ``class
        1`` and so on. If it sent neither, the list is empty.
        """
        facts = self.silos[site or next(iter(self.silos))]
        if facts["classes"]:
            return list(facts["classes"])
        # Any split will do, because each has one count per class
        counts: Sequence[Any] = next(iter(facts["label_counts"].values()), [])
        return [f"class {label}" for label in range(len(counts))]

    def noun(self, number: int) -> str:
        """Return the noun for a number of samples: "patients" for a table, otherwise "images".

        If ``number`` is 1, the noun is "patient" or "image".
        """
        word = "image"
        if data_set(str(self.summary["dataset"])).is_table:
            word = "patient"
        if number == 1:
            return word
        return f"{word}s"

    def require_classes(self, command: str) -> None:
        """Check that the run's task is classification, so that it predicts class probabilities.

        Args:
            command: the command that needs class probabilities, for the error, such as 'calibrate'.

        Raises:
            SettingError: the run has another task. The message says what the run predicts.
        """
        if self.summary.get("task") == SEGMENTATION:
            raise SettingError(
                f"'{command}' is for one answer per patient, but the run in {self.path} predicts "
                "masks: 'fedsilo overlays' draws them, 'fedsilo predict' writes them"
            )
        if self.task != CLASSIFICATION:
            raise SettingError(
                f"'{command}' is for class probabilities, but the run in {self.path} predicts "
                f"{task_named(self.task).describe(self.class_names())}: 'fedsilo predict' and "
                "'fedsilo report' suit it"
            )

    @property
    def is_simulated(self) -> bool:
        """Whether the run was simulated: no site reported its software, as real hospitals do."""
        return not any("software" in facts for facts in self.silos.values())

    @property
    def trust(self) -> str:
        """The run's level of trust, 'privacy.trust'."""
        return str(self.summary["privacy"]["trust"]["level"])

    @property
    def floor(self) -> int:
        """The fewest patients that a shown metric may rest on."""
        return self.settings.common.sums_min_count

    @property
    def withheld(self) -> list[str]:
        """Return the sites with a hidden test count, in the run's order.

        A count is hidden if it has too few samples, or if it would reveal such a count. A site
        whose whole test split is too small is included. A site that sent no counts is not.
        """
        withheld = []
        for site in self.silos:
            # None means that the whole split is too small, so it counts as hidden too
            if self.floors.hidden_classes(site, "test") != frozenset():
                withheld.append(site)
        return withheld

    @property
    def sent(self) -> list[Row]:
        """The rows of ``metrics.csv`` that the sites sent, including rows that are not shown."""
        whole = self.whole or self
        return self.floors.sent_rows(whole.metric_rows)

    @cached_property
    def floors(self) -> Floors:
        """The rules that decide which metrics and counts may be shown."""
        last = {split: self.last_metrics(split) for split in SPLITS}
        return Floors(self.settings.common, self.silos, int(self.summary["rounds"]), last)

    def shown(self, name: str = "", experiment: str = "") -> Shown:
        """Return a view of the run without the metrics and counts that no page may show.

        Numbers are hidden if they rest on too few patients, or if they would reveal such a number.
        The run itself is not changed.

        Args:
            name: the name of the run in the view. If empty, it is the run's own.
            experiment: the name of the experiment in the view. If empty, it is the run's own.
        """
        view = FinishedRun(self.path, name or self.name, experiment or self.experiment, whole=self)
        # Filling the caches of the view's properties keeps it from reading the whole files again
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
        """Return the run's recorded settings, checked for use on this machine.

        ``data_dir`` replaces the recorded data folder. If it is None, the recorded folder stays.

        Raises:
            RunDirectoryError: the recorded settings are invalid or contradict each other.
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
        """Open a site with its data and the run's model, as they were after the last round.

        The result is a ``Lab``. It holds the site's data and the evaluation message from which the
        run's method opens the network.

        Args:
            site: the site's name.
            data_dir: replaces the run's data folder. None keeps it.
            state_dir: the folder of the site's private state. None means the state in the run
                directory.
            best: whether to open the model of the best round instead of that of the last.
            split: a split whose samples must not have changed since the run. If empty, no split is
                checked.

        Raises:
            FedsiloError: the model is not on this machine, or the schema of the data, the samples
                of ``split`` or the weights of a pretrained ViT differ from those in the run.
        """
        from fedsilo.runs.trained_site import open_site

        # A view lacks the hidden counts, which are needed to open a site
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
        """Open a trained model of the run, together with the data of one site.

        The result's ``network`` is an ``nn.Module`` in eval mode. Its inputs are decoded and
        standardised samples, which the result's ``inputs(split)`` returns. For samples that are not
        standardised, the result's ``module()`` returns another ``nn.Module``, which standardises
        them and computes the task's predictions.

        Args:
            site: the site's name. None means the first site whose data are on this machine, and is
                only allowed if all sites share one model.
            data_dir: the folder of the data files. None means the run's own.
            state_dir: the folder of the site's private state, only allowed with ``site``. None
                means the state in the run directory.
            best: whether to open the model of the best round ('server.early-stopping-metric')
                instead of that of the last.

        Raises:
            FedsiloError: the run does not have the site, the model or the data are missing or have
                changed, or ``site`` is None although it is needed.
        """
        from fedsilo.runs.trained_model import open_at_first_site, open_model

        def open_at(name: str) -> TrainedModel:
            lab = self.lab(name, path_of(data_dir), path_of(state_dir), best)
            whole = self.whole or self
            return open_model(lab, self.path, str(whole.summary["title"]), whole.silos, best)

        if site is not None:
            (site,) = self.chosen_sites([site])
            return open_at(site)
        if state_dir is not None:
            raise SettingError(
                f"--state-dir {path_of(state_dir)} is one site's state: name the site by --site"
            )
        model = None
        # Without a model file each site has its own model, so no site need be opened to know
        # it
        if best or (self.path / MODEL).is_file():
            model = open_at_first_site(self.silos, open_at)
        if model is None or model.own:
            raise SettingError(
                f"{self.path}: with method '{self.settings.common.method}' and these settings each "
                f"site has a model of its own: name one by --site ({', '.join(self.silos)})"
            )
        return model

    def _repr_html_(self) -> str:
        """Build the HTML of the final table for a notebook, from the view of ``shown``."""
        from fedsilo.runs.final_table import final_table

        run = self.shown()
        return final_table(run.path, run.summary, run.silos, run.withheld, run.floor)

    def predictions(
        self,
        site: str | None = None,
        split: str = "test",
        *,
        data_dir: AnyPath | None = None,
        best: bool = False,
    ) -> pd.DataFrame:
        """Predict the samples of a site's split: a data frame with one row per sample.

        The result is that of ``fedsilo.predict(...).frame()`` with the same arguments.

        Raises:
            FedsiloError: the model cannot be opened (see ``model``), the split is unknown or empty,
                or its samples differ from those of the run.
        """
        # Through the public name, because this room must not import the rooms that use it
        public = import_module("fedsilo")
        predictions = public.predict(self, site=site, split=split, data_dir=data_dir, best=best)
        frame: pd.DataFrame = predictions.frame()
        return frame


# A run that went through ``FinishedRun.shown``. Functions that write a page ask for this type, so
# mypy refuses a run with hidden metrics.
Shown = NewType("Shown", FinishedRun)


def load_run(path: AnyRun, *, plugin: Plugins = None) -> FinishedRun:
    """Open a finished run, given by its directory or by a run object.

    Args:
        path: the run directory, or a run object that has one. The files are always read from the
            directory.
        plugin: the user's own copies of the plugins (Python files or modules) that the run needs.
            These copies are trusted for the rest of this process. None for no plugin.

    Raises:
        SettingError: a file of a plugin does not exist.
        RunDirectoryError: the directory has no finished run of this version of fedsilo.
    """
    name_plugins(plugin_texts(plugin))
    return FinishedRun.open(folder_of(path))


def same_split(runs: Iterable[FinishedRun]) -> bool | None:
    """Tell whether all runs have the same sites with the same samples in each split.

    Samples are compared by the digests (hashes of the samples in their order) that each site sent
    for its splits. If a site in any run did not send digests, the result is None. ``runs`` must not
    be empty.
    """
    splits = []
    for run in runs:
        digests = {site: facts["fingerprints"] for site, facts in run.silos.items()}
        if not all(digests.values()):
            return None
        splits.append(digests)
    return all(split == splits[0] for split in splits)


def select_sites(sites: list[str], wanted: Sequence[str], where: str) -> list[str]:
    """Return the ``wanted`` names among ``sites``, in the order of ``sites``.

    If ``wanted`` is empty, all sites are returned. ``where`` is the name of the run or data set in
    the error message.

    Raises:
        SettingError: a wanted site is unknown.
    """
    for site in wanted:
        if site not in sites:
            raise SettingError(f"{where} has no site '{site}': choose one of {', '.join(sites)}")
    if not wanted:
        return sites
    return [site for site in sites if site in wanted]
