"""A finished run's model, opened for use: network, preprocessing, classes, settings."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.training.evaluation import Measured, Probe, predict_batches
from fedsilo.datasets.io.state_files import state_digest
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.contract.errors import (
    CheckpointError,
    DataError,
    RunDirectoryError,
    SettingError,
)
from fedsilo.models.contract.messages import INCOMING
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.probability_model import PixelStatistics, ProbabilityModel
from fedsilo.models.networks.site_network import SiteNetwork, evidences
from fedsilo.server_app.records.run_directory import MODEL
from fedsilo.server_app.studies.finished_run import FinishedRun, finished_run
from fedsilo.server_app.studies.finished_site import (
    check_same_samples,
    finished_site,
    sites_of,
)


@dataclass(frozen=True)
class SiteModel:
    """A site's model after a finished run."""

    run: FinishedRun
    lab: Lab  # the site's lab of the run's method, after the last round
    measured: Measured  # the measured network in eval mode, on the device
    own: bool  # True if it is this site's alone; else every site has the same

    @property
    def network(self) -> SiteNetwork:
        """The network, in eval mode, on the device."""
        return self.measured.network

    @property
    def site(self) -> str:
        """The site's name."""
        return self.silo.name

    @property
    def silo(self) -> Silo:
        """The site's data, a table's features standardised."""
        return self.lab.silo

    @property
    def common(self) -> CommonSettings:
        """The run's settings, with this machine's data directory."""
        return self.lab.common

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, or their numbers if they have none."""
        return self.silo.class_names()

    def inputs(self, split: str = "test") -> Tensor:
        """Return a split's samples as the network takes them: (n, *input_shape) float32."""
        inputs: Tensor = float_inputs(self.samples(split).inputs)
        return inputs

    def samples(self, split: str) -> Split:
        """Return the samples of a split, or raise a SettingError if there is no such split."""
        splits = self.silo.splits()
        if split not in splits:
            raise SettingError(f"there is no split '{split}': it is one of {', '.join(splits)}")
        return splits[split]

    def probabilities(
        self, batches: Iterable[Tensor], split: str, probe: Probe | None = None
    ) -> Tensor:
        """Return class probabilities (n, classes) as the run's final evaluation of a split does."""
        lab = self.lab
        key = (lab.instruction.round, self.site, INCOMING, split)  # of the dropout samples
        return predict_batches(self.network, batches, lab.sampling, lab.compute, key, probe)

    def pixel_figures(self) -> PixelStatistics | None:
        """Return mean and scale by which pixels are standardised, or None if they are not."""
        return data_set(self.common.dataset).pixel_figures(self.common)

    def module(self) -> ProbabilityModel:
        """Return a module from samples as they are read to class probabilities, without dropout.

        It shares the network's weights and device.
        """
        module = ProbabilityModel(self.network, self.silo.figures, self.pixel_figures())
        return module.to(self.lab.compute.device)

    def weights_digest(self) -> str:
        """Return a SHA-256 of all that decides its answers: weights, priors, standardisation."""
        arrays = {n: array.cpu().numpy() for n, array in self.network.state_dict().items()}
        for number, evidence in enumerate(evidences(self.network)):
            arrays[f"prior.{number}"] = evidence.prior.cpu().numpy()
        if figures := self.silo.figures:
            arrays |= {"figures.mean": figures.mean, "figures.std": figures.std}
        return state_digest(arrays, {})


def open_model(
    run_dir: Path,
    site: str | None = None,
    data_dir: Path | None = None,
    state_dir: Path | None = None,
    best: bool = False,
) -> SiteModel:
    """Return the model of a finished run; a site's data must be on this machine.

    Without ``site`` it is that of all sites, opened at the first whose data are here. For the
    folders and ``best`` see ``finished_site``.

    Raises:
        FedsiloError: the run has not ended; its weights or the site's data are missing or have
            changed; or each site has a model of its own and none is named.
    """
    if run_dir.is_file():
        raise RunDirectoryError(f"{run_dir} is a file: name the run's directory")
    run = finished_run(run_dir)
    if site is not None:
        return _open_lab(run, sites_of(run_dir, [site])[0], data_dir, state_dir, best)
    if state_dir is not None:
        raise SettingError(f"--state-dir {state_dir} is one site's state: name the site by --site")
    shared = best or (run_dir / MODEL).is_file()
    model = _at_first_site(run, data_dir, best) if shared else None
    if model is None or model.own:
        raise SettingError(
            f"{run.path}: with method '{run.settings.common.method}' and these settings each site "
            f"has a model of its own: name one by --site ({', '.join(sites_of(run.path))})"
        )
    return model


def _at_first_site(run: FinishedRun, data_dir: Path | None, best: bool) -> SiteModel:
    """Return the model at the first site whose data are here, or raise the first site's error."""
    errors: list[DataError] = []
    for site in sites_of(run.path):
        try:
            return _open_lab(run, site, data_dir, None, best)
        except DataError as error:
            errors.append(error)
    raise errors[0]


def _open_lab(
    run: FinishedRun, site: str, data_dir: Path | None, state_dir: Path | None, best: bool
) -> SiteModel:
    lab = finished_site(run.path, site, data_dir, state_dir, best)
    try:
        network = lab.open()
    except CheckpointError as error:
        if not best:
            raise
        raise SettingError(
            f"{run.path}: site {site} has a part of the model for itself, and that of the best "
            f"round is gone, as sites keep the newest two ({error}); go without --best"
        ) from None
    measured = next(iter(lab.session.method.measured(lab, network)))
    measured.network.eval()
    own = (
        "stored" in vars(lab)  # the site's own state was read
        or bool(evidences(measured.network))  # whose prior is the site's
        or (lab.silo.figures is not None and lab.common.standardise == "site")
    )
    return SiteModel(run, lab, measured, own)


def refuse_other_rows(model: SiteModel, split: str) -> None:
    """Refuse a split that is no longer the run's.

    Raises:
        DataError: a sample was changed, added or left out since.
    """
    model.samples(split)
    check_same_samples(model.run, model.silo, split)


def refuse_table_or_images(model: SiteModel, table: bool) -> None:
    """Raise a DataError for rows of a table with a model of images, and the reverse."""
    if bool(model.silo.features) == table:
        return
    fits = "is images: give files by --images" if table else "is a table: give rows by --table"
    raise DataError(f"data set '{model.common.dataset}' {fits}")
