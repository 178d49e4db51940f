"""Answer a message of a round: a phase of the method, or of secure aggregation."""

from contextlib import suppress

from flwr.app import MetricRecord, RecordDict

from fedsilo.client_app.lab import Lab, Outgoing
from fedsilo.client_app.outbound import Outbound
from fedsilo.client_app.privacy.opened_data import note_opening
from fedsilo.client_app.privacy.round_secrets import drop_secrets
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.site.private_state import SiteState
from fedsilo.client_app.training.compute import noted_operations
from fedsilo.models.contract.errors import CheckpointError, SiteError
from fedsilo.models.contract.messages import (
    ARRAYS,
    EVALUATE,
    INCOMING,
    KEPT_STATE,
    METRICS,
    SECURING,
    TRAINING,
    Instruction,
)
from fedsilo.models.contract.settings import SUMS
from fedsilo.strategies.wire.secure_keys import SECURE


def answer(lab: Lab) -> RecordDict:
    """Answer one phase of a round.

    Raises:
        SiteError: the method has no such phase, or does not return ``Outgoing`` from it;
            'machine.deterministic' refuses an operation; or the run has no secure aggregation.
    """
    phase = lab.instruction.phase
    with noted_operations() as lab.unrepeatable:
        if phase in SECURING:
            record = lab.outbound.secured()
            reply = lab.pack(Outgoing())
            reply[SECURE] = record
            return reply
        if phase in TRAINING and lab.common.secure_aggregation != "none":
            # An hour of training would be in vain if the sum is refused afterwards
            lab.outbound.refuse_before_data()
        outgoing = lab.session.phase(phase)(lab)
        if not isinstance(outgoing, Outgoing):
            raise SiteError(
                f"site {lab.site}: phase '{phase}' of method '{lab.common.method}' must return "
                f"Outgoing(...), but returns {type(outgoing).__name__}: nothing else can leave a "
                "site"
            )
        return lab.pack(outgoing)


def open_data(session: SiteSession, instruction: Instruction, content: RecordDict) -> None:
    """Load the data of a hospital that declares them, after all checks that need no data.

    Raises:
        FedsiloError: the message is refused, or cannot be answered.
    """
    if session.stand_in is None or instruction.phase in SECURING:
        return
    if instruction.phase != EVALUATE:
        session.phase(instruction.phase)
    outbound = Outbound(session, instruction, content, session.state_folder(instruction))
    outbound.refuse_before_data()
    note_opening()
    outbound.refuse_after_failure()
    session.open_data()


def failed_answer(
    session: SiteSession, instruction: Instruction, content: RecordDict
) -> RecordDict:
    """Build the reply of a hospital that could not answer; it looks like every other reply.

    The site's state stays as it was, but is stored under the number of this message, because the
    reply tells the server that there is one.

    Args:
        session: the run at this site, with a stand-in for the data.
        instruction: the message's instruction.
        content: the message's records.

    Raises:
        FedsiloError: nothing can be masked, for a reason that does not depend on the data.
    """
    note_opening()  # a later error may tell what this site has masked before
    folder = session.state_folder(instruction)
    if instruction.phase != EVALUATE:
        files = SiteState(folder, session.digest)
        with suppress(CheckpointError):
            files.store(instruction, files.before(instruction) or {})
    kept = int(instruction.phase != EVALUATE)
    reply = RecordDict({METRICS: MetricRecord({KEPT_STATE: kept})})
    if instruction.returns or instruction.phase == EVALUATE:
        reply[ARRAYS] = Outbound(session, instruction, content, folder).failed_part()
    return reply


def evaluate(lab: Lab) -> RecordDict:
    """Measure the received model on validation and test data, and build the reply."""
    if lab.common.secure_aggregation != "none" and lab.common.trust != SUMS:
        drop_secrets(lab.state_files.folder)
    with noted_operations() as lab.unrepeatable:
        network = lab.open()
        lab.metrics |= lab.measured(network, INCOMING, ("val", "test"))
        return lab.pack(Outgoing())
