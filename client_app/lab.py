"""One message at one site, the same for every method: its arrays, training, measuring, the reply.

A method (``client_app/methods``) says in what order these happen. Whatever leaves a site leaves by
``Lab.reply``; ``Lab.fit`` and ``Lab.privacy`` hide each patient in what is trained and averaged.
"""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import cached_property, partial
from typing import cast

import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from torch import Tensor
from torch.optim import Optimizer

from fedsilo.client_app.outbound import MEMORY, Arrays, Outbound
from fedsilo.client_app.patients import PatientPrivacy
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.site.private_state import SiteState
from fedsilo.client_app.training.evaluation import measure, measured_parts, of_labels
from fedsilo.client_app.training.initial_network import class_weights, initial_classifier
from fedsilo.client_app.training.loop import (
    AfterStep,
    Objective,
    Options,
    Penalty,
    annealed,
    counted_steps,
    train_locally,
)
from fedsilo.client_app.training.pacing import PREFIX, train_continued
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.array_names import with_prefix
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import (
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
    TRAINED,
    UNREPEATABLE,
    Instruction,
    measurement,
)
from fedsilo.models.contract.settings import SERVER, SUMS, CommonSettings
from fedsilo.models.maths.dirichlet import evidences
from fedsilo.models.networks.exchanged import exchanged_arrays, load_exchanged
from fedsilo.models.networks.site_network import SiteNetwork, TokenClassifier
from fedsilo.models.privacy.noisy_metrics import noisy_metrics, parts_bound
from fedsilo.models.privacy.summed_metrics import MEASURED
from fedsilo.strategies.wire.records import unpack

_COUNTED = "counted/"  # in a site's state what it kept with the last reply that counted


class Lab:
    """What a method can use while it answers one message."""

    def __init__(
        self,
        session: SiteSession,
        content: RecordDict,
        instruction: Instruction,
        state_files: SiteState | None = None,
    ) -> None:
        self.session = session  # what is the same for all messages of a run
        self.instruction = instruction  # what the server asks for
        self.content = content  # the message's records
        self.site = session.silo.name  # the site's name
        tabular = session.silo.features and instruction.phase not in SECURING
        # Its data, a table's features standardised
        self.silo = session.silo_for(content) if tabular else session.silo
        # The run's settings, with the site's own folders and limits over them
        self.common = session.settings
        # The same with the seed by which this site orders, chooses and leaves out samples; what all
        # sites must share, such as initial weights, is drawn by ``common``
        self.sampling = session.sampling
        self.compute = session.compute  # device and precision
        self.metrics: dict[str, float] = {}  # what the reply will say, by MetricRecord key
        # Each sample's parts in measurements that leave with noise, by MetricRecord key
        self._parts: dict[str, Tensor] = {}
        # Where the site's own state is
        self.state_files = state_files or SiteState(
            session.state_folder(instruction), session.digest
        )
        self._arrays: dict[str, Tensor] | None = None
        self._trained: SiteNetwork | None = None
        self._continued: Arrays | None = None  # what training continues from in the next round
        self._counted: Arrays = {}  # ``counted_state``, by the names under which it is kept
        # The way out, which ``reply`` takes
        self.outbound = Outbound(session, instruction, content, self.state_files.folder)
        self.packed: RecordDict | None = None  # what ``reply`` has packed
        # Names of the operations that were not deterministic
        self.unrepeatable: Collection[str] = ()
        self._started = time.perf_counter()
        # They belong to the result: other numbers of threads add up in another order
        torch.set_num_threads(self.common.threads)
        if self.compute.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.compute.device)

    def arrays(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the arrays received whose names begin with ``prefix``, without it."""
        if self._arrays is None:
            packed = self.content.array_records.get(ARRAYS, ArrayRecord())
            given = {name: unpack(array) for name, array in packed.items()}
            given = self.session.compression.received(given) if self.session.compression else given
            self._arrays = {name: torch.from_numpy(array) for name, array in given.items()}
        return {n.removeprefix(prefix): a for n, a in self._arrays.items() if n.startswith(prefix)}

    def state(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the arrays that this site kept in an earlier phase, as ``arrays`` does.

        What training continues from by itself, and what updates left out, is not among them.
        """
        return {
            name.removeprefix(prefix): array
            for name, array in self.stored.items()
            if name.startswith(prefix) and not name.startswith((PREFIX, MEMORY))
        }

    def counted_state(self) -> dict[str, Tensor]:
        """Return what this site kept with its last reply that the server has made use of.

        One that was lost, refused or too late is in no sum of the server. This reply keeps it too.
        """
        own = self.state("" if self.state_files.is_counted(self.instruction) else _COUNTED)
        counted = {name: array for name, array in own.items() if not name.startswith(_COUNTED)}
        self._counted = with_prefix(_COUNTED, counted)
        return counted

    @cached_property
    def privacy(self) -> PatientPrivacy:
        """How this message's training and statistics hide each patient."""
        return PatientPrivacy(self.session, self.instruction.round, self.outbound.ledger)

    @cached_property
    def stored(self) -> dict[str, Tensor]:
        """The site's whole state before this message, read and checked once."""
        return self.state_files.before(self.instruction) or {}

    def classifier(self, arrays: dict[str, Tensor] | None) -> TokenClassifier:
        """Return the run's network with ``arrays``, or with the seed's initial weights, placed.

        What has a kind of its own, ``<kind>/<array>``, is none of the network's.
        """
        network = initial_classifier(self.common, self.silo)
        if arrays is not None:
            load_exchanged(network, {n: array for n, array in arrays.items() if "/" not in n})
        return self.compute.place(network)

    def open(self) -> SiteNetwork:
        """Return the method's network for this message, in training and in evaluation alike."""
        return cast(SiteNetwork, self.session.method.open(self))

    def measure(self, network: SiteNetwork) -> None:
        """Measure the model received, if the server wants that."""
        if self.instruction.evaluate:
            self.metrics |= self.measured(network, INCOMING, ("val", "test"))

    def fit(
        self,
        network: SiteNetwork,
        *,
        objective: Objective | None = None,
        penalty: Penalty | None = None,
        after_step: AfterStep | None = None,
        beside: Optimizer | None = None,
        plan: Iterable[list[Tensor]] | None = None,
        order: Callable[[int], Tensor | None] | None = None,
        settings: CommonSettings | None = None,
        split: Split | None = None,
        steps: int = 0,
        aside: tuple[str, ...] = (),
        stays: bool = False,
    ) -> None:
        """Train ``network`` in place; the reply will say its loss and measure it again.

        Args:
            network: on the compute device.
            objective: the loss of a batch's inputs and labels, or None for the network's own.
            penalty: a term that is added to each batch's loss.
            after_step: called with each batch's inputs and the optimiser after its step.
            beside: an optimiser of what is trained with the network, by the same gradients; it
                steps after the network's.
            plan: the passes, each a list of batches of sample numbers, or None for the settings'.
            order: returns the order (n,) of an epoch's samples where epochs span rounds, or None.
            settings: how long and by which optimiser, or None for the run's.
            split: the samples, or None for the site's training samples.
            steps: optimiser steps, or 0 for those of ``settings``.
            aside: names a training of another model: no loss is reported and nothing is kept.
            stays: what is trained, and what is made of it, never leaves: it needs no noise.

        Raises:
            EpsilonSpentError: training is private, and its steps would exceed a cap.
            RefusedError: fewer samples or steps than the hospital allows are behind the training.
            SiteError: training diverged.
        """
        settings, split = settings or self.sampling, self.silo.train if split is None else split
        limits, smallest = self.session.limits, self.session.smallest_batch
        own = replace(settings, local_steps=steps) if steps else settings
        private = self.privacy.training(own, aside) if own.is_private() and not stays else None
        # The real number of samples would be in the learning rate and in the loss
        samples = private.told if private else len(split.labels)
        course = settings, self.instruction.round - 1, samples, smallest
        counted = weights = None
        scheduled = plan is None and (settings.schedule != "constant" or settings.warm_up)
        if scheduled or settings.rate_decay != "none":
            counted = counted_steps(own, *course, private, bool(aside))
        if settings.class_weights != "none":
            weights = class_weights(self.common, self.silo)[split.labels]
        options = Options(
            *(objective, penalty, after_step, beside, plan),
            before_pass=annealed(network, *course) if evidences(network) else None,
            counted=counted,
            # Not even a refusal may reveal what stays
            minimum_steps=0 if stays and self.session.cap else limits.minimum_steps_per_reply,
            minimum_batch=smallest,
            weights=weights,
            private=private,
            work=self.outbound.work,
        )
        key: tuple[int | str, ...] = (self.instruction.round, self.site, *aside)
        trainer = self.session.trainer or train_locally
        train = partial(trainer, network, split, own, self.compute, key)
        if aside:
            train(options)
            return
        self._continued, self._trained = {}, network
        alone = stays and settings.is_private()  # its moments have no noise: they end with it
        if settings.epoch_steps or (settings.optimiser_state == "run" and not alone):
            here = (self.stored, settings, samples, self.instruction.round, self.site, order)
            loss, self._continued = train_continued(train, options, network, *here)
        else:
            loss = train(options)
        self.metrics[measurement(TRAINED, "train", "loss")] = loss

    def reply(
        self,
        network: SiteNetwork | None = None,
        *,
        send: Arrays | None = None,
        keep: Arrays | None = None,
    ) -> RecordDict:
        """Store what stays here and pack what leaves; the one way out of a site.

        Args:
            network: what was trained; it is measured again, and sent unless ``send`` says what is.
            send: the arrays that leave, by name.
            keep: the arrays that this site keeps for itself.

        Raises:
            FedsiloError: it cannot be stored, or must not leave.
        """
        if network is not None and network is self._trained and self.instruction.evaluate:
            self.metrics |= self.measured(network, TRAINED, ("val",))
        if send is None and network is not None and self.instruction.returns:
            send = exchanged_arrays(network)
        send = (send or {}) if self.instruction.returns else {}
        updates = None  # in fewer bytes than 'send'
        if self.session.compression and send:
            updates, left = self.outbound.compressed(send, self.arrays(), self.stored)
            keep = {**(keep or {}), **left}
        kept = bool(keep or self._continued) and self._keep(keep or {})
        metrics = dict(self.outbound.metrics(self.metrics))
        if self._parts:  # they cost epsilon
            metrics |= self._noisy_metrics()
        if self.common.trust == SERVER:  # what an answer takes depends on the data
            metrics[SECONDS] = time.perf_counter() - self._started
            metrics[PEAK_MEMORY] = self.compute.peak_memory()
        if self.common.trust != SUMS:
            metrics[NUM_EXAMPLES] = sum(self.session.told()["train"])
        if self.common.is_private():
            metrics[DP_EPSILON] = self.outbound.ledger.epsilon()
        marks = {f"{UNREPEATABLE}{name}": 1 for name in sorted(self.unrepeatable)}
        record = MetricRecord({**metrics, KEPT_STATE: int(kept), **marks})
        self.packed = RecordDict({METRICS: record})
        # Measurements are summed in secret, though at the end no arrays are
        if send or (self.common.trust == SUMS and self.instruction.phase == EVALUATE):
            parts = (send, self.arrays(), self.metrics)
            self.packed[ARRAYS] = updates or self.outbound.record(*parts)
        return self.packed

    def measured(
        self, network: SiteNetwork, model: str, splits: tuple[str, ...]
    ) -> dict[str, float]:
        """Measure what the method measures, by MetricRecord key.

        Under a cap of the hospital's own there are none; ``reply`` makes noisy ones of what the
        samples add to those of the model received.
        """
        if self.session.cap:
            # The first is the model received; what follows it has names of its own and stays
            received = next(iter(self.session.method.measured(self, network)))
            for split in splits if model == INCOMING else ():
                self.measure_privately(received.network, split, (model, split))
            return {}
        values: dict[str, float] = {}
        for one in self.session.method.measured(self, network):
            for split in splits:
                samples: Split = getattr(self.silo, split)
                samples = of_labels(samples, one.within) if one.within is not None else samples
                if len(samples.labels) < (1 if one.within is None else self.common.sums_min_count):
                    continue  # the server knows from the site's label counts
                final = self.instruction.phase == EVALUATE and split == "test"
                found = measure(
                    one.network,
                    samples,
                    self.sampling,
                    self.compute,
                    (self.instruction.round, self.site, model, split),
                    one.probe(split) if one.probe else None,
                    self.common.sums_min_count if final and one.names is None else None,
                )
                for metric, value in found.items():
                    if name := metric if one.names is None else one.names.get(metric):
                        values[measurement(model, split, name)] = value
        return values

    def _noisy_metrics(self) -> dict[str, float]:
        reported = {name: sum(counts) for name, counts in self.session.told().items()}
        release = self.privacy.measurements(parts_bound(self._parts))
        return noisy_metrics(self._parts, reported, self.silo.task.classes, release)

    def measure_privately(
        self,
        network: SiteNetwork,
        split: str,
        key: tuple[str, ...],
        metrics: Collection[str] = MEASURED,
    ) -> None:
        """Note what each sample of ``split`` adds to measurements; ``reply`` adds noise to sums.

        Nothing is noted where the site does not tell of enough samples: of how many there are in
        truth, none included, nothing may follow.

        Args:
            network: what is measured, as it was received.
            split: val or test.
            key: of the random numbers, besides round and site.
            metrics: which of ``MEASURED``.
        """
        told = sum(self.session.told().get(split, ()))
        if not told or split not in self.session.measured_splits():
            return
        samples: Split = getattr(self.silo, split)
        place: tuple[int | str, ...] = (self.instruction.round, self.site, *key)
        parts = measured_parts(network, samples, self.sampling, self.compute, place)
        for metric in metrics:
            self._parts[measurement(INCOMING, split, metric)] = parts[metric]

    def _keep(self, arrays: Arrays) -> bool:
        """Store private state for this phase, if there is any, and tell whether there was."""
        continued = self._continued
        if continued is None and arrays:
            continued = {n: array for n, array in self.stored.items() if n.startswith(PREFIX)}
        kept = {**self._counted, **arrays, **(continued or {})}
        if self.session.cap:  # an error would tell what training made of a patient
            kept = {name: torch.nan_to_num(array) for name, array in kept.items()}
        if odd := [name for name, array in kept.items() if not array.isfinite().all()]:
            raise SiteError(
                f"training diverged, '{odd[0]}' contains non-finite values: lower "
                "'learning-rate'; nothing of it was kept"
            )
        if kept:
            self.state_files.store(self.instruction, kept)
        return bool(kept)
