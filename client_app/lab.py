"""One message at one site, the same for every method: arrays, training, measuring and the reply.

A method (``client_app/methods``) decides their order and returns an ``Outgoing``, from which
``Lab.pack`` makes the reply. ``Lab.fit`` and ``Lab.privacy`` hide each patient in everything that
is trained or averaged.
"""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import cast

import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from torch import Tensor
from torch.optim import Optimizer

from fedsilo.client_app.outbound import Arrays, Outbound
from fedsilo.client_app.patients import PatientPrivacy
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.site.private_state import SiteState
from fedsilo.client_app.training.evaluation import measure, measured_parts, of_labels
from fedsilo.client_app.training.initial_network import class_weights, initial_classifier
from fedsilo.client_app.training.loop import (
    AfterStep,
    LocalTraining,
    Objective,
    Penalty,
    annealed,
    counted_steps,
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

# The prefix in a site's state of arrays kept with the last reply that counted
_COUNTED = "counted/"


@dataclass(frozen=True)
class Outgoing:
    """The result of a method's phase: the arrays that leave the site, and those that stay.

    The lab packs it after the site's own checks. Nothing else can leave.
    """

    # The trained network: it is measured again, and it is sent unless ``send`` is given
    network: SiteNetwork | None = None
    _: KW_ONLY
    # The arrays that leave, by name; None for those of ``network``.
    # Nothing leaves if the server asks for no arrays
    send: Arrays | None = None
    # The arrays that this site keeps, by name; None to keep none
    keep: Arrays | None = None


class Lab:
    """The tools of a method while it answers one message."""

    def __init__(
        self,
        session: SiteSession,
        content: RecordDict,
        instruction: Instruction,
        state_files: SiteState | None = None,
    ) -> None:
        self.session = session  # the run at this site
        self.instruction = instruction  # the server's request
        self.content = content  # the message's records
        self.site = session.silo.name
        tabular = session.silo.features and instruction.phase not in SECURING
        # The site's data; the features of a table are standardised
        self.silo = session.silo_for(content) if tabular else session.silo
        # The run's settings, overridden by the site's own folders and limits
        self.common = session.settings
        # The same with this site's own seed, for the order, choice and dropping of samples.
        # Values that all sites must share, such as initial weights, use the seed in ``common``
        self.sampling = session.sampling
        self.compute = session.compute  # device and precision
        self.metrics: dict[str, float] = {}  # the reply's metrics, by key of the MetricRecord
        # Each sample's contribution to metrics that leave with noise, by key of the MetricRecord
        self._parts: dict[str, Tensor] = {}
        # The files in which the site keeps its private state
        self.state_files = state_files or SiteState(
            session.state_folder(instruction), session.digest
        )
        self._arrays: dict[str, Tensor] | None = None
        self._trained: SiteNetwork | None = None
        # The optimiser's moments and the position in the
        # epoch, for the next round; None before ``fit``
        self._continued: Arrays | None = None
        self._counted: Arrays = {}  # ``counted_state`` under the names by which it is stored
        # Everything that leaves passes this
        self.outbound = Outbound(session, instruction, content, self.state_files.folder)
        # The names of the operations that were not deterministic
        self.unrepeatable: Collection[str] = ()
        self._started = time.perf_counter()
        # The thread count changes the summation order, and so the result
        torch.set_num_threads(self.common.threads)
        if self.compute.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.compute.device)

    def arrays(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the received arrays whose names begin with ``prefix``, without the prefix."""
        if self._arrays is None:
            packed = self.content.array_records.get(ARRAYS, ArrayRecord())
            given = {name: unpack(array) for name, array in packed.items()}
            given = self.session.compression.received(given) if self.session.compression else given
            self._arrays = {name: torch.from_numpy(array) for name, array in given.items()}
        return {n.removeprefix(prefix): a for n, a in self._arrays.items() if n.startswith(prefix)}

    def state(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the arrays kept in an earlier phase whose names begin with ``prefix``, without it.

        The optimiser's moments are left out, because the lab handles them itself.
        """
        return {
            name.removeprefix(prefix): array
            for name, array in self.stored.items()
            if name.startswith(prefix) and not name.startswith(PREFIX)
        }

    def counted_state(self) -> dict[str, Tensor]:
        """Return the arrays that this site kept with its last reply that the server used.

        A reply that was lost, refused or late is in none of the server's sums, so the arrays kept
        with it must not count. The result is stored again with this reply.
        """
        own = self.state("" if self.state_files.is_counted(self.instruction) else _COUNTED)
        counted = {name: array for name, array in own.items() if not name.startswith(_COUNTED)}
        self._counted = with_prefix(_COUNTED, counted)
        return counted

    @cached_property
    def privacy(self) -> PatientPrivacy:
        """The privacy mechanisms for this message's training and statistics."""
        return PatientPrivacy(self.session, self.instruction.round, self.outbound.ledger)

    @cached_property
    def stored(self) -> dict[str, Tensor]:
        """The site's whole state before this message, read and checked once."""
        return self.state_files.before(self.instruction) or {}

    def classifier(self, arrays: dict[str, Tensor] | None) -> TokenClassifier:
        """Build the run's network on the compute device.

        Args:
            arrays: the network's weights by name; None for initial weights drawn from the seed.
                Prefixed arrays (``<kind>/<name>``) do not belong to the network and are ignored.
        """
        network = initial_classifier(self.common, self.silo)
        if arrays is not None:
            load_exchanged(network, {n: array for n, array in arrays.items() if "/" not in n})
        return self.compute.place(network)

    def open(self) -> SiteNetwork:
        """Build the method's network for this message, both for training and for evaluation."""
        return cast(SiteNetwork, self.session.method.open(self))

    def measure(self, network: SiteNetwork) -> None:
        """Measure the received model, if the server asks for it."""
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
        """Train ``network`` in place; report its loss, and measure it again in the reply.

        Args:
            network: on the compute device.
            objective: the loss of a batch's inputs and labels; None for the network's own.
            penalty: a term that is added to each batch's loss, or None.
            after_step: called after each step with the batch's inputs and the optimiser, or None.
            beside: a second optimiser that steps with the same gradients, or None.
            plan: the passes, each a list of batches of sample numbers; None for the settings'.
            order: returns the order (n,) of an epoch's samples if epochs span rounds, or None.
            settings: the length and the optimiser of the training; None for the run's.
            split: the samples; None for the site's training samples.
            steps: the number of optimiser steps; 0 for that of ``settings``.
            aside: names the training of another model: no loss is reported and no state is kept.
            stays: whether the model and all that is made from it stay here, so it needs no noise.

        Raises:
            EpsilonSpentError: the training is private, and its steps would exceed a cap on epsilon.
            RefusedError: the training has fewer samples or steps than the hospital allows.
            SiteError: the training diverged.
        """
        settings = settings or self.sampling
        own = replace(settings, local_steps=steps) if steps else settings
        training = LocalTraining(
            network,
            self.silo.train if split is None else split,
            own,
            self.compute,
            (self.instruction.round, self.site, *aside),
            objective=objective,
            penalty=penalty,
            after_step=after_step,
            beside=beside,
            plan=plan,
            minimum_steps=self.session.limits.minimum_steps_per_reply,
            minimum_batch=self.session.smallest_batch,
            work=self.outbound.work,
        )
        if own.is_private() and not stays:
            training.private = self.privacy.training(own, aside)
        if stays and self.session.cap:
            training.minimum_steps = 0  # even a refusal could reveal what stays
        if settings.class_weights != "none":
            training.weights = class_weights(self.common, self.silo)[training.split.labels]
        if evidences(network):
            rounds, smallest = self.instruction.round - 1, training.minimum_batch
            training.before_pass = annealed(network, settings, rounds, training.samples, smallest)
        if settings.rate_decay != "none" or settings.schedule != "constant" or settings.warm_up:
            training.counted = self._count_steps(training, settings, bool(aside))
        train = self.session.trainer or LocalTraining.run
        if aside:
            train(training)
            return
        self._continued, self._trained = {}, network
        # The moments of a model that stays have no noise, so they must not outlive this training
        drops_moments = stays and settings.is_private()
        if settings.epoch_steps or (settings.optimiser_state == "run" and not drops_moments):
            round_ = self.instruction.round
            loss, self._continued = train_continued(training, self.stored, round_, self.site, order)
        else:
            loss = train(training)
        self.metrics[measurement(TRAINED, "train", "loss")] = loss

    def _count_steps(
        self, training: LocalTraining, settings: CommonSettings, aside: bool
    ) -> tuple[int, int] | None:
        """Return the step counts by which a schedule sets the learning rate; see ``counted_steps``.

        Args:
            training: its own settings give its number of steps.
            settings: the same without the ``steps`` of ``fit``; rounds are counted by these.
            aside: whether another model is trained.

        Returns:
            The counts; None if the rate is constant, because a schedule does not count a plan's
            steps.
        """
        if training.plan is not None and settings.rate_decay == "none":
            return None
        return counted_steps(
            training.settings,
            settings,
            self.instruction.round - 1,
            training.samples,
            training.minimum_batch,
            training.private,
            aside,
        )

    def reply(
        self,
        network: SiteNetwork | None = None,
        *,
        send: Arrays | None = None,
        keep: Arrays | None = None,
    ) -> Outgoing:
        """Return ``Outgoing(...)``; kept for plugins of version 0.1, and removed after 0.2."""
        return Outgoing(network, send=send, keep=keep)

    def pack(self, outgoing: Outgoing) -> RecordDict:
        """Store the arrays that stay, and pack those that leave; nothing else leaves a site.

        Raises:
            FedsiloError: something cannot be stored, or must not leave.
        """
        network, keep = outgoing.network, outgoing.keep or {}
        if network is not None and network is self._trained and self.instruction.evaluate:
            self.metrics |= self.measured(network, TRAINED, ("val",))
        send = self._leaving(outgoing)
        updates = None  # the same arrays as compressed updates
        if self.session.compression and send:
            updates = self.outbound.compressed(send, self.arrays())
        has_kept = bool(keep or self._continued) and self._keep(keep)
        has_kept = has_kept or self._keeps_in_any_case()
        marks = {f"{UNREPEATABLE}{name}": 1 for name in sorted(self.unrepeatable)}
        if self.session.stand_in is not None or self.session.cap:
            marks = {}  # which operations ran may depend on the data: a batch may be empty
        record = MetricRecord({**self._leaving_metrics(), KEPT_STATE: int(has_kept), **marks})
        packed = RecordDict({METRICS: record})
        if send or self._adds_to_a_sum():
            packed[ARRAYS] = updates or self.outbound.record(send, self.arrays(), self.metrics)
        return packed

    def _adds_to_a_sum(self) -> bool:
        """Tell whether a masked part is due whatever the method sends.

        Measurements are summed in secret, also at the end, when no arrays are sent. And a site that
        fails masks 0, so one that does not fail masks something too: also where the server has
        chosen settings by which the whole network stays here.
        """
        phase = self.instruction.phase
        if self.common.trust != SUMS or phase in SECURING:
            return False
        return phase == EVALUATE or self.instruction.returns

    def _leaving(self, outgoing: Outgoing) -> Arrays:
        """Return the arrays that leave: the phase's own, else the network's, if any are asked."""
        if not self.instruction.returns:
            return {}
        if outgoing.send is not None:
            return outgoing.send
        return {} if outgoing.network is None else exchanged_arrays(outgoing.network)

    def _leaving_metrics(self) -> dict[str, float]:
        """Return the metrics that may leave at the run's level of trust."""
        metrics = dict(self.outbound.metrics(self.metrics))
        if self._parts:
            metrics |= self._noisy_metrics()  # these cost epsilon
        if self.common.trust == SERVER:  # time and memory of an answer depend on the data
            metrics[SECONDS] = time.perf_counter() - self._started
            metrics[PEAK_MEMORY] = self.compute.peak_memory()
        if self.common.trust != SUMS:
            metrics[NUM_EXAMPLES] = sum(self.session.told()["train"])
        if self.common.is_private():
            metrics[DP_EPSILON] = self.outbound.ledger.epsilon()
        return metrics

    def measured(
        self, network: SiteNetwork, model: str, splits: tuple[str, ...]
    ) -> dict[str, float]:
        """Measure the networks that the method names on ``splits``; return metrics by key.

        A split without samples, or with too few samples of the measured labels, is left out. Under
        a hospital's own cap on epsilon the result is empty: ``pack`` then computes noisy metrics
        from each sample's contribution, only for the received model.

        Args:
            network: passed on to the method.
            model: "incoming" or "trained", the first part of each key.
            splits: any of "train", "val" and "test".
        """
        if self.session.cap:
            # Only the first is the received model; others have their own names and stay here
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
                    continue  # the server knows this from the site's label counts
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
        """Record each sample's contribution to metrics; ``pack`` adds noise to their sums.

        Nothing is recorded if the site reports too few samples, because nothing may reveal the true
        number, not even that it is 0.

        Args:
            network: the received network.
            split: "val" or "test".
            key: further keys of the random numbers, besides round and site.
            metrics: some of ``MEASURED``.
        """
        told = sum(self.session.told().get(split, ()))
        if not told or split not in self.session.measured_splits():
            return
        samples: Split = getattr(self.silo, split)
        place: tuple[int | str, ...] = (self.instruction.round, self.site, *key)
        parts = measured_parts(network, samples, self.sampling, self.compute, place)
        for metric in metrics:
            self._parts[measurement(INCOMING, split, metric)] = parts[metric]

    def _keeps_in_any_case(self) -> bool:
        """Store an empty state at a hospital that declares its data, so that all replies are alike.

        A site that fails stores its previous state, so a site that succeeds must store one too.
        """
        phase = self.instruction.phase
        if self.session.stand_in is None or phase == EVALUATE or phase in SECURING:
            return False
        self.state_files.store(self.instruction, dict(self._counted))
        return True

    def _keep(self, arrays: Arrays) -> bool:
        """Store the site's private state after this phase; tell whether there is any.

        Raises:
            SiteError: an array is not finite, because training diverged.
        """
        continued = self._continued
        if continued is None and arrays:
            continued = {n: array for n, array in self.stored.items() if n.startswith(PREFIX)}
        kept = {**self._counted, **arrays, **(continued or {})}
        if self.session.cap:  # an error would reveal the course of training on a patient's data
            kept = {name: torch.nan_to_num(array) for name, array in kept.items()}
        if odd := [name for name, array in kept.items() if not array.isfinite().all()]:
            raise SiteError(
                f"training diverged, '{odd[0]}' contains non-finite values: lower "
                "'train.learning-rate'; nothing of it was kept"
            )
        if kept:
            self.state_files.store(self.instruction, kept)
        return bool(kept)
