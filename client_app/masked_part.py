"""A site's part of a secret sum: masked, so that the server learns only the sum over sites."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedsilo.client_app.privacy.ledger import LEDGER, Ledger
from fedsilo.client_app.privacy.secure_aggregation import SecureSite
from fedsilo.client_app.privacy.signing import signer_of
from fedsilo.client_app.privacy.summand import Summand
from fedsilo.client_app.privacy.unmasked_sums import SummedBefore
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.site.node import OWN
from fedsilo.core.errors import FedsiloError, RefusedError, SiteError
from fedsilo.core.messages import ARRAYS, Instruction
from fedsilo.core.methods import proves_sums
from fedsilo.core.settings.common_settings import SUMS
from fedsilo.core.settings_schema import as_mapping
from fedsilo.models.privacy.gaussian_mechanism import clip_to_norm, replace_nonfinite
from fedsilo.models.privacy.summed_metrics import bounds, to_unit_range
from fedsilo.strategies.wire.records import NDArray, to_record, unpack
from fedsilo.strategies.wire.secure_keys import SECURE, read_texts
from fedsilo.strategies.wire.signatures import digest

Arrays = Mapping[str, Tensor]


@dataclass(frozen=True)
class MaskedPart:
    """A site's part of the secret sum that one message asks for."""

    session: SiteSession  # the run at this site
    instruction: Instruction  # the server's request
    content: RecordDict  # the message's records
    folder: Path  # the folder of the site's private state in this run

    @property
    def ledger(self) -> Ledger:
        """The ledger of the epsilon that this run spends at the site."""
        settings, path = self.session.settings, self.folder / LEDGER
        return Ledger(path, settings.max_epsilon, settings.delta, self.session.cap)

    def masked_record(
        self, leaving: Arrays, received: Arrays, metrics: Mapping[str, float]
    ) -> ArrayRecord:
        """Build this site's part of a secret sum: its update, sample counts and metrics, masked.

        The update is ``leaving`` minus ``received``, scaled down to the norm 'secure.clip-norm' if
        larger. Only metrics that the server asks for are summed. The result has uint32 arrays.

        Raises:
            FedsiloError: the server asks for other arrays, or a rule forbids the sum.
        """
        update = {}
        for name, array in leaving.items():
            update[name] = array.cpu().double() - received[name]
        with self.prefix_round():
            return to_record(self._mask(update, metrics))

    def refuse_before_data(self) -> None:
        """Check before the training that nothing in the message can make the secret sum fail.

        It checks the requested metrics and arrays, the sites in the sum and the keys. If the server
        must prove each sum, the message must ask for the one that follows.

        Raises:
            FedsiloError: the sum is impossible or reveals too much.
        """
        with self.prefix_round():
            secure = self.secure_site()
            names = read_texts(secure.asked, "metrics")
            for name in names:
                self._bounds_of(name)
            received = self.received_arrays()
            self._zero_update(received)
            _, partners = secure.prepare_masking(received, names)
            if secure.proves:
                self._follow(secure, partners)

    def _follow(self, secure: SecureSite, partners: list[str]) -> None:
        """Check that the message asks for the sum that follows from the sum of the round before.

        From round 2 on, the server must prove that sum, over the same sites. The method then checks
        the values in the message.
        """
        before = None
        if self.instruction.round > 1:
            before = secure.proven_sum()
            if before.sites != partners:
                raise RefusedError(
                    f"the sum of the round before was over {', '.join(before.sites)}: sums over "
                    "other sites would reveal single sites' parts; let the same sites answer, or "
                    "begin a run with another 'run.name'"
                )
        self.session.method.follow(self, len(partners), before)

    def refuse_after_failure(self) -> None:
        """Check that this site did not fail in an earlier answer to the same received arrays.

        A failed site added 0 to that sum. A second answer would reveal its part as a difference of
        sums. A simulated site always passes.

        Raises:
            SiteError: the site failed on these arrays before.
            RefusedError: the hospital has no signing key or 'state-dir'.
        """
        with self.prefix_round():
            self.secure_site().refuse_after_failure(self.received_arrays())

    def failed_part(self) -> ArrayRecord:
        """Build the masked zeros that a site adds to a secret sum if it could not answer.

        It has the names and shapes of a successful site's part, so the server cannot tell who
        failed. It also adds 1 to the masked count of failed sites.

        Raises:
            FedsiloError: the zeros cannot be masked, for example because keys were used before.
        """
        with self.prefix_round():
            return to_record(self._mask(None, {}))

    def _mask(self, update: Arrays | None, metrics: Mapping[str, float]) -> dict[str, NDArray]:
        """Clip this site's update, turn it and the metrics into integers, and add the masks.

        ``update`` is None for zeros, if the site could not answer. Metrics are clipped to their
        bounds. A metric that is missing or not finite counts no samples.
        """
        received = self.received_arrays()
        zeros = self._zero_update(received)
        part = zeros
        if update is not None:
            part = dict(update)
            if self.session.stand_in is not None:  # an error would depend on a single patient
                part = {name: replace_nonfinite(array) for name, array in update.items()}
            if _shapes(part) != _shapes(zeros):
                raise SiteError(
                    f"the server asks to sum {sorted(zeros)}, but method "
                    f"'{self.session.settings.method}' sends {sorted(part)}"
                )
        # Clipped even if nothing was trained: zeros and updates must take the same path
        clipped = clip_to_norm(part, self.session.settings.clip_norm)
        secure = self.secure_site(update is None)
        scaled_metrics = {}
        for name in read_texts(secure.asked, "metrics"):
            # Scaled to 0 to 1, so that all metrics fit one quantisation; the server scales the mean
            # back
            least, largest = self._bounds_of(name)
            scaled_metrics[name] = to_unit_range(metrics.get(name), least, largest)
        return dict(secure.mask(clipped, received, scaled_metrics))

    def received_arrays(self) -> dict[str, NDArray]:
        """Return the arrays of all records in the message, named ``<record>/<array>``.

        Arrays that were compressed for the transfer stay compressed.
        """
        received = {}
        for record, arrays in self.content.array_records.items():
            for name, array in arrays.items():
                received[f"{record}/{name}"] = unpack(array)
        return received

    def _zero_update(self, received: Mapping[str, NDArray]) -> dict[str, Tensor]:
        """Return float64 zeros in the shape of each array that the server asks to sum, by name.

        Args:
            received: the message's arrays, named ``<record>/<array>``, which give the shapes.

        Raises:
            SiteError: the server asks for an array that the message lacks.
        """
        zeros = {}
        for name in read_texts(self._secure_record(), "arrays"):
            if f"{ARRAYS}/{name}" not in received:
                raise SiteError(f"the server asks to sum '{name[:80]}', but did not send it")
            zeros[name] = torch.zeros(received[f"{ARRAYS}/{name}"].shape, dtype=torch.float64)
        return zeros

    def _bounds_of(self, name: str) -> tuple[float, float]:
        """Return the bounds, lowest first, to which a metric is clipped before it is summed.

        A metric that is not summed raises a RefusedError. Metrics are summed only at trust 'sums'.
        """
        ends = bounds(name, self.session.task.limits(self.session.silo.shape.outputs))
        if ends is None or self.session.settings.trust != SUMS:
            raise RefusedError(f"'{name[:80]}' is not a measurement that is summed here")
        return ends

    def answer_phase(self) -> ConfigRecord:
        """Answer a phase of secure aggregation that trains nothing, such as "secure-keys".

        Such phases exchange keys, agree on the sites in the sum, or help the server to remove the
        masks.

        Raises:
            SiteError: the run has no secure aggregation, or the message is malformed.
            RefusedError: the answer would reveal more than a sum.
            CheckpointError: a file is unusable.
        """
        with self.prefix_round():
            if self.session.settings.secure_aggregation == "none":
                raise SiteError("the server asks for keys, but the run has no secure aggregation")
            return self.secure_site().answer(self.instruction.phase)

    def secure_site(self, failed: bool = False) -> SecureSite:
        """Build the object that does this site's side of secure aggregation for one message.

        A site that has ``failed`` adds zeros, and 1 to the count of failures. Under the hospital's
        own cap on epsilon, the sample counts are noisy.

        Raises:
            SiteError: the message has no record of secure aggregation.
            RefusedError: the hospital has no signing key or 'state-dir'.
        """
        session, instruction = self.session, self.instruction
        name, settings = session.silo.name, session.settings
        # A weight in the sum is min(samples, B) / B, with the B of the hospitals' site files
        samples = session.limits.secure_samples
        labels = session.silo.label_counts()
        if session.cap:
            # Only noisy counts may leave, and exact ones next to them would undo the noise
            labels = session.reported
        counts = {split: sum(of_labels) for split, of_labels in labels.items()}
        measures: tuple[str, ...] = ()
        if settings.trust == SUMS:
            measures = session.measured_splits()
        question = None
        if session.stand_in is not None:
            question = instruction.to_config()
        return SecureSite(
            name,
            instruction.run_name,
            instruction.round,
            settings,
            self.folder,
            self._secure_record(),
            signer_of(session.simulated, settings.seed, name, session.node_config),
            Summand(settings, counts, failed),
            digest("terms", sorted(session.run_config.items()), samples),
            session.limits.colluding_sites,
            measures,
            samples,
            self._sum_record(samples),
            question,
            proves_sums(settings),
        )

    def _secure_record(self) -> ConfigRecord:
        """Return the message's record of secure aggregation.

        Raises:
            SiteError: the message does not have this record.
        """
        record = self.content.config_records.get(SECURE)
        if record is None:
            raise SiteError(f"the message has no record '{SECURE}'")
        return record

    def _sum_record(self, samples: int) -> SummedBefore | None:
        """Return the object that records this hospital's secret sums over all its runs.

        With it the hospital refuses a second, different contribution for the same received arrays.
        ``samples`` scales each site's contribution. The result is None at a simulated site, or
        without 'state-dir'.
        """
        session = self.session
        if session.simulated or "state-dir" not in session.node_config:
            return None
        folder = Path(str(session.node_config["state-dir"])) / OWN / session.silo.name
        # Settings that scale a part; sums of the same arrays under other scales would reveal it
        terms = digest("scale", session.digest, session.settings.clip_norm, samples)
        about = ""
        if proves_sums(session.settings):
            # Two fits of other columns begin with the same arrays, but are different questions
            own = sorted(as_mapping(session.method.settings).items())
            about = digest("about", session.settings.dataset, own).hex()
        return SummedBefore(folder, terms.hex(), about)

    @contextmanager
    def prefix_round(self) -> Iterator[None]:
        """Put site, round and "secure aggregation" before a FedsiloError that the block raises.

        The block is the body of the ``with`` statement. The text becomes "site <name>, round
        <number>: secure aggregation: <text>". The error keeps its type. Other exceptions pass
        unchanged.
        """
        try:
            yield
        except FedsiloError as error:
            place = f"site {self.session.silo.name}, round {self.instruction.round}"
            raise type(error)(f"{place}: secure aggregation: {error}") from None


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in arrays.items()}
