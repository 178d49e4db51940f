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

        They are the newest arrays that the site stored before this message. Names with ``counted/``
        belong to copies of older arrays, which ``counted_state`` has made. The optimiser's moments
        are left out, because ``fit`` handles them itself. The result is empty if nothing was
        stored, or if no name matches.
        """
        kept = {}
        for name, array in self.stored_state.items():
            if name.startswith(prefix) and not name.startswith(PREFIX):
                kept[name.removeprefix(prefix)] = array
        return kept

    def counted_state(self) -> dict[str, Tensor]:
        """Return the arrays that were stored with this site's last reply that the server used.

        A reply that was lost, refused or late is not in the server's sums. If a method's stored
        arrays must match these sums, it starts from this result and not from ``state``. The message
        says which reply the server used last. The result maps names to arrays, and is empty if the
        server has used no reply yet.

        The arrays are also put into ``self.counted``. ``pack`` stores them once more beside the new
        arrays, in case the reply to this message is lost.
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

        Nothing is measured if the server's request has ``evaluate`` off. The keys of the metrics
        are ``incoming.val.<metric>`` and ``incoming.test.<metric>``. A split without samples adds
        none.

        If the hospital has its own cap on epsilon, nothing is added to ``metrics``. Instead, each
        sample's contribution to each metric goes into ``sample_parts``. ``pack`` later adds noise
        to the sums of the contributions.

        Args:
            network: the network with the received model's weights, on the compute device.
        """
        if self.instruction.evaluate:
            self.metrics |= self.measure_splits(network, INCOMING, ("val", "test"))

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
        """Train ``network`` in place, and add its training loss to the metrics.

        If the method's ``Outgoing`` has this network, ``pack`` measures it on validation data. With
        'train.epoch-steps' an epoch may span rounds, and training continues where the last round
        stopped. With 'train.optimiser-state' "run" the optimiser continues too, except that of a
        model that stays at the site in a private run.

        Args:
            network: the network, on the compute device.
            objective: maps a batch's inputs and labels to its loss; None for the network's own
                loss.
            penalty: returns a term that is added to each batch's loss; None for no term.
            after_step: called after each step with the batch's inputs and the optimiser, or None.
            beside: a second optimiser, which steps with the gradients of the same backward pass, or
                None.
            plan: the passes over the data, each a list of batches of sample indices; None for the
                passes that the settings ask for.
            order: maps an epoch's number to the order (n,) of its samples; used only with
                'train.epoch-steps'. None for a random order.
            settings: the length and the optimiser of the training; None for the run's.
            split: the samples; None for the site's training samples.
            steps: the number of optimiser steps; 0 for the number in ``settings``.
            aside: empty for the main training. A further training in the same phase has a key, such
                as ("head",), which also seeds its random draws. Its loss is not reported, its
                optimiser is not stored, and ``pack`` does not measure its network.
            stays: whether the model, and everything made from it, stays at the site. A private run
                then trains it without noise.

        Raises:
            RefusedError: a batch has fewer samples, or the training fewer steps, than the hospital
                allows. An EpsilonSpentError says that a cap on epsilon is reached.
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

        - A batch needs a minimum number of samples, and a reply a minimum number of steps. Under
          the hospital's own cap on epsilon, a model that stays at the site has no minimum of steps.
        - In a private run DP-SGD adds noise, and the privacy ledger is charged. A model that stays
          at the site gets no noise and costs no epsilon.
        - If the run weights classes, each sample gets the weight of its class.

        Args:
            training: the training, changed in place.
            aside: the key of a further training in the same phase, or empty.
            stays: whether the model and everything made from it stays.

        Raises:
            RefusedError: the private batches are too small, or a cap on epsilon is reached
                (EpsilonSpentError).
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
        """Measure a model on splits of the site's data, and return its metrics.

        The method's ``measured`` gets ``network`` and chooses the networks to measure, usually
        ``network`` alone. A split without samples adds no metrics. If only samples with certain
        labels are measured, a split needs at least 'privacy.sums-min-count' of them.

        Under the hospital's own cap on epsilon the result is empty. For "incoming" each sample's
        contribution to the metrics is recorded, and ``pack`` adds noise to their sums. For
        "trained" nothing is measured then.

        Args:
            network: the network that the method's ``measured`` gets.
            model: "incoming" for the received model or "trained" for the trained one; the first
                part of each key.
            splits: any of "train", "val" and "test".

        Returns:
            ``<model>.<split>.<metric>`` -> value.
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

        The result is empty if the split has no samples. The fields of ``measured`` decide:

        - ``within``: only samples with these labels are measured. The result is empty if there are
          fewer than 'privacy.sums-min-count'.
        - ``names``: only the metrics in it are returned, under new names. Without it, all metrics
          are returned. In the final evaluation the test split then has further counts, such as each
          class's correct predictions.
        - ``probe``: an object that sees the outputs of the network's encoder and adds metrics.

        ``model``, "incoming" or "trained", only enters the random seed of the measurement.
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
        """Record each sample's contribution to a split's metrics, so that ``pack`` can add noise.

        This replaces exact metrics under a hospital's own cap on epsilon. Contributions range from
        0 to 1, and ``sample_parts`` gets an array (n,) of them for each metric. Nothing is recorded
        if the split's metrics may not leave (``measured_splits``), or if this site reports 0
        samples for the split. The true number of samples must not be revealed, so it decides
        nothing here.

        Args:
            network: the received network.
            split: "val" or "test".
            key: with round and site, the seed of the dropout during the measurement.
            metrics: the names of the metrics to record; None for all metrics that can get noise in
                the run's task.
        """
        reported = sum(self.session.reported.get(split, ()))
        if not reported or split not in self.session.measured_splits():
            return
        samples: Split = getattr(self.silo, split)
        place: tuple[int | str, ...] = (self.instruction.round, self.site, *key)
        parts = measured_parts(network, samples, self.sampling, self.compute, place, self.task)
        for metric in parts if metrics is None else metrics:
            self.sample_parts[measurement(INCOMING, split, metric)] = parts[metric]
