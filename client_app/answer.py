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
    """Run the phase that the server asks for, and pack its result as the reply.

    A phase is a named step of a round, such as "train".

    - A phase of the method returns ``Outgoing``, and ``pack`` makes the reply from it. If a
      training phase ends in a secret sum (the server sees only the total over sites), the site
      first checks that it can take part in this sum (``refuse_before_data``).
    - A phase of secure aggregation, such as the exchange of keys, trains nothing. The record that
      it makes is added to the reply.

    Raises:
        SiteError: the method lacks the phase, or the phase does not return ``Outgoing``. Two more
            causes are a non-deterministic operation although 'machine.deterministic' is 'true', and
            a phase of secure aggregation in a run without secure aggregation.
        FedsiloError: the site cannot take part in the secret sum, the method's phase fails, or the
            reply cannot be packed.
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
    """Load a hospital's real data for this message, in place of the zeros used so far.

    At trust 'sums' the server learns only sums over sites. There a hospital works with all-zero
    samples until it needs its data. Two checks come before the data are read, so that they cannot
    depend on a patient: the method has the phase (a named step of a round), and the hospital can
    take part in the secret sum. Then ``note_opening`` records that data are being read, so that
    the caller hides all later errors. The data are always loaded: the caller decides whether they
    are needed.

    Args:
        session: the run at this hospital, with zero samples in place of the data.
        instruction: the server's request.
        content: the message's records.
        final: True for the final evaluation, for which the method needs no phase.

    Returns:
        A copy of the session with the real data.

    Raises:
        FedsiloError: the method lacks the phase, the hospital cannot take part in the secret sum,
            the hospital has failed before on the same received arrays, or the data are unusable.
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
    """Build a hospital's reply after a failure, so that it looks like a successful reply.

    If the server expects arrays, the reply has masked zeros (``failed_part``), which add 0 to the
    secret sum. The only metric says whether a state was stored. A state is the arrays that a site
    stores after a phase. The newest earlier state is stored again under this message's round and
    step. Without an earlier state, an empty one is stored. If a file is damaged or cannot be
    written, the metric still says that a state was stored.

    In the final evaluation the reply always has the masked zeros. No state is stored, and the
    metric says so.

    Args:
        session: the run at this site, with zero samples in place of the data.
        instruction: the server's request.
        content: the message's records.

    Raises:
        FedsiloError: the zeros cannot be masked, for example because this round's keys were used
            before. The reason never depends on the data.
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

    This answers the final evaluation. A split without samples adds no metrics.

    - At trust 'sums' the metrics leave masked, so that the server learns only their sum over sites.
    - At any other trust no secret sum follows. If the run has secure aggregation, the site deletes
      its keys for it before it measures.

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
    """Store the arrays that stay at the site, and build the reply from those that leave.

    - If the server asks for metrics, and ``fit`` has trained ``outgoing.network``, this network is
      first measured on validation data.
    - Arrays leave only if the server expects arrays. They are ``outgoing.send`` or, if it is None,
      those of ``outgoing.network`` (``exchanged_arrays``).
    - With secure aggregation, arrays leave masked, with sample counts and, at trust 'sums',
      metrics. At trust 'sums' this masked record leaves even without arrays to send, if the server
      expects arrays or this is the final evaluation.

    Args:
        lab: the message's lab, with the metrics that were measured so far.
        outgoing: the network, the arrays to send, and the arrays to store in ``keep``.

    Returns:
        A record of the metrics that may leave, and a record of arrays if arrays leave. The metrics
        also say whether a state was stored, and may name operations that were not deterministic.

    Raises:
        FedsiloError: a stored array or a compressed update is not finite, a file cannot be written,
            noise on the metrics would cost more epsilon than allowed, or the numbers cannot be
            masked.
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
    """Pack arrays without masks: as float32 or, in a compressed run, as compressed updates.

    An update is a weight minus the received array of the same name. In a compressed run each weight
    leaves as its update, in the precision 'server.wire-precision'. Arrays that are not weights,
    such as batch norm's statistics, leave uncompressed.

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
    """Tell whether the reply must have a masked record even if the method sends no arrays.

    The masked record adds this site's numbers to a secret sum. At trust 'sums' the result is True
    if the server expects arrays, and in the final evaluation. A site that failed sends masked zeros
    in these cases. If successful sites sent no record, the server could tell which site failed. For
    a phase of secure aggregation itself, such as the exchange of keys, the result is False.
    """
    phase = lab.instruction.phase
    if lab.common.trust != SUMS or phase in SECURING:
        return False
    return phase == EVALUATE or lab.instruction.returns


def _leaving_metrics(lab: Lab) -> dict[str, float]:
    """Choose the metrics that leave in this reply, by the run's level of trust: key -> value.

    Of the measured metrics these leave:

    - At trust 'sums', none, because they are part of the secret sum.
    - Under the hospital's own cap on epsilon, only metrics that depend on no patient, such as the
      number of optimiser steps.
    - In any other case, all except those of a split with fewer than 'minimum-measured' reported
      samples. At trust 'server', in a run that is not private, the numbers of optimiser steps and
      of used samples leave too.

    If ``lab.sample_parts`` has samples' contributions to metrics, their sums are added with noise,
    and the privacy ledger is charged. These figures follow:

    - At trust 'server', the time and the peak memory of this answer.
    - At any trust but 'sums', the reported number of training samples.
    - In a private run, the epsilon that the site has spent.

    Raises:
        EpsilonSpentError: the noise would cost more epsilon than a cap allows.
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
    """Write the site's state (the arrays that it keeps), and tell whether one was written.

    A state has ``keep``, ``lab.counted``, and the arrays from which training continues, such as the
    optimiser's moments. If this phase trained nothing, these last arrays are copied from the
    earlier state.

    If ``keep`` is empty and the training left nothing to continue from, no state is written. A
    hospital that declares its data then still writes ``lab.counted`` after a phase of the method. A
    failed site stores a state too, and the replies must look alike.

    Args:
        lab: the message's lab. ``lab.counted`` has the arrays that were stored with this site's
            last reply that the server used.
        keep: the arrays that the method stores, by name.

    Raises:
        SiteError: an array is not finite, because training diverged. Under the hospital's own cap
            on epsilon such values are replaced by finite ones, because an error would reveal them.
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
