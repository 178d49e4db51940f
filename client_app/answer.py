"""The answer to a message of a round: a phase of the method, or of secure aggregation."""

from flwr.app import RecordDict

from fedsilo.client_app.lab import Lab, Outgoing
from fedsilo.client_app.privacy.round_secrets import drop_secrets
from fedsilo.client_app.training.compute import noted_operations
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import INCOMING, SECURING, TRAINING
from fedsilo.models.contract.settings import SUMS
from fedsilo.strategies.wire.secure_keys import SECURE


def answer(lab: Lab) -> RecordDict:
    """Answer a phase of a round.

    Raises:
        SiteError: the method has no such phase or does not end it with ``Outgoing``,
            'deterministic' refuses an operation, or the run has no secure aggregation.
    """
    phase = lab.instruction.phase
    with noted_operations() as lab.unrepeatable:
        if phase in SECURING:
            record = lab.outbound.secured()
            reply = lab.pack(Outgoing())
            reply[SECURE] = record
            return reply
        if phase in TRAINING and lab.common.secure_aggregation != "none":
            with lab.outbound.naming_round():
                lab.outbound.secure_site().ready()  # an hour's training would be for nothing
        outgoing = lab.session.phase(phase)(lab)
        if not isinstance(outgoing, Outgoing):
            raise SiteError(
                f"site {lab.site}: phase '{phase}' of method '{lab.common.method}' must return "
                f"Outgoing(...), but returns {type(outgoing).__name__}: nothing else can leave a "
                "site"
            )
        return lab.pack(outgoing)


def evaluate(lab: Lab) -> RecordDict:
    """Measure the model received on validation and test data, and reply."""
    if lab.common.secure_aggregation != "none" and lab.common.trust != SUMS:
        drop_secrets(lab.state_files.folder)
    with noted_operations() as lab.unrepeatable:
        network = lab.open()
        lab.metrics |= lab.measured(network, INCOMING, ("val", "test"))
        return lab.pack(Outgoing())
