"""A finished run's model as one opens it to use it: network, preprocessing, classes, settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedsilo.client_app.lab import Lab, Measured
from fedsilo.datasets.io.state_files import state_digest
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.contract.errors import DataError, RunDirectoryError, SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.maths.dirichlet import evidences
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.probability_model import PixelFigures, ProbabilityModel
from fedsilo.models.networks.site_network import SiteNetwork
from fedsilo.server_app.records.finished_run import FinishedRun, finished_run
from fedsilo.server_app.records.finished_site import finished_site, sites_of


@dataclass(frozen=True)
class SiteModel:
    """The model that a finished run left a site with.

    Attributes:
        run: the run.
        lab: what the run's method has at hand at the site, after the last round.
        measured: what the run's final figures were measured of, in eval mode, on the device.
        own: whether it is this site's alone; else every site has the same.
    """

    run: FinishedRun
    lab: Lab
    measured: Measured
    own: bool

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
        """The run's settings, the data where they lie now."""
        return self.lab.common

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, their numbers where they have none."""
        return self.silo.class_names()

    @property
    def round(self) -> int:
        """The round that the run's final evaluation counts as: dropout draws are keyed on it."""
        return self.lab.instruction.round

    def inputs(self, split: str = "test") -> Tensor:
        """Return a split's samples as the network takes them: (n, *input_shape) float32.

        Raises:
            SettingError: there is no such split.
        """
        inputs: Tensor = float_inputs(self.samples(split).inputs)
        return inputs

    def samples(self, split: str) -> Split:
        """Return the samples of a split.

        Raises:
            SettingError: there is no such split.
        """
        splits = self.silo.splits()
        if split not in splits:
            raise SettingError(f"there is no split '{split}': it is one of {', '.join(splits)}")
        return splits[split]

    def pixel_figures(self) -> PixelFigures | None:
        """Return what pixels are standardised by before they are a silo's; None: nothing."""
        return data_set(self.common.dataset).pixel_figures(self.common)

    def module(self) -> ProbabilityModel:
        """Return one module from samples as they are read to class probabilities, without dropout.

        It shares the network's weights and is on their device.
        """
        module = ProbabilityModel(self.network, self.silo.figures, self.pixel_figures())
        return module.to(self.lab.compute.device)

    def weights_digest(self) -> str:
        """Return a SHA-256 of all that decides its answers: weights, priors, a table's figures."""
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
) -> SiteModel:
    """Return the model of a finished run, where a site's data lie.

    Args:
        run_dir: the run directory.
        site: whose model; None: that of all sites, opened at the first whose data are here.
        data_dir: the data directory; None: the run's own.
        state_dir: the folder of the site's private state; None: the run directory's.

    Raises:
        FedsiloError: the run has not ended, its weights or the site's data are not here or are
            others by now, or sites have models of their own and none is named.
    """
    if run_dir.is_file():
        raise RunDirectoryError(f"{run_dir} is a file: name the run's directory")
    run = finished_run(run_dir)
    if site is not None:
        return _opened(run, sites_of(run_dir, [site])[0], data_dir, state_dir)
    if state_dir is not None:
        raise SettingError(f"--state-dir {state_dir} is one site's state: name the site by --site")
    if not (run_dir / "model.safetensors").is_file():
        raise _no_shared_model(run)
    model = _at_first_site(run, data_dir)
    if model.own:
        raise _no_shared_model(run)
    return model


def _at_first_site(run: FinishedRun, data_dir: Path | None) -> SiteModel:
    """Return the model at the first site whose data are here.

    Raises:
        FedsiloError: none are; told of the first.
    """
    first: DataError | None = None
    for site in sites_of(run.path):
        try:
            return _opened(run, site, data_dir, None)
        except DataError as error:
            first = first or error
    assert first is not None, "a run has sites"
    raise first


def _no_shared_model(run: FinishedRun) -> SettingError:
    return SettingError(
        f"{run.path}: of method '{run.settings.common.method}' with these settings each site has a "
        f"model of its own: name one by --site ({', '.join(sites_of(run.path))})"
    )


def _opened(
    run: FinishedRun, site: str, data_dir: Path | None, state_dir: Path | None
) -> SiteModel:
    lab = finished_site(run.path, site, data_dir, state_dir)
    measured = next(iter(lab.session.method.measured(lab, lab.open())))
    measured.network.eval()
    own = (
        lab.has_read_state()
        or bool(evidences(measured.network))  # whose prior is the site's
        or (lab.silo.figures is not None and lab.common.standardise == "site")
    )
    return SiteModel(run, lab, measured, own)


def refuse_other_rows(model: SiteModel, split: str) -> None:
    """Refuse a split that is not the one that the run had.

    Raises:
        DataError: a sample was altered, added or left out since.
    """
    model.samples(split)
    now, then = model.silo.fingerprints, model.run.silos[model.site]["fingerprints"]
    if now[split] != then[split]:
        raise DataError(
            f"the {split} rows of site {model.site} are not those of the run in {model.run.path}: "
            "bring its data back, or name them by --data-dir"
        )


def refuse_table_or_images(model: SiteModel, table: bool) -> None:
    """Refuse rows of a table for a model of images, and the other way round.

    Raises:
        DataError: says which option fits.
    """
    if bool(model.silo.features) == table:
        return
    fits = "is a table: give rows by --table" if not table else "is images: give files by --images"
    raise DataError(f"data set '{model.common.dataset}' {fits}")
