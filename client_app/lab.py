"""The tools of a method for one message: received arrays, stored state, training and measuring.

A method (``client_app/methods``) decides the order of the steps and returns an ``Outgoing``, from
which ``client_app.answer.pack`` makes the reply. ``Lab.fit`` and ``Lab.privacy`` apply the
hospital's floors and differential privacy to everything that is trained or averaged.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import cast

import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor
from torch.optim import Optimizer

from fedsilo.client_app.masked_part import Arrays, MaskedPart
from fedsilo.client_app.patients import PatientPrivacy
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.site.private_state import SiteState
from fedsilo.client_app.training.evaluation import Measured, measure, measured_parts, select_strata
from fedsilo.client_app.training.initial_network import class_weights, initial_classifier
from fedsilo.client_app.training.loop import (
    AfterStep,
    LocalTraining,
    Objective,
    Penalty,
    continue_from_earlier_rounds,
)
from fedsilo.client_app.training.paced_epochs import PREFIX, train_continued
from fedsilo.core.array_names import with_prefix
from fedsilo.core.messages import (
    ARRAYS,
    EVALUATE,
    INCOMING,
    SECURING,
    TRAINED,
    Instruction,
    measurement,
)
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.networks.site_network import SiteNetwork, TokenClassifier, load_exchanged
from fedsilo.strategies.wire.records import unpack

# The prefix in a site's state of arrays kept with the last reply that counted
_COUNTED = "counted/"


@dataclass(frozen=True)
class Outgoing:
    """The result of a method's phase: arrays that leave the site, and arrays that stay.

    Nothing else can leave, and the site's own checks come before anything leaves.
    """

    # The trained network: it is measured again, and it is sent unless ``send`` is given
    network: SiteNetwork | None = None
    _: KW_ONLY
    # The arrays that leave, by name; None for the arrays of ``network``.
    # Nothing leaves if the server asks for no arrays
    send: Arrays | None = None
    # The arrays that this site keeps, by name; None to keep no arrays
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
        # The site's data; the features of a table and a numeric outcome are standardised
        self.silo = session.silo
        if session.standardises and instruction.phase not in SECURING:
            self.silo = session.silo_for(content)
        # The run's settings, overridden by the site's own folders and limits
        self.common = session.settings
        # The same with this site's own seed, for the order, choice and dropping of samples.
        # Values that all sites must share, such as initial weights, use the seed in ``common``
        self.sampling = session.sampling
        # The run's loss, labels and metrics, with the scale of a numeric outcome
        self.task = session.task
        if self.silo.outcome is not None:
            self.task = self.task.scaled_by(self.silo.outcome)
        self.compute = session.compute  # device and precision
        self.metrics: dict[str, float] = {}  # the reply's metrics, by key of the MetricRecord
        # Each sample's contribution to metrics that leave with noise, by key of the MetricRecord
        self.sample_parts: dict[str, Tensor] = {}
        # The files of the site's private state
        self.state_files = state_files or SiteState(
            session.state_folder(instruction), session.digest
        )
        # Replaces ``LocalTraining.run`` in ``fit``, for a rehearsal that stops there
        self.run_training: Callable[[LocalTraining], float] | None = None
        self._arrays: dict[str, Tensor] | None = None
        self.trained: SiteNetwork | None = None
        # Optimiser moments and position in the epoch, for the next round; None before ``fit``
        self.continued: Arrays | None = None
        self.counted: Arrays = {}  # the arrays of ``counted_state``, by their stored names
        # The optimiser steps of this answer, and the samples that they used
        self.work: Counter[str] = Counter()
        # This site's part of a secret sum, and the ledger of its epsilon in this run
        self.masked_part = MaskedPart(session, instruction, content, self.state_files.folder)
        # The names of the operations that were not deterministic
        self.unrepeatable: Collection[str] = ()
        self.began = time.perf_counter()
        # The thread count changes the summation order, and so the result
        torch.set_num_threads(self.common.threads)
        if self.compute.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.compute.device)

    def arrays(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the received arrays whose names begin with ``prefix``, without this prefix.

        They come from the message's record ``ARRAYS``, in the order of the message. If the run
        compresses messages, the result is decompressed. It is empty if no name matches.
        """
        if self._arrays is None:
            packed = self.content.array_records.get(ARRAYS, ArrayRecord())
            given = {name: unpack(array) for name, array in packed.items()}
            if self.session.compression:
                given = self.session.compression.unpack_received(given)
            self._arrays = {name: torch.from_numpy(array) for name, array in given.items()}
        return {n.removeprefix(prefix): a for n, a in self._arrays.items() if n.startswith(prefix)}

    def state(self, prefix: str = "") -> dict[str, Tensor]:
        """Return this site's stored arrays whose names begin with ``prefix``, without this prefix.

        They are the newest arrays that the site stored before this message. The optimiser's moments
        are left out, because ``fit`` handles them itself. The result is empty if nothing was
        stored.
        """
        kept = {}
        for name, array in self.stored_state.items():
            if name.startswith(prefix) and not name.startswith(PREFIX):
                kept[name.removeprefix(prefix)] = array
        return kept

    def counted_state(self) -> dict[str, Tensor]:
        """Return the arrays that were stored with this site's last reply that the server used.

        A method starts from them if its stored arrays must match the server's sums, because a reply
        may be lost or late. The result is empty if the server has used no reply yet. The arrays are
        stored again with the next reply.
        """
        if self.state_files.is_counted(self.instruction):
            newest = self.state()
            counted = {name: a for name, a in newest.items() if not name.startswith(_COUNTED)}
        else:
            counted = self.state(_COUNTED)
        self.counted = with_prefix(_COUNTED, counted)
        return counted

    @cached_property
    def privacy(self) -> PatientPrivacy:
        """The differentially private mechanisms for this message's training and statistics."""
        return PatientPrivacy(self.session, self.instruction.round, self.masked_part.ledger)

    @cached_property
    def stored_state(self) -> dict[str, Tensor]:
        """The site's private state before this message, read once; empty if nothing was stored."""
        return self.state_files.load_before(self.instruction) or {}

    def classifier(self, arrays: dict[str, Tensor] | None) -> TokenClassifier:
        """Build the run's network, such as a ViT, on the compute device.

        Args:
            arrays: the network's weights by name; None for initial weights drawn from the run's
                seed. Names with a '/' do not belong to the network and are ignored.

        Raises:
            SettingError: the network cannot be built, or the arrays do not fit it.
        """
        network = initial_classifier(self.common, self.silo, self.task)
        if arrays is not None:
            load_exchanged(network, {n: array for n, array in arrays.items() if "/" not in n})
        return self.compute.place(network)

    def open(self) -> SiteNetwork:
        """Build the network for this message by calling the method's own ``open``."""
        return cast(SiteNetwork, self.session.method.open(self))

    def measure(self, network: SiteNetwork) -> None:
        """Measure the received model on validation and test data, and add its ``metrics``.

        Nothing is measured unless the server asks for it. The keys are
        ``incoming.<split>.<metric>``. If the hospital has its own cap on epsilon, each sample's
        contribution goes into ``sample_parts`` instead, so that noise can be added later.
        """
        if self.instruction.evaluate:
            self.metrics |= self.measure_splits(network, INCOMING, ("val", "test"))

    def fit(
        self,
        network: SiteNetwork,
        *,
        objective: Objective | None = None,  # None: the network's own loss
        penalty: Penalty | None = None,  # a term added to each batch's loss
        after_step: AfterStep | None = None,  # gets the batch's inputs and the optimiser
        beside: Optimizer | None = None,  # steps with the same gradients
        plan: Iterable[list[Tensor]] | None = None,  # passes, as batches of sample indices
        order: Callable[[int], Tensor | None] | None = None,  # epoch -> order of the samples
        settings: CommonSettings | None = None,  # None: the run's
        split: Split | None = None,  # None: the site's training samples
        steps: int = 0,  # 0: as many as in the settings
        aside: tuple[str, ...] = (),
        stays: bool = False,
    ) -> None:
        """Train ``network`` in place, and add its training loss to the metrics.

        By default the network's own loss and the site's training samples are used. ``aside`` names
        a further training in the same phase, whose loss is not reported. A model that ``stays``
        gets no privacy noise.

        Raises:
            RefusedError: the hospital's limits forbid the training.
            SiteError: the training diverged.
        """
        settings, round_ = settings or self.sampling, self.instruction.round
        training = LocalTraining(
            network,
            self.silo.train if split is None else split,
            replace(settings, local_steps=steps or settings.local_steps),
            self.compute,
            (round_, self.site, *aside),
            objective=objective,
            penalty=penalty,
            after_step=after_step,
            beside=beside,
            plan=plan,
            work=self.work,
        )
        self._protect_patients(training, aside, stays)
        continue_from_earlier_rounds(training, settings, round_ - 1, aside)
        # Simulated sites that were trained as one batch only pick up their result here
        run = self.session.trainers.get(training.key, self.run_training or LocalTraining.run)
        if aside:
            run(training)
            return
        self.continued, self.trained = {}, network
        # The moments of a model that stays have no noise, so they must not outlive this training
        drops_moments = stays and settings.is_private()
        if settings.epoch_steps or (settings.optimiser_state == "run" and not drops_moments):
            loss, self.continued = train_continued(
                training, self.stored_state, round_, self.site, order
            )
        else:
            loss = run(training)
        self.metrics[measurement(TRAINED, "train", "loss")] = loss

    def _protect_patients(
        self, training: LocalTraining, aside: tuple[str, ...], stays: bool
    ) -> None:
        """Give a training the hospital's minimums, the noise of a private run, and class weights.

        A private run charges the privacy ledger. A model that ``stays`` at the site gets no noise
        and costs nothing. Too small batches or too little epsilon raise a RefusedError.
        """
        training.minimum_steps = self.session.limits.minimum_steps_per_reply
        training.minimum_batch = self.session.smallest_batch
        if stays and self.session.cap:
            training.minimum_steps = 0  # even a refusal could reveal what stays
        if training.settings.is_private() and not stays:
            training.private = self.privacy.training(training.settings, aside)
        if training.settings.class_weights != "none":
            # A sample with a tiny weight hides no other, so the floor counts only larger weights
            training.weights = class_weights(self.common, self.silo)[training.split.labels]

    def reply(
        self,
        network: SiteNetwork | None = None,
        *,
        send: Arrays | None = None,
        keep: Arrays | None = None,
    ) -> Outgoing:
        """Return ``Outgoing(network, send=send, keep=keep)``; to be removed after version 0.2.

        Plugins written for version 0.1 call it. New ones return ``Outgoing`` directly.
        """
        return Outgoing(network, send=send, keep=keep)

    def measure_splits(
        self, network: SiteNetwork, model: str, splits: tuple[str, ...]
    ) -> dict[str, float]:
        """Measure a model on splits of the site's data: ``<model>.<split>.<metric>`` -> value.

        ``model`` is "incoming" or "trained". The method's ``measured`` chooses the networks,
        usually ``network`` alone. A split without samples adds no metrics. Under the hospital's own
        cap on epsilon the result is empty. The contributions to the received model's metrics are
        then recorded, to get noise later.
        """
        if self.session.cap:
            # Only the first is the received model; other networks keep their own names
            received = next(iter(self.session.method.measured(self, network)))
            if model == INCOMING:
                for split in splits:
                    self.measure_privately(received.network, split, (model, split))
            return {}
        values: dict[str, float] = {}
        for one in self.session.method.measured(self, network):
            for split in splits:
                for metric, value in self._measure_split(one, model, split).items():
                    values[measurement(model, split, metric)] = value
        return values

    def _measure_split(self, measured: Measured, model: str, split: str) -> dict[str, float]:
        """Return a network's metrics on one split, by their names in the reply.

        ``measured`` may limit the labels and the metrics. The result is empty without samples. With
        limited labels at least 'privacy.sums-min-count' samples are needed. ``model`` only enters
        the random seed.
        """
        samples: Split = getattr(self.silo, split)
        fewest = 1
        # A mean over few samples of a label reveals them, so the floor for sums applies here too
        if measured.within is not None:
            samples = select_strata(samples, self.task.strata(samples.labels), measured.within)
            fewest = self.common.sums_min_count
        if len(samples.labels) < fewest:
            return {}  # the server knows this from the site's label counts
        probe = None
        if measured.probe:
            probe = measured.probe(split)
        counts_from = None
        # Outcome counts are published once, for the final model's own metrics
        if self.instruction.phase == EVALUATE and split == "test" and measured.names is None:
            counts_from = self.common.sums_min_count
        key = (self.instruction.round, self.site, model, split)
        found = measure(
            measured.network,
            samples,
            self.sampling,
            self.compute,
            key,
            probe,
            counts_from,
            self.task,
        )
        if measured.names is None:
            return found
        return {
            measured.names[metric]: value
            for metric, value in found.items()
            if metric in measured.names
        }

    def measure_privately(
        self,
        network: SiteNetwork,
        split: str,
        key: tuple[str, ...],
        metrics: Collection[str] | None = None,
    ) -> None:
        """Record each sample's contribution to a split's metrics, so that noise can be added later.

        Contributions range from 0 to 1. ``sample_parts`` gets an array (n,) for each of
        ``metrics``, or for all if None. Nothing is recorded if the split's metrics may not leave,
        or if its reported number of samples is 0.
        """
        # The true number of samples must not be revealed, so it decides nothing here
        reported = sum(self.session.reported.get(split, ()))
        if not reported or split not in self.session.measured_splits():
            return
        samples: Split = getattr(self.silo, split)
        place: tuple[int | str, ...] = (self.instruction.round, self.site, *key)
        parts = measured_parts(network, samples, self.sampling, self.compute, place, self.task)
        for metric in parts if metrics is None else metrics:
            self.sample_parts[measurement(INCOMING, split, metric)] = parts[metric]
