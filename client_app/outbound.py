"""What leaves a site: arrays, masked where only sums may be read, and metrics of enough samples."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedsilo.client_app.privacy.ledger import LEDGER, Ledger
from fedsilo.client_app.privacy.secure_aggregation import SecureSite
from fedsilo.client_app.privacy.signing import signer_of
from fedsilo.client_app.privacy.summand import Summand
from fedsilo.client_app.session import SiteSession
from fedsilo.models.contract.errors import FedsiloError, RefusedError, SiteError
from fedsilo.models.contract.messages import STEPS, Instruction
from fedsilo.models.contract.settings import SERVER, SUMS
from fedsilo.models.privacy.gaussian_mechanism import clipped_to
from fedsilo.models.privacy.summed_metrics import bounds, portion
from fedsilo.strategies.wire.records import ArrayError, NDArray, to_record, unpack
from fedsilo.strategies.wire.secure_keys import SECURE, texts
from fedsilo.strategies.wire.signatures import digest

Arrays = Mapping[str, Tensor]
# FedNova's steps, which follow from counts that have been told, and UEFL's codewords, from the seed
_OF_NO_PATIENT = (STEPS, "new-codewords")


@dataclass(frozen=True)
class Outbound:
    """The way out of a site for the answer to one message."""

    session: SiteSession  # of the run
    instruction: Instruction  # what the server asked for
    content: RecordDict  # the message's records
    folder: Path  # of the site's private state in this run
    # Optimiser steps that this answer took, and samples that they saw
    work: Counter[str] = field(default_factory=Counter)

    @property
    def ledger(self) -> Ledger:
        """What the site spends of its patients' privacy in this run."""
        settings, path = self.session.settings, self.folder / LEDGER
        return Ledger(path, settings.max_epsilon, settings.delta, self.session.cap)

    def record(
        self, leaving: Arrays, received: Arrays, metrics: Mapping[str, float] | None = None
    ) -> ArrayRecord:
        """Return arrays as they travel: float32, or masked for a sum that reveals no summand.

        Args:
            leaving: what leaves, by name.
            received: what the site was sent; a sum is of updates of it, clipped to 'clip-norm'.
            metrics: what was measured; what of it the server asks to sum goes with them.
        """
        sent: Mapping[str, NDArray]
        if self.session.settings.secure_aggregation == "none":
            sent = {n: a.detach().float().cpu().contiguous().numpy() for n, a in leaving.items()}
        else:
            update = {
                name: array.cpu().double() - received[name] for name, array in leaving.items()
            }
            clipped = clipped_to(update, self.session.settings.clip_norm)
            with self.naming_round():
                everything = {
                    f"{record}/{name}": unpack(array)
                    for record, arrays in self.content.array_records.items()
                    for name, array in arrays.items()
                }
                secure = self.secure_site()
                portions = self._portions(texts(secure.asked, "metrics"), metrics or {})
                sent = secure.masked(clipped, everything, portions)
        return to_record(sent)

    def compressed(self, leaving: Arrays, received: Arrays) -> ArrayRecord:
        """Pack arrays as they travel in fewer bytes.

        Args:
            leaving: what leaves, by name.
            received: what the site was sent, of which updates are sent.

        Raises:
            SiteError: an update is not finite; it names site, round and array.
        """
        compression = self.session.compression
        assert compression is not None
        try:
            sent = compression.packed(
                {n: a.detach().float().cpu().contiguous().numpy() for n, a in leaving.items()},
                {name: array.numpy() for name, array in received.items()},
            )
        except ArrayError as error:
            place = f"site {self.session.silo.name}, round {self.instruction.round}"
            raise SiteError(f"{place}: {error}") from None
        return to_record(sent)

    def _portions(self, names: Sequence[str], metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the measurements that the server asks to sum, each from 0 to 1."""
        portions = {}
        for name in names:
            ends = bounds(name, self.session.silo.task.classes)
            if ends is None or name not in metrics or self.session.settings.trust != SUMS:
                raise RefusedError(f"'{name[:80]}' is not a measurement that is summed here")
            portions[name] = portion(metrics[name], *ends)
        return portions

    def metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics that leave as they are.

        Under a cap of the hospital's own these say nothing of its patients: how many steps were
        taken follows from counts that have been told. Where the server is trusted with sums alone
        there are none.
        """
        settings = self.session.settings
        if settings.trust == SUMS:
            return {}
        if self.session.cap:
            return {name: metrics[name] for name in _OF_NO_PATIENT if name in metrics}
        limits = self.session.limits
        if settings.trust == SERVER and not settings.is_private():
            metrics = {**metrics, **self.work}  # of the real samples, which a private run hides
        if limits.minimum_measured <= 1:
            return metrics
        sizes = {name: sum(counts) for name, counts in self.session.told().items()}
        return limits.measured(metrics, sizes)

    def secured(self) -> ConfigRecord:
        """Answer a phase of secure aggregation; errors name the site and the round.

        Raises:
            SiteError: the run has none, or as ``SecureSite.answer``.
        """
        with self.naming_round():
            if self.session.settings.secure_aggregation == "none":
                raise SiteError("the run has no secure aggregation, and keys for it are asked for")
            return self.secure_site().answer(self.instruction.phase)

    def secure_site(self) -> SecureSite:
        """Return the site's side of secure aggregation in this round."""
        record = self.content.config_records.get(SECURE)
        if record is None:
            raise SiteError(f"the message has no record '{SECURE}'")
        session, instruction = self.session, self.instruction
        name, settings = session.silo.name, session.settings
        counts = {split: sum(labels) for split, labels in session.told().items()}
        measures = session.measured_splits() if settings.trust == SUMS else ()
        return SecureSite(
            name,
            instruction.run_name,
            instruction.round,
            settings,
            self.folder,
            record,
            signer_of(session.simulated, settings.seed, name, session.node_config),
            Summand(settings, counts, measures),
            digest("terms", sorted(session.run_config.items())),
            session.limits.colluding_sites,
        )

    @contextmanager
    def naming_round(self) -> Iterator[None]:
        """Put site and round before an error of secure aggregation."""
        try:
            yield
        except FedsiloError as error:
            place = f"site {self.session.silo.name}, round {self.instruction.round}"
            raise type(error)(f"{place}: secure aggregation: {error}") from None
