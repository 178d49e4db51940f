"""Answer a message of a round: run the phase that it asks for, and pack the result.

``pack`` is the only way out of a site. It sends arrays, which are masked in secret sums, and the
metrics of splits with enough samples.
"""

import time
from contextlib import suppress

import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from fedsilo.client_app.lab import Lab, Outgoing
from fedsilo.client_app.masked_part import Arrays, MaskedPart
from fedsilo.client_app.privacy.round_secrets import drop_secrets
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.site.node import note_opening
from fedsilo.client_app.site.private_state import SiteState
from fedsilo.client_app.training.compute import collect_unrepeatable_operations
from fedsilo.client_app.training.paced_epochs import PREFIX
from fedsilo.core.errors import CheckpointError, SiteError
from fedsilo.core.messages import (
    ARRAYS,
    DP_EPSILON,
    EVALUATE,
    INCOMING,
    KEPT_STATE,
    METRICS,
    NUM_EXAMPLES,
    PEAK_MEMORY,
    SECONDS,
    SECURING,
    STEPS,
    TRAINED,
    TRAINING,
    UNREPEATABLE,
    Instruction,
)
from fedsilo.core.settings.common_settings import SERVER, SUMS
from fedsilo.models.networks.site_network import exchanged_arrays
from fedsilo.models.privacy.noisy_metrics import noisy_metrics, parts_bound
from fedsilo.strategies.wire.records import ArrayError, NDArray, to_record
from fedsilo.strategies.wire.secure_keys import SECURE

# Metrics that depend on no patient: the steps of FedNova and SCAFFOLD follow from counts that the
# site has reported, and the number of UEFL's codewords from the settings
_OF_NO_PATIENT = (STEPS, "inverse-steps", "new-codewords")


def answer(lab: Lab) -> RecordDict:
    """Run the phase that the server asks for, and return the packed reply.

    A phase is a named step of a round, such as "train", of the method or of secure aggregation. If
    a training phase ends in a secret sum (the server sees only the total over sites), everything
    that could make the sum fail is checked before the training. The reply to a phase of secure
    aggregation, such as the exchange of keys, also has the record that the phase made.

    Raises:
        SiteError: the method does not have the phase, or the phase does not return ``Outgoing``; an
            operation is not deterministic although 'machine.deterministic' is 'true'; or the server
            asks for a phase of secure aggregation in a run without it.
        FedsiloError: the secret sum is refused, the method's phase fails, or the reply cannot be
            packed.
    """
    phase = lab.instruction.phase
    with collect_unrepeatable_operations() as lab.unrepeatable:
        if phase in SECURING:
            record = lab.masked_part.answer_phase()
            reply = pack(lab, Outgoing())
            reply[SECURE] = record
            return reply
        if phase in TRAINING and lab.common.secure_aggregation != "none":
            # Checked now: a sum refused afterwards would waste an hour of training
            lab.masked_part.refuse_before_data()
        outgoing = lab.session.phase_function(phase)(lab)
        if not isinstance(outgoing, Outgoing):
            raise SiteError(
                f"site {lab.site}: phase '{phase}' of method '{lab.common.method}' must return "
                f"Outgoing(...), but returns {type(outgoing).__name__}: nothing else can leave a "
                "site"
            )
        return pack(lab, outgoing)


def open_declared(
    session: SiteSession, instruction: Instruction, content: RecordDict, final: bool
) -> SiteSession:
    """Load the real data of a hospital that so far has only declared its data.

    At trust 'sums' (the server learns only sums over sites) a hospital declares rounded counts.
    Zero samples take the place of its data until the data are needed. This function checks the
    phase and the secret sum before it reads the data, so that a refusal cannot depend on the data.
    It always loads the data: the caller decides whether they are needed.

    Args:
        session: the run at this site, with zero samples in place of the data.
        instruction: the server's request.
        content: the message's records.
        final: True for the final evaluation. It is not a phase of the method, so no phase is
            checked.

    Returns:
        A copy of the session with the real data.

    Raises:
        FedsiloError: the method lacks the phase, the secret sum is refused, this site failed in an
            earlier answer to the same received arrays, or the data are unusable.
    """
    if not final:
        session.phase_function(instruction.phase)
    masked_part = MaskedPart(session, instruction, content, session.state_folder(instruction))
    masked_part.refuse_before_data()
    note_opening()
    masked_part.refuse_after_failure()
    return session.with_data()


def failed_answer(
    session: SiteSession, instruction: Instruction, content: RecordDict
) -> RecordDict:
    """Build a hospital's reply after a failure, in the form of a successful reply.

    From this form the server cannot tell that this hospital failed. If the server expects arrays or
    this is the final evaluation, the reply has zeros in their place. They are masked, like the
    numbers that a successful site adds to a secret sum.

    Except in the final evaluation, the site's newest stored arrays (its state) are stored again
    under this message's round and step. If there are none, an empty state is stored. The reply says
    that a state was stored, even if the old state could not be read or the new one could not be
    written.

    Args:
        session: the run at this site, with zero samples in place of the data.
        instruction: the server's request.
        content: the message's records.

    Raises:
        FedsiloError: the zeros cannot be masked, for a reason that does not depend on the data.
    """
    note_opening()  # a later error may tell what this site has masked before
    folder = session.state_folder(instruction)
    if instruction.phase != EVALUATE:
        files = SiteState(folder, session.digest)
        with suppress(CheckpointError):
            files.store(instruction, files.load_before(instruction) or {})
    kept = int(instruction.phase != EVALUATE)
    reply = RecordDict({METRICS: MetricRecord({KEPT_STATE: kept})})
    # The same condition as in ``_adds_to_a_sum``, so that the records of both replies are alike
    if instruction.returns or instruction.phase == EVALUATE:
        reply[ARRAYS] = MaskedPart(session, instruction, content, folder).failed_part()
    return reply


def evaluate(lab: Lab) -> RecordDict:
    """Measure the received model on validation and test data, and return the packed reply.

    This is the answer to the final evaluation. A split without samples adds no metrics. At trust
    'sums' the metrics leave masked, as this site's part of a last secret sum. At any other trust no
    secret sum follows, so the site first deletes its secrets of secure aggregation, if the run has
    it.

    Raises:
        FedsiloError: the model cannot be opened or measured, or the reply cannot be packed.
    """
    if lab.common.secure_aggregation != "none" and lab.common.trust != SUMS:
        drop_secrets(lab.state_files.folder)
    with collect_unrepeatable_operations() as lab.unrepeatable:
        network = lab.open()
        lab.metrics |= lab.measure_splits(network, INCOMING, ("val", "test"))
        return pack(lab, Outgoing())


def pack(lab: Lab, outgoing: Outgoing) -> RecordDict:
    """Store the arrays that stay at the site, and build the reply from the arrays that leave.

    - If the server asks for metrics, and ``outgoing.network`` is the network that ``fit`` trained,
      this network is first measured on validation data.
    - Arrays leave only if the server expects arrays. They are ``outgoing.send`` or, if it is None,
      the arrays of ``outgoing.network`` that sites exchange.
    - In a run with secure aggregation, the arrays leave masked, so that the server can read only
      their sum over sites. The masked record also has sample counts and, at trust 'sums', metrics.
      At trust 'sums' it leaves in the final evaluation too, and even if the method sends no arrays
      although the server expects some.

    Args:
        lab: the message's lab, with the metrics that were measured so far.
        outgoing: the network, the arrays to send, and the arrays to store in ``keep``.

    Returns:
        A record of the metrics that may leave, and a record of arrays if arrays leave. The metrics
        also say whether a state was stored, and may name the operations that were not
        deterministic.

    Raises:
        FedsiloError: a stored array or a compressed update is not finite, a file cannot be written,
            noisy metrics would exceed a cap on epsilon, or the mask is refused.
    """
    network, session = outgoing.network, lab.session
    if network is not None and network is lab.trained and lab.instruction.evaluate:
        lab.metrics |= lab.measure_splits(network, TRAINED, ("val",))
    send: Arrays = {}
    # Arrays leave only on request: in local rounds the server asks for none, whatever a method
    # returns
    if lab.instruction.returns and outgoing.send is not None:
        send = outgoing.send
    elif lab.instruction.returns and network is not None:
        send = exchanged_arrays(network)
    arrays, is_summed = None, lab.common.secure_aggregation != "none"
    if send and not is_summed:
        arrays = _plain_record(lab, send)
    has_kept = _store(lab, outgoing.keep or {})
    metrics: dict[str, float] = {**_leaving_metrics(lab), KEPT_STATE: int(has_kept)}
    # The operations that ran may depend on the data, because a batch may be empty
    if session.stand_in is None and not session.cap:
        metrics |= {f"{UNREPEATABLE}{name}": 1 for name in sorted(lab.unrepeatable)}
    record = MetricRecord(dict(metrics))
    # Masked last, because a mask key can be used only once: an error above must not burn it
    if is_summed and (send or _adds_to_a_sum(lab)):
        arrays = lab.masked_part.masked_record(send, lab.arrays(), lab.metrics)
    packed = RecordDict({METRICS: record})
    if arrays is not None:
        packed[ARRAYS] = arrays
    return packed


def _plain_record(lab: Lab, leaving: Arrays) -> ArrayRecord:
    """Pack unmasked arrays as float32 or, in a compressed run, as compressed updates.

    An update is a weight minus the received array of the same name, in the precision
    'server.wire-precision'. In a compressed run updates leave in place of the weights. Arrays that
    are no weights, such as batch norm's statistics, leave uncompressed.

    Raises:
        SiteError: a compressed update is not finite. The error names site, round and array.
    """
    plain: dict[str, NDArray] = {}
    for name, array in leaving.items():
        plain[name] = array.detach().float().cpu().contiguous().numpy()
    compression = lab.session.compression
    if not compression:
        return to_record(plain)
    received = {name: array.numpy() for name, array in lab.arrays().items()}
    try:
        return to_record(compression.pack_updates(plain, received))
    except ArrayError as error:
        raise SiteError(f"site {lab.site}, round {lab.instruction.round}: {error}") from None


def _adds_to_a_sum(lab: Lab) -> bool:
    """Tell whether the reply must have a masked part even if the method sends no arrays.

    A masked part is what this site adds to a secret sum. The result is True at trust 'sums' if the
    server expects arrays or this is the final evaluation. A failed site sends masked zeros in these
    cases. If a successful site sent nothing, the server could tell who failed. The phases of secure
    aggregation itself, such as the exchange of keys, need no part.
    """
    phase = lab.instruction.phase
    if lab.common.trust != SUMS or phase in SECURING:
        return False
    return phase == EVALUATE or lab.instruction.returns


def _leaving_metrics(lab: Lab) -> dict[str, float]:
    """Choose the metrics of this reply by the run's level of trust: key -> value.

    The measured metrics come first:

    - At trust 'sums' none of them leave here, because they are part of the secret sum.
    - At any other trust, if the hospital has its own cap on epsilon, exact metrics leave only if
      they depend on no patient, such as the number of optimiser steps (``_OF_NO_PATIENT``).
    - At any other trust, without such a cap, metrics leave if they belong to no split, or to a
      split with at least 'minimum-measured' reported samples. At trust 'server' the numbers of
      optimiser steps and of used samples leave too, unless the run is private.

    Under the hospital's own cap, ``lab.sample_parts`` may have each sample's contribution to some
    metrics. The noisy sums of these contributions are added, and the privacy ledger is charged.

    Last, some figures are added that do not measure the model:

    - At trust 'server', the time and the peak memory of this answer.
    - At any trust but 'sums', the reported number of training samples.
    - In a private run, at any trust, the epsilon that the site has spent.

    Raises:
        EpsilonSpentError: the noisy metrics would exceed a cap on epsilon.
        CheckpointError: a privacy ledger is damaged, or cannot be written.
    """
    session, common, limits = lab.session, lab.common, lab.session.limits
    sizes = {name: sum(counts) for name, counts in session.reported.items()}
    metrics: dict[str, float] = {}
    if common.trust != SUMS and session.cap:
        metrics = {name: lab.metrics[name] for name in _OF_NO_PATIENT if name in lab.metrics}
    elif common.trust != SUMS:
        metrics = dict(lab.metrics)
        if common.trust == SERVER and not common.is_private():
            # These depend on the real samples, which a private run hides
            metrics |= lab.work
        if limits.minimum_measured > 1:
            metrics = dict(limits.drop_small_splits(metrics, sizes))
    if lab.sample_parts:
        release = lab.privacy.measurements(parts_bound(lab.sample_parts))  # this costs epsilon
        ranges = lab.task.part_ranges(lab.silo.shape.outputs)
        metrics |= noisy_metrics(lab.sample_parts, sizes, ranges, release)
    if common.trust == SERVER:  # time and memory of an answer depend on the data
        metrics[SECONDS] = time.perf_counter() - lab.began
        metrics[PEAK_MEMORY] = lab.compute.peak_memory()
    if common.trust != SUMS:
        metrics[NUM_EXAMPLES] = sizes["train"]
    if common.is_private():
        metrics[DP_EPSILON] = lab.masked_part.ledger.epsilon()
    return metrics


def _store(lab: Lab, keep: Arrays) -> bool:
    """Write the site's private state after this phase; return True if a state was written.

    A state has three groups of arrays:

    - ``keep``, the arrays that the method stores.
    - ``lab.counted``, the arrays of the last reply that the server used.
    - The arrays from which the training continues, such as the optimiser's moments. If this phase
      trained nothing, they stay as they were stored before.

    Nothing is written if ``keep`` is empty and the training left nothing to continue from. The
    exception is a hospital that declares its data. After each phase of the method it writes at
    least ``lab.counted``, because a failed site writes a state too, and the replies must look
    alike.

    Raises:
        SiteError: an array is not finite, because training diverged. Under the hospital's own cap
            on epsilon no error is raised, because it would reveal the values. They are replaced by
            finite ones.
        CheckpointError: the state cannot be written.
    """
    continued = lab.continued
    if keep or continued:
        if continued is None:  # nothing was trained, so the optimiser's moments stay as they were
            continued = {n: a for n, a in lab.stored_state.items() if n.startswith(PREFIX)}
        kept = {**lab.counted, **keep, **continued}
        if lab.session.cap:  # an error would reveal the course of training on a patient's data
            kept = {name: torch.nan_to_num(array) for name, array in kept.items()}
        for name, array in kept.items():
            if not array.isfinite().all():
                raise SiteError(
                    f"training diverged, '{name}' contains non-finite values: lower "
                    "'train.learning-rate'; nothing of it was kept"
                )
        lab.state_files.store(lab.instruction, kept)
        return True
    # All replies of a hospital that declares its data are alike: a site that fails stores its
    # previous state, so a site that succeeds must store one too
    phase = lab.instruction.phase
    if lab.session.stand_in is None or phase == EVALUATE or phase in SECURING:
        return False
    lab.state_files.store(lab.instruction, dict(lab.counted))
    return True
