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

    A phase is a named step of a round, such as "train". A phase of secure aggregation trains
    nothing and adds its own record.

    Raises:
        SiteError: the method lacks the phase, or does not return ``Outgoing``.
        FedsiloError: the phase fails, or its result cannot leave.
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
    """Load a hospital's real data for this message, in place of zero samples.

    The phase and the secret sum are checked before the data are read. With ``final``, the method
    needs no phase. The returned session is a copy.

    Raises:
        FedsiloError: the phase, the secret sum or the data are unusable, or this hospital failed
            before on the same arrays.
    """
    if not final:
        session.phase_function(instruction.phase)
    # Before the data are read, so that such a refusal cannot depend on a patient
    masked_part = MaskedPart(session, instruction, content, session.state_folder(instruction))
    masked_part.refuse_before_data()
    note_opening()
    masked_part.refuse_after_failure()
    return session.with_data()


def failed_answer(
    session: SiteSession, instruction: Instruction, content: RecordDict
) -> RecordDict:
    """Build a hospital's reply after a failure, so that it looks like a successful reply.

    Where a successful reply has masked arrays, this one has masked zeros, which add 0 to the secret
    sum. Except in the final evaluation, the hospital's newest stored arrays are stored again for
    this message.

    Raises:
        FedsiloError: the zeros cannot be masked.
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

    This answers the final evaluation. A split without samples adds no metrics. At trust 'sums' the
    metrics leave masked, so that the server learns only their sum over sites.

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

    Arrays leave only if the server expects some: ``outgoing.send`` or, if None, those of
    ``outgoing.network``. With secure aggregation they leave masked. If metrics are requested, a
    trained network is first measured.

    Raises:
        FedsiloError: an array is not finite, or cannot be stored or masked.
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

    An update is a weight minus the received array of the same name. Batch norm's statistics are
    never compressed. A compressed update that is not finite raises a SiteError.
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

    At trust 'sums' this holds in the final evaluation, and whenever the server expects arrays. It
    never holds for a phase of secure aggregation itself.
    """
    phase = lab.instruction.phase
    if lab.common.trust != SUMS or phase in SECURING:
        return False
    # A site that failed sends zeros here, so without a record the server could tell who failed
    return phase == EVALUATE or lab.instruction.returns


def _leaving_metrics(lab: Lab) -> dict[str, float]:
    """Return the metrics that may leave at the run's level of trust: key -> value.

    At trust 'sums' no exact metric leaves here. Under the hospital's own cap on epsilon, only those
    that depend on no patient do. The sums of ``lab.sample_parts`` leave with noise.
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
    """Write the arrays that the site keeps, and tell whether a file was written.

    The file has ``keep``, ``lab.counted`` and the optimiser's moments. Without new arrays nothing
    is written, except at a hospital that declares its data. Arrays that are not finite raise a
    SiteError.
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
