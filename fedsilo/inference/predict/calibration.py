"""Calibrates a model's probabilities on a site's validation rows.

It fits a temperature for the probabilities, and keeps the scores that decide prediction sets. The
scores use the model's own probabilities, so fitting the temperature on the same rows does not
reduce the coverage of the sets.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor

from fedsilo.client_app.training.evaluation import in_batches
from fedsilo.core.errors import CheckpointError, DataError, SettingError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.files.site_names import folder_name
from fedsilo.models.measures.calibration import (
    apply_temperature,
    conformity_scores,
    coverage_range,
    fit_temperature,
    mean_loss,
    prediction_sets,
    rows_needed,
    threshold,
)
from fedsilo.runs.trained_model import TrainedModel, refuse_other_rows
from fedsilo.server_app.records.run_directory import RunDirectory

SPLIT = "val"
_MINIMUM = 10  # fewest rows to fit a temperature to


def check_coverage(coverage: float | None) -> None:
    """Raise a SettingError if the coverage is not between 0 and 1; None passes."""
    if coverage is not None and not 0 < coverage < 1:
        raise SettingError(f"--coverage is {coverage}; it must be above 0 and below 1, such as 0.9")


@dataclass(frozen=True)
class Calibration:
    """A model's calibration on a site's validation rows."""

    run: str  # the run directory's name
    site: str
    weights: str  # the model's digest (see ``TrainedModel.weights_digest``)
    rows: int
    temperature: float
    loss: float  # mean negative log-likelihood in nats of the model's own probabilities
    tempered_loss: float  # the same at the temperature
    scores: tuple[float, ...]  # one minus the probability of each row's class, ascending

    def threshold(self, coverage: float) -> float:
        """Return the highest score that a class in a prediction set with this coverage may have.

        The score of a class is 1 minus its probability. The result is a quantile of the scores that
        the true classes of the calibration rows had.

        Raises:
            SettingError: the calibration has too few rows for that coverage.
        """
        limit = threshold(torch.tensor(self.scores, dtype=torch.float64), coverage)
        # An infinite limit would put every class into every set
        if math.isinf(limit):
            raise SettingError(
                f"--coverage {coverage:g} needs {rows_needed(coverage)} validation rows, but site "
                f"{self.site} was calibrated on {self.rows}: ask for less, or cut more by "
                "'split.val-folds' in a new run"
            )
        return limit

    def sets(self, probabilities: Tensor, coverage: float) -> Tensor:
        """Build the prediction sets, bool (n, classes), from the model's own probabilities.

        Raises the error of ``threshold``.
        """
        return prediction_sets(probabilities, self.threshold(coverage))

    def apply_temperature(self, probabilities: Tensor) -> Tensor:
        """Return the probabilities (n, classes) at the fitted temperature.

        ``probabilities`` are the model's own, without a temperature.
        """
        return apply_temperature(probabilities, self.temperature)

    def lines(self, coverage: float) -> list[str]:
        """Describe the calibration in sentences for a terminal.

        The sentences state the temperature, the loss before and after calibration, and the lowest
        probability with which a class enters a prediction set. They also give the range in which
        the true coverage lies for nine of ten calibrations on as many rows. The last sentence warns
        that the coverage holds for all cases together, and not for each class or kind of patient.

        Args:
            coverage: the share of prediction sets that should contain the true class, between 0 and
                1.

        Raises:
            SettingError: the calibration has too few rows for that coverage.
        """
        low, high = coverage_range(self.rows, coverage)
        return [
            f"site {self.site}, {self.rows} validation rows: temperature {self.temperature:.3f}, "
            f"loss {self.loss:.3f} -> {self.tempered_loss:.3f} nats on these rows",
            f"coverage {coverage:g}: a class is in a set if its probability is at least "
            f"{1 - self.threshold(coverage):.3f}",
            f"For new cases like these rows, at least {coverage:g} of the sets hold the true class "
            f"on average over calibrations; for one calibration on {self.rows} rows it is "
            f"{low:.2f} to {high:.2f} nine times in ten.",
            "This is a share of all cases, not of each class or kind of patient, and it holds only "
            "while cases, machine and ward stay as they were.",
        ]


_FORM = TypeAdapter(Calibration)


def calibration_path(run_dir: Path, site: str) -> Path:
    """Return the path of the file that ``calibrate`` writes by default."""
    return run_dir / f"calibration-{folder_name(site)}.json"


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration to a file that only its owner may read."""
    content = _FORM.dump_json(calibration, indent=2).decode() + "\n"
    write_atomically(path, content, mode=0o600)


def calibrate_model(model: TrainedModel, coverage: float) -> Calibration:
    """Fit the calibration of a model on the validation rows of its site.

    The temperature, by which logits are divided, is fitted to minimise the negative log-likelihood.
    The calibration also keeps a score for each row: 1 minus the probability of the true class.
    Prediction sets are made from these scores later. No row is kept.

    Args:
        model: the model at its site.
        coverage: the highest coverage that prediction sets will be asked for, such as 0.9. A higher
            coverage needs more rows, and at least ten are always needed.

    Returns:
        The calibration, which also has the mean loss before and after fitting. It is not written to
        a file.

    Raises:
        DataError: the site has too few validation rows, or the rows have changed since the run.
    """
    # If rows were moved between the splits since the run, training rows could be among these
    refuse_other_rows(model, SPLIT)
    own = model.silo.splits()[SPLIT]
    needed = max(_MINIMUM, rows_needed(coverage))
    if len(own) < needed:
        raise DataError(
            f"site {model.site} has {len(own)} validation rows, but a calibration for coverage "
            f"{coverage:g} needs {needed}: start a run with 'split.val-folds', or lower the "
            "coverage"
        )
    # (n, classes), at temperature 1
    probabilities = model.probabilities(in_batches(own.inputs), SPLIT)
    temperature = fit_temperature(probabilities, own.labels)
    return Calibration(
        run=model.run_dir.resolve().name,
        site=model.site,
        weights=model.weights_digest(),
        rows=len(own),
        temperature=temperature,
        loss=mean_loss(probabilities, own.labels),
        tempered_loss=mean_loss(apply_temperature(probabilities, temperature), own.labels),
        scores=tuple(conformity_scores(probabilities, own.labels).tolist()),
    )


def open_calibration(model: TrainedModel, path: Path | None) -> Calibration:
    """Read the calibration of a model from ``path``, or from the run directory if ``path`` is None.

    Raises:
        SettingError: the file does not exist, or its calibration was made for another site or for
            other weights than those of ``model``.
        CheckpointError: the file cannot be read, is damaged, or is not a calibration.
    """
    found = path or RunDirectory(model.run_dir).file(calibration_path(Path(), model.site).name)
    if not found.is_file():
        raise SettingError(
            f"{found} does not exist: run 'fedsilo calibrate {model.run_dir} --site {model.site}' "
            "first, or name its file by --calibration"
        )
    try:
        calibration = _FORM.validate_json(found.read_bytes())
    except (OSError, ValueError):
        raise CheckpointError(
            f"{found} is damaged or not a calibration: run 'fedsilo calibrate' again"
        ) from None
    # Scores of other weights or rows would promise a coverage that is not reached
    if calibration.weights != model.weights_digest() or calibration.site != model.site:
        raise SettingError(
            f"{found} belongs to run {calibration.run} at site {calibration.site}, but the weights "
            f"or site of {model.run_dir} at site {model.site} differ: calibrate again"
        )
    return calibration
