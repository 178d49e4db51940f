"""A finished run's model at a site, opened to predict: network, preprocessing, classes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.training.evaluation import Measured, Probe, predict_batches
from fedsilo.core.errors import CheckpointError, DataError, SettingError
from fedsilo.core.files.state_files import state_digest
from fedsilo.core.messages import INCOMING
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.probability_model import PixelStatistics, ProbabilityModel
from fedsilo.models.networks.site_network import SiteNetwork, evidences
from fedsilo.runs.trained_site import Silos, check_same_samples


@dataclass(frozen=True)
class TrainedModel:
    """A site's model after a finished run, as ``FinishedRun.model`` opens it.

    Attributes:
        run_dir: the run directory.
        title: the title of the run's method.
        sites: site -> its facts in silos.json, of all sites of the run.
        lab: the site's lab of the run's method, after the last round.
        measured: the measured network in eval mode, on the device.
        own: whether the model belongs to this site only; if false, all sites have the same model.
    """

    run_dir: Path
    title: str
    sites: Silos
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
        """The run's settings, with this machine's data directory."""
        return self.lab.common

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, or their numbers as text if they have none."""
        return self.silo.class_names()

    def inputs(self, split: str = "test") -> Tensor:
        """Return a split's samples as the network takes them, (n, *input_shape) float32."""
        inputs: Tensor = float_inputs(self.samples(split).inputs)
        return inputs

    def samples(self, split: str) -> Split:
        """Return the samples and labels of one of the site's splits.

        The features of a table are standardised.

        Raises:
            SettingError: the site does not have the split.
        """
        splits = self.silo.splits()
        if split not in splits:
            raise SettingError(f"there is no split '{split}': it is one of {', '.join(splits)}")
        return splits[split]

    def probabilities(
        self, batches: Iterable[Tensor], split: str, probe: Probe | None = None
    ) -> Tensor:
        """Predict in the same way as the run's final evaluation of a split.

        If 'train.mc-passes' is 0, the network computes once without dropout. Otherwise the
        predictions are the mean over this number of passes with dropout. The dropout masks are the
        same as in the final evaluation.

        Args:
            batches: inputs (batch, *input_shape), n samples in all.
            split: the name of the split. It decides the dropout masks.
            probe: sees the output of the network's encoder for each batch, to compute more from it.
                None means no probe.

        Returns:
            The predictions (n, outputs), which are class probabilities for a classification.
        """
        lab = self.lab
        # The key decides the dropout samples, so it must be that of the final evaluation
        key = (lab.instruction.round, self.site, INCOMING, split)
        return predict_batches(
            self.network, batches, lab.sampling, lab.compute, key, probe, lab.task
        )

    def pixel_standardisation(self) -> PixelStatistics | None:
        """Return the mean and deviation that standardise pixels; None if pixels are unchanged."""
        return data_set(self.common.dataset).pixel_standardisation(self.common)

    def module(self) -> ProbabilityModel:
        """Return a module that maps raw samples to the task's predictions, on the run's device.

        Raw samples are samples before standardisation, as the files have them. The module shares
        the network's weights and computes without dropout.
        """
        pixels = self.pixel_standardisation()
        module = ProbabilityModel(self.network, self.silo.standardisation, pixels, self.lab.task)
        return module.to(self.lab.compute.device)

    def weights_digest(self) -> str:
        """Return a SHA-256 digest of all numbers that decide a prediction.

        Models with equal digests predict the same. The digest covers the network's weights, the
        class priors of an evidential network, the standardisation of a table and the scale of a
        numeric outcome.
        """
        arrays = {}
        for name, array in self.network.state_dict().items():
            arrays[name] = array.cpu().numpy()
        for number, evidence in enumerate(evidences(self.network)):
            arrays[f"prior.{number}"] = evidence.prior.cpu().numpy()
        standardisation = self.silo.standardisation
        if standardisation:
            # These names are part of the digest, and a calibration recognises its model by it
            arrays |= {"figures.mean": standardisation.mean, "figures.std": standardisation.std}
        if self.silo.outcome:
            arrays |= {"outcome.mean": self.silo.outcome.mean, "outcome.std": self.silo.outcome.std}
        return state_digest(arrays, {})


def open_model(
    lab: Lab, run_dir: Path, title: str, sites: Silos, best: bool = False
) -> TrainedModel:
    """Build the trained model of a site: the network in eval mode, with facts about the run.

    The model counts as the site's own in these cases, and otherwise as shared by all sites:

    - the method reads the private state that the site stored.
    - the network is evidential, with class priors of the site.
    - the site standardises its table by its own statistics.

    Args:
        lab: the site, opened with the weights of the wanted round.
        run_dir: the run directory.
        title: the title of the run's method.
        sites: site -> its facts in silos.json.
        best: whether ``lab`` has the weights of the best round, for the error.

    Raises:
        SettingError: ``best`` is true, and the site's own part of the model cannot be read, usually
            because sites keep it for only two rounds.
        FedsiloError: the weights cannot be read.
    """
    try:
        network = lab.open()
    except CheckpointError as error:
        if not best:
            raise
        raise SettingError(
            f"{run_dir}: site {lab.silo.name} keeps its own part of the model for the newest two "
            f"rounds, but the best round is older ({error}): remove --best"
        ) from None
    measured = next(iter(lab.session.method.measured(lab, network)))
    measured.network.eval()
    # ``Lab`` reads the site's own state into a cached property, and only if the method needs it
    read_own_state = "stored_state" in vars(lab)
    has_own_prior = bool(evidences(measured.network))
    has_own_scale = lab.silo.standardisation is not None and lab.common.standardise == "site"
    own = read_own_state or has_own_prior or has_own_scale
    return TrainedModel(run_dir, title, sites, lab, measured, own)


def open_at_first_site(
    sites: Iterable[str], open_at: Callable[[str], TrainedModel]
) -> TrainedModel:
    """Open the model at the first of ``sites`` whose data are on this machine.

    ``sites`` must not be empty. ``open_at`` opens the model with the data of a site. A site for
    which it raises a DataError is skipped.

    Raises:
        DataError: every site was skipped. The error is that of the first site.
    """
    errors: list[DataError] = []
    for site in sites:
        try:
            return open_at(site)
        except DataError as error:
            errors.append(error)
    raise errors[0]


def refuse_other_rows(model: TrainedModel, split: str) -> None:
    """Check that a split still has the samples that it had in the run.

    The site's fingerprint of the split decides this. A split without one passes.

    Raises:
        SettingError: the site does not have the split.
        DataError: a sample was changed, moved, added or left out since the run.
    """
    model.samples(split)
    check_same_samples(model.run_dir, model.sites.get(model.site, {}), model.silo, split)


def refuse_table_or_images(model: TrainedModel, table: bool) -> None:
    """Check that new data are of the model's kind, a table or images.

    ``table`` is true if the new data are a table.

    Raises:
        DataError: the model's data are of the other kind.
    """
    if bool(model.silo.features) == table:
        return
    fits = "is a table: give rows by --table"
    if table:
        fits = "is images: give files by --images"
    raise DataError(f"data set '{model.common.dataset}' {fits}")
