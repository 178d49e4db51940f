"""What a site does with one message, the same for every method: the only way out of a site.

It opens the network, measures the model that came, trains it, measures it again, stores what the
method keeps and packs the reply. What each of these means is the method's own, see
``client_app/methods/base.py``; arrays leave by ``reply`` alone, which clips and noises them.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import final

from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from torch import Tensor

from fedsilo.client_app.methods.base import Answer, MeasuredModel, SiteMethod
from fedsilo.client_app.privacy.blur import blurred
from fedsilo.client_app.privacy.measurements import LOSS_BOUND, noised, of_enough, rounded
from fedsilo.client_app.privacy.protection import LEDGER, protect, spend_measurements
from fedsilo.client_app.privacy.secure_aggregation import SecureSite, drop_secrets
from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.evaluation import measure
from fedsilo.client_app.training.going_on import train_on
from fedsilo.client_app.training.loop import LocalTraining, train_locally
from fedsilo.client_app.training.pacing import PREFIX, train_paced
from fedsilo.client_app.training.repeatability import noted_operations
from fedsilo.models.contract.errors import FedsiloError, SiteError
from fedsilo.models.contract.messages import (
    ARRAYS,
    EVALUATE,
    INCOMING,
    KEPT_STATE,
    METRICS,
    NUM_EXAMPLES,
    PEAK_MEMORY,
    SECONDS,
    SECURING,
    TRAINED,
    TRAINING,
    UNREPEATABLE,
    measurement,
)
from fedsilo.models.networks.site_network import SiteNetwork
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.secure_keys import SECURE


@final
class SiteRound:
    """One message at one site.

    Attributes:
        method: what the site does of its own.
    """

    def __init__(self, method: SiteMethod) -> None:
        self.method = method
        self._instruction = method.request.instruction
        self._started = time.perf_counter()
        self._kept_state = False
        self._unrepeatable: Collection[str] = ()

    def answer(self) -> RecordDict:
        """Answer a phase, and name the operations that were not deterministic.

        Raises:
            SiteError: the method has no such phase, or 'deterministic' refuses an operation.
        """
        with noted_operations() as self._unrepeatable:
            return self._answered()

    def _answered(self) -> RecordDict:
        """Answer a phase: one that trains here, other phases by the method's own ``phase_<name>``.

        Raises:
            SiteError: the method has no such phase.
        """
        phase = self._instruction.phase
        if phase in TRAINING:
            return self.train()
        if phase in SECURING:
            return self.secured()
        handler: Callable[[], Answer] | None = getattr(self.method, f"phase_{phase}", None)
        if handler is None:
            raise SiteError(
                f"site {self.method.silo.name}: method '{self.method.common.method}' has no phase "
                f"'{phase}'; server and site run different versions of fedsilo"
            )
        answer = handler()
        if answer.kept:
            self.keep({**self._progress(), **answer.kept})
        return self.reply(answer.metrics, answer.arrays)

    def secured(self) -> RecordDict:
        """Answer a phase of secure aggregation; errors name the site and the round.

        Raises:
            SiteError: the run has none, or as ``SecureSite.answer``.
        """
        with self._naming_round():
            if self.method.common.secure_aggregation == "none":
                raise SiteError("the run has no secure aggregation, and keys for it are asked for")
            record = self._secure_site().answer(self._instruction.phase)
        reply = self.reply({})
        reply[SECURE] = record
        return reply

    def _secure_site(self) -> SecureSite:
        method = self.method
        record = method.request.content.config_records.get(SECURE)
        if record is None:
            raise SiteError(f"the message has no record '{SECURE}'")
        folder = method.context.state.folder
        round_ = self._instruction.round
        return SecureSite(method.silo.name, round_, method.common, folder, record)

    @contextmanager
    def _naming_round(self) -> Iterator[None]:
        try:
            yield
        except FedsiloError as error:
            place = f"site {self.method.silo.name}, round {self._instruction.round}"
            raise type(error)(f"{place}: secure aggregation: {error}") from None

    def measure_only(self) -> RecordDict:
        """Measure the incoming model on validation and test data, and reply."""
        drop_secrets(self.method.context.state.folder)
        with noted_operations() as self._unrepeatable:
            network = self.method.open_network()
            return self.reply(self.measured(network, INCOMING, ("val", "test")))

    def train(self) -> RecordDict:
        """Measure the incoming model, train it on this silo, measure it again, reply."""
        method, evaluate = self.method, self._instruction.evaluate
        if method.common.secure_aggregation != "none":
            with self._naming_round():
                self._secure_site().ready()  # an hour's training would be for nothing
        network = method.open_network()
        metrics = self.measured(network, INCOMING, ("val", "test")) if evaluate else {}
        training = method.local_training(network)
        loss, progress = self.fit(training)
        metrics[measurement(TRAINED, "train", "loss")] = loss
        if evaluate and not training.only_measured:
            metrics |= self.measured(network, TRAINED, ("val",))
        if kept := method.kept(network) | progress:
            self.keep(kept)
        arrays = method.outgoing(network) if self._instruction.returns else {}
        return self.reply(metrics | training.metrics, arrays)

    def fit(self, training: LocalTraining) -> tuple[float, dict[str, Tensor]]:
        """Train, and return the loss and what training itself goes on from, to be kept.

        The loss is the mean over the last epoch, or over the steps of a paced round.
        """
        context = self.method.context
        round_, site = self._instruction.round, self.method.silo.name
        if training.only_measured:
            key, split = (round_, site, "train"), training.split
            values = measure(training.network, split, training.settings, training.compute, key)
            return values["loss"], {}
        if training.settings.epoch_steps:
            return train_paced(training, context.stored, round_, site)
        if training.settings.optimiser_state == "run":
            return train_on(training, context.stored)
        return train_locally(training), {}

    def _progress(self) -> dict[str, Tensor]:
        """Return what training itself goes on from: optimiser, order of samples, place in it."""
        stored = self.method.context.stored
        return {name: array for name, array in stored.items() if name.startswith(PREFIX)}

    def measured(
        self, network: SiteNetwork, model: str, splits: tuple[str, ...]
    ) -> dict[str, float]:
        """Return the measurements of ``network`` on ``splits``, by MetricRecord key."""
        values: dict[str, float] = {}
        for measured in self.method.measured(network):
            for split in splits:
                values |= self._measured_on(measured, model, split)
        return values

    def _measured_on(self, measured: MeasuredModel, model: str, split: str) -> dict[str, float]:
        method, names = self.method, measured.names
        samples = method.silo.splits()[split]
        if not len(samples):
            return {}  # the server knows from the site's label counts
        final = self._instruction.phase == EVALUATE and split == "test"
        values = measure(
            measured.network,
            samples,
            method.drawing,
            method.compute,
            (self._instruction.round, method.silo.name, model, split),
            method.probe(measured.network, split),
            LOSS_BOUND if method.request.own_cap else math.inf,
            method.common.sums_min_count if final and names is None else None,
        )
        return {
            measurement(model, split, names[metric] if names else metric): value
            for metric, value in values.items()
            if names is None or metric in names
        }

    def keep(self, arrays: Mapping[str, Tensor]) -> None:
        """Store private state for this phase; the reply will say that there is some.

        Raises:
            SiteError: the last step of training left values that are not finite.
        """
        for name, array in arrays.items():
            if not array.isfinite().all():
                raise SiteError(
                    f"training diverged, '{name}' holds values that are not finite: lower "
                    "'learning-rate'; nothing of it was kept"
                )
        self.method.context.state.store(self._instruction, dict(arrays))
        self._kept_state = True

    def reply(
        self, metrics: Mapping[str, float], arrays: Mapping[str, Tensor] | None = None
    ) -> RecordDict:
        """Pack a reply; ``seconds`` is the time since the message was opened.

        This is the one way out of a site: no array leaves but by ``protect``.
        """
        leaving, counted = self._protected(arrays or {})
        record = MetricRecord(
            {
                **self._told(metrics),
                **counted,
                NUM_EXAMPLES: len(self.method.silo.train),
                SECONDS: time.perf_counter() - self._started,
                PEAK_MEMORY: peak_memory_bytes(self.method.compute),
                KEPT_STATE: int(self._kept_state),
                **{f"{UNREPEATABLE}{name}": 1 for name in sorted(self._unrepeatable)},
            }
        )
        records = RecordDict({METRICS: record})
        if leaving:
            records[ARRAYS] = ArrayRecord(
                {name: Array(array) for name, array in sorted(self._as_sent(leaving).items())}
            )
        return records

    def _as_sent(self, leaving: Mapping[str, Tensor]) -> dict[str, NDArray]:
        """Return arrays as they travel: float32, or for a sum that tells no summand masked."""
        if self.method.common.secure_aggregation == "none":
            return {
                name: tensor.detach().float().cpu().contiguous().numpy()
                for name, tensor in leaving.items()
            }
        with self._naming_round():
            return dict(self._secure_site().masked(leaving, self.method.clip_reference()))

    def _noise_share(self) -> float:
        """Return the part of the noise that this site adds to an update of weight 1.

        The update is weighted after it is noised: the noise of a light one must be larger before.
        """
        common = self.method.common
        if common.secure_aggregation == "none" or common.secure_noise == "own":
            return 1.0
        with self._naming_round():
            secure = self._secure_site()
            return 1 / (math.sqrt(secure.threshold()) * secure.weight())

    def _protected(
        self, arrays: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        method = self.method
        common, blur = method.common, method.context.limits.blur
        clipped = bool(arrays and common.clip_norm)
        reference = method.clip_reference() if arrays and (clipped or blur) else {}
        if arrays and blur and not common.noise_multiplier:  # before: a clip bounds what leaves
            arrays = blurred(arrays, reference, method.context.shares, blur)
        leaving, counted = protect(
            arrays,
            reference if clipped else {},
            method.common,
            method.request,
            method.silo.name,
            method.context.state.folder / LEDGER,
            self._noise_share() if clipped else 1.0,
        )
        return (method.presentable(leaving) if clipped else leaving), counted

    def _told(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return what of the metrics leaves; under a cap of the hospital's own it costs epsilon."""
        method, limits = self.method, self.method.context.limits
        sizes = {name: len(split) for name, split in method.silo.splits().items()}
        metrics = of_enough(metrics, sizes, limits.minimum_measured)
        own = method.request.own_cap
        if own is None:
            return rounded(metrics, limits.metric_digits)
        noise = method.common.noise_multiplier
        told, measured = noised(metrics, sizes, method.silo.task.classes, noise)
        if measured:
            spend_measurements(own, noise)
        return told


def peak_memory_bytes(compute: Compute) -> int:
    """Return the most memory held: on the GPU since the message began, else this process' RSS."""
    if on_device := compute.peak_memory():
        return on_device
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
