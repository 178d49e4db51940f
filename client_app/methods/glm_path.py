"""A hospital's own copy of a fit's path, by which it answers no question that departs from it.

The first question of a fit is fixed, and each later one follows from the total before. At trust
'sums' the server proves each total, so a hospital takes the same steps as the server
(``models.maths.glm_steps``) and compares. Without this, a server could choose coefficients whose
answers, subtracted from each other, are one patient's row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedsilo.client_app.masked_part import MaskedPart
from fedsilo.client_app.privacy.proven_sums import ProvenSum
from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.core.errors import FitError, RefusedError
from fedsilo.core.messages import ARRAYS, TRAIN
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.maths.glm import Floats, moments_length, sums_length
from fedsilo.models.maths.glm_steps import (
    FitProgress,
    FittedModel,
    differs,
    first_progress,
    next_progress,
)
from fedsilo.models.methods.glm import (
    BETA,
    BETA_REST,
    CENTERS,
    DEVIATIONS,
    SUMS,
    UNCLIPPED,
    GLMSettings,
    ScaleNotes,
    find_columns,
    grid_over,
    join_parts,
)
from fedsilo.strategies.wire.records import NDArray

_FILE = "fit-path.json"
_KEPT_ROUNDS = 3  # a server may go back by one, and each round is computed from the one before


@dataclass(frozen=True)
class FitPath:
    """The questions of a fit that this hospital has accepted.

    Attributes:
        settings: a digest of the settings that decide the meaning of a question.
        questions: the progress with the accepted question, by round; the newest 3 rounds.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    settings: str = ""
    questions: dict[int, FitProgress] = field(default_factory=dict)


def follow_path(
    part: MaskedPart, settings: GLMSettings, sites: int, before: ProvenSum | None
) -> None:
    """Check that a message asks the next question of the fit, and store this question.

    A question is the columns' units, the coefficients, and the scale by which sums are divided.
    This hospital computes the next question from the last one and the proven sum that answers it.
    The message must ask the same. The questions of the newest 3 rounds stay on the disk.

    Args:
        part: the message.
        settings: the settings of the regression.
        sites: the number of hospitals in the sum that the message asks for.
        before: the sum of the round before; None in round 1, whose question is fixed.

    Raises:
        RefusedError: the message is not the next question: its phase, round, settings, units,
            coefficients, scale or arrays differ. The fit has ended, or a hospital could not answer
            the last question.
        SettingError: the settings name a column that the table lacks, or name one twice.
        SiteError: the message's notes (its small settings beside the arrays) cannot be read.
        CheckpointError: this hospital's file of questions is damaged, or cannot be written.
    """
    session, round_ = part.session, part.instruction.round
    if part.instruction.phase != TRAIN:
        raise _refusal(f"asks for '{part.instruction.phase}'")
    features = session.silo.features
    columns = [features[place] for place in find_columns(features, settings).columns]
    model, file = FittedModel(settings.family, columns), _file(part.folder)
    path = file.read(FitPath())
    expected, vector = first_progress(model), None
    if before is not None:
        if path.settings != session.digest or round_ - 1 not in path.questions:
            raise _refusal("has other settings than the round before, or skips a round")
        answered = path.questions[round_ - 1]
        vector = _total_of(answered, before, session.settings)
        expected = _step_after(model, answered, vector)
        if not answered.beta:  # moments have no Hessian
            vector = None
    notes = ScaleNotes.from_values(part.instruction.notes)
    if notes.grid != grid_over(session.settings, sites):
        raise _refusal("has another grid for its sums")
    asked = _read_question(expected, len(model.names), notes, part.received_arrays())
    if differs(asked, expected, vector):
        raise _refusal("has other units, coefficients or another scale")
    # Later questions are computed from the coefficients that were asked, as at the server
    newest = {r: q for r, q in path.questions.items() if round_ - _KEPT_ROUNDS < r < round_}
    file.write(FitPath(session.digest, {**newest, round_: asked}))


def _total_of(answered: FitProgress, before: ProvenSum, common: CommonSettings) -> Floats | None:
    """Compute the sums over all hospitals that answer the last question, as the server does.

    A question is what the server asks sums for, such as the coefficients of a fit. Each hospital
    split its numbers into three parts and divided them by the question's scale. Here the parts are
    joined, and the result is multiplied by the scale again.

    Args:
        answered: the last question, of which only ``scale`` is used.
        before: the proven sum of the hospitals' answers to it.
        common: the run's settings.

    Returns:
        The sums, (m,). None if a hospital had to clip its numbers, because the sums are then wrong.

    Raises:
        RefusedError: a hospital could not answer the last question, so the fit must end.
    """
    if before.failed:
        raise _refusal("follows a round in which a hospital could not answer")
    grid = grid_over(common, len(before.sites))
    joined = join_parts(common, before.samples, before.totals, grid)
    if joined is None:
        return None
    return joined * answered.scale


def _step_after(model: FittedModel, answered: FitProgress, vector: Floats | None) -> FitProgress:
    """Compute the question that the server must ask after ``answered``.

    A question is what the server asks sums for: units, coefficients, and a scale that divides the
    sums. A unit is the centre and deviation by which a column is standardised. The first questions
    have no coefficients, and ask for the columns' moments to find units. Once the units are good
    enough, the next question has the first coefficients. Each later question has the coefficients
    after one more step of Newton's method.

    Args:
        model: the regression's family and columns.
        answered: the answered question.
        vector: the total that answers it. None means that a hospital had to clip its numbers. The
            same question then follows with a larger scale.

    Raises:
        RefusedError: no question follows, because the fit has converged or cannot go on.
    """
    try:
        expected = next_progress(model, answered, vector)
    except FitError as error:
        raise _refusal(f"continues a fit that ends here ({error})") from None
    if expected.sums:
        raise _refusal("continues a fit that has converged")
    return expected


def _read_question(
    expected: FitProgress, size: int, notes: ScaleNotes, arrays: Mapping[str, NDArray]
) -> FitProgress:
    """Read the question in a message, after checking the form of its arrays.

    A question has the columns' units, the scale, and the coefficients (empty if the message asks
    for moments). The progress of the fit, which no message has, is copied from ``expected``. The
    message must also have an array of zeros for each array of the reply.

    Args:
        expected: the question that this hospital has computed itself.
        size: the number of coefficients.
        notes: the message's settings beside its arrays, such as the scale.
        arrays: the received arrays, named ``<record>/<array>``.

    Raises:
        RefusedError: an array is missing, unknown, not float32 or of another shape, or an array
            that must be 0 is not.
    """
    columns, length = len(expected.centers), sums_length(size)
    if not expected.beta:
        length = moments_length(columns)
    shapes = {CENTERS: columns, DEVIATIONS: columns, BETA: size, BETA_REST: size, UNCLIPPED: 1}
    shapes |= dict.fromkeys(SUMS, length)
    received = {}
    for name, count in shapes.items():
        array = arrays.get(f"{ARRAYS}/{name}")
        if array is None or array.shape != (count,) or array.dtype != np.float32:
            raise _refusal(f"has no '{name}' of {count} float32 numbers")
        received[name] = array.astype(np.float64)
    beta = received[BETA] + received[BETA_REST]
    zeros = [received[name] for name in (*SUMS, UNCLIPPED)]
    if notes.moments:
        zeros.append(beta)
    known = {f"{ARRAYS}/{name}" for name in shapes}
    is_other = {name for name in arrays if name.startswith(f"{ARRAYS}/")} != known
    if is_other or any(array.any() for array in zeros):
        raise _refusal("has other arrays, or other numbers where 0 is expected")
    coefficients: list[float] = []
    if not notes.moments:
        coefficients = beta.tolist()
    return replace(
        expected,
        centers=received[CENTERS].tolist(),
        deviations=received[DEVIATIONS].tolist(),
        beta=coefficients,
        scale=notes.scale,
    )


def _refusal(what: str) -> RefusedError:
    return RefusedError(
        f"the message {what}, but at trust 'sums' this hospital answers only the questions of the "
        "fit, which it computes itself from the sums before: begin a run with another 'run.name'"
    )


def _file(folder: Path) -> OwnFile[FitPath]:
    return OwnFile(
        folder / _FILE,
        FitPath,
        f"this hospital's copy of the fit {_FILE}",
        "bring it back, or choose another 'run.name'",
    )
