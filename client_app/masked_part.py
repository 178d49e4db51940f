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

        The masks hide the part from the server, which can remove them only from the sum over sites.

        Args:
            leaving: the arrays that leave, by name. They must be exactly those that the server asks
                to sum.
            received: the arrays that the site received, by name. The update is ``leaving`` minus
                ``received``, scaled down to the joint norm 'secure.clip-norm' if it is larger.
            metrics: the measured metrics. Only those that the server asks for are summed.

        Returns:
            A record of uint32 arrays, with the names and shapes that the server expects.

        Raises:
            FedsiloError: the update's arrays are not those that the server asks for, or the mask is
                refused (``SecureSite.mask``). The error names site and round.
        """
        update = {}
        for name, array in leaving.items():
            update[name] = array.cpu().double() - received[name]
        with self.prefix_round():
            return to_record(self._mask(update, metrics))

    def refuse_before_data(self) -> None:
        """Check before the training that nothing in the message can make the secret sum fail.

        A hospital that declares its data does this before it opens them, because a later refusal
        could depend on a patient. These things are checked:

        - The message's record of secure aggregation, and the metrics and arrays in it.
        - The rules of ``SecureSite.prepare_masking``, such as enough sites and unused keys.
        - If the method requires the server to prove each sum: the message asks for exactly the sum
          that follows from the last one.

        Raises:
            FedsiloError: the sum is impossible or reveals too much. The error names site and round.
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
        """Check that the message asks the question that follows from the sum of the round before.

        A question is the values at which the server asks for a sum, such as the coefficients of a
        fit. Some methods require the server to prove each sum to the sites. From the second round
        on, the site checks this proof, and that the proven sum was over the same sites. Then the
        method computes the next question itself, and compares it with the message. In round 1 there
        is no sum before, and only the method checks.

        Args:
            secure: the site's side of secure aggregation.
            partners: the names of all sites, including this one, in the sum that the message asks
                for.

        Raises:
            SiteError: the proof is missing or malformed.
            RefusedError: the proof is wrong, the sum before was over other sites, or the message
                asks another question.
            CheckpointError: the site's records are damaged, or cannot be written.
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

        A site that fails adds 0 to a sum. A second answer would add this site's part, and the
        server could subtract the first sum from the second. A simulated site keeps no record of
        failures and passes. Each error names site and round.

        Raises:
            SiteError: the site failed on these arrays before, or the message has no record of
                secure aggregation.
            RefusedError: the hospital has no usable signing key, or no 'state-dir'.
            CheckpointError: the record of earlier sums is damaged, or the lock file of the signing
                key cannot be written.
        """
        with self.prefix_round():
            self.secure_site().refuse_after_failure(self.received_arrays())

    def failed_part(self) -> ArrayRecord:
        """Build the masked zeros that a site adds to a secret sum if it could not answer.

        The part also adds 1 to the masked count of failed sites, so the server learns how many
        sites failed, but not which. It has the names and shapes of a successful site's part, so the
        server cannot tell the two apart.

        Raises:
            FedsiloError: the zeros cannot be masked, for example because this round's keys were
                used before. The error names site and round.
        """
        with self.prefix_round():
            return to_record(self._mask(None, {}))

    def _mask(self, update: Arrays | None, metrics: Mapping[str, float]) -> dict[str, NDArray]:
        """Clip this site's update, turn it and the metrics into integers, and add the masks.

        The result has the names and shapes that the server expects, whether or not the site could
        answer. At a hospital that declares its data, finite numbers first replace all others in the
        update, because an error could depend on a single patient.

        Args:
            update: the arrays minus the received arrays, by name; None for zeros, if the site could
                not answer.
            metrics: the measured metrics by name. Those that the server asks for are clipped to
                their bounds. A metric that is missing or not finite adds 0, and counts no samples.

        Raises:
            SiteError: the update's names or shapes differ from those that the server asks for.
            FedsiloError: a metric has no bounds, or the mask is refused (``SecureSite.mask``).
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

        They depend on the metric's name and the run's task. Only at trust 'sums' are metrics
        summed.

        Raises:
            RefusedError: the metric is not one that is summed, or the run's trust is not 'sums'.
        """
        ends = bounds(name, self.session.task.limits(self.session.silo.shape.outputs))
        if ends is None or self.session.settings.trust != SUMS:
            raise RefusedError(f"'{name[:80]}' is not a measurement that is summed here")
        return ends

    def answer_phase(self) -> ConfigRecord:
        """Answer a phase of secure aggregation that trains nothing, such as "secure-keys".

        Before the weights are summed, such phases exchange keys. Afterwards they agree on the sites
        in the sum, and help the server to remove the masks from the sum. Each error names site and
        round.

        Returns:
            The record for the reply (``SecureSite.answer``).

        Raises:
            SiteError: the run has no secure aggregation, or the message is malformed.
            RefusedError: the answer would reveal more than a sum.
            CheckpointError: the site's secrets or records are damaged, or cannot be written.
        """
        with self.prefix_round():
            if self.session.settings.secure_aggregation == "none":
                raise SiteError("the server asks for keys, but the run has no secure aggregation")
            return self.secure_site().answer(self.instruction.phase)

    def secure_site(self, failed: bool = False) -> SecureSite:
        """Build the object that does this site's side of secure aggregation for one message.

        The object makes keys, masks this site's numbers, and signs the list of sites in the sum.
        The site's weight in the sum depends on its exact sample counts. Under the hospital's own
        cap on epsilon the reported noisy counts are used instead.

        Args:
            failed: True if the site could not answer. It then adds zeros, and 1 to the count of
                failures.

        Raises:
            SiteError: the message has no record of secure aggregation.
            RefusedError: the hospital has no usable signing key, or no 'state-dir'.
            CheckpointError: the lock file of the signing key cannot be written.
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

        With the record the hospital refuses a second, different contribution to sums over the same
        received arrays, because the difference would reveal it. No file is read here. The object
        has two digests:

        - The first is over all values that scale a contribution: ``session.digest`` (the settings
          that may not change during a run), 'secure.clip-norm' and ``samples``.
        - The second is over the data set and the method's settings, if the run's server must prove
          to the sites that its totals are right. Such methods may ask different questions with the
          same arrays. For any other method it is "".

        Args:
            samples: 'secure-samples', the number of samples by which each site's contribution is
                scaled.

        Returns:
            The record. None at a simulated site, or if the node config has no 'state-dir'.
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
