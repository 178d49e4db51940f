"""A site in one run: opened and checked once, then used to answer every message of the run.

A message holds only an instruction and arrays. At a real hospital each message is a separate
process, which opens its own session. A simulated site's session is cached between messages, and
opened again at the hello that begins a run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from flwr.app import Context, RecordDict

from fedsilo.client_app.opening import OpenedSite, open_site
from fedsilo.client_app.privacy.noisy_counts import Counts, noisy_counts
from fedsilo.client_app.site.limits import NO_LIMITS
from fedsilo.client_app.site.node import build_settings, is_simulated, own_folder
from fedsilo.client_app.site.own_file import secret_seed
from fedsilo.client_app.site.policy import refuse_few_samples
from fedsilo.client_app.site.private_state import settings_digest_of
from fedsilo.client_app.training.augmentation import check_images
from fedsilo.client_app.training.compute import Compute, compute_of
from fedsilo.client_app.training.initial_network import class_weights, effective_samples
from fedsilo.client_app.training.loop import LocalTraining, steps_of
from fedsilo.client_app.training.optimisers import refuse_forgetful
from fedsilo.client_app.training.standardised import find_standardisation, standardise_silo
from fedsilo.core.errors import RefusedError, SiteError
from fedsilo.core.files.site_names import folder_name
from fedsilo.core.messages import Instruction
from fedsilo.core.methods import settings_class, site_class
from fedsilo.core.settings.common_settings import SUMS, CommonSettings
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.datasets.silo.silos import SPLITS, Silo, log_once
from fedsilo.models.maths.pacing import batch_of
from fedsilo.models.maths.standardisation import sums_of
from fedsilo.models.maths.unlike_columns import compare_with
from fedsilo.models.tasks.task import Task, task_of
from fedsilo.strategies.wire.compressed import Compression, compression_of

_OTHERS = 256 * 2**20  # the most bytes of samples in cached sessions besides the current one


@dataclass(frozen=True)
class SiteSession(OpenedSite):
    """One site in one run, after the check that it can take part."""

    # The number of samples of each class that this site reports, by split. A hospital reports its
    # declared lower bounds at trust 'sums', and noisy numbers with a cap on epsilon
    reported: Counts = field(kw_only=True)
    method: Any = field(kw_only=True)  # the run's method at this site
    compute: Compute = field(kw_only=True)  # the device and the precision
    # ``settings`` with the seed for this site's own draws, such as the order of samples
    sampling: CommonSettings = field(kw_only=True)
    # Identifies the settings that decide the meaning of a stored state
    digest: str = field(kw_only=True)
    # Compresses updates; None if this site sends whole arrays
    compression: Compression | None = field(kw_only=True, default=None)
    # The fewest samples of an optimiser step. A hospital's own cap allows any number, because noise
    # hides them and a refusal would reveal it
    smallest_batch: int = field(kw_only=True, default=1)
    # The name of the site's folders
    folder: str = field(init=False)
    # The run's task: its loss, labels and metrics
    task: Task = field(init=False)
    # Whether the site's numbers are standardised: a table's features, or a numeric outcome
    standardises: bool = field(init=False)
    # Replaces ``LocalTraining.run``, by the key of a training that was one batch with other sites
    trainers: dict[Hashable, Callable[[LocalTraining], float]] = field(
        init=False, default_factory=dict
    )
    # The last standardised table, by the statistics used for it
    _standardised: dict[Hashable, Silo] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Derive once, and not in each round, what follows from the data and the settings."""
        object.__setattr__(self, "folder", folder_name(self.silo.name))
        object.__setattr__(self, "task", task_of(self.settings))
        object.__setattr__(self, "standardises", bool(self.silo.columns()))

    @classmethod
    def from_context(cls, context: Context) -> SiteSession:
        """Open this node's site for a run, and check that the site can take part.

        The run must fit the site's sample counts and the hospital's limits. At trust 'sums' the
        server may learn only sums over sites, so a hospital is opened without its data. As many
        all-zero samples as it declared stand in until ``with_data`` reads the real data.

        A hospital with a 'state-dir' makes its random draws, such as the order of samples, from a
        stored secret seed. All other sites use the run's seed.

        Args:
            context: Flower's context of a message.

        Raises:
            FedsiloError: the site cannot take part, or the secret seed cannot be read or stored.
        """
        session = cls.admit(open_site(context, with_data=False))
        folder = own_folder(context, session.silo.name)
        if session.simulated or folder is None:
            return session
        return replace(session, sampling=replace(session.settings, seed=secret_seed(folder)))

    @classmethod
    def admit(cls, site: OpenedSite) -> SiteSession:
        """Build the session of an opened site, and check that the site can take part in the run.

        The run must fit the site's sample counts and the hospital's limits. Then the method makes
        its own checks, such as a minimum number of samples. If the hospital has a cap on epsilon,
        the label counts get noise. The first draw is charged to the ledger, the hospital's record
        of epsilon.

        Raises:
            EpsilonSpentError: the noisy label counts would exceed the hospital's cap on epsilon.
            SiteError: the site has too few samples for the method.
            RefusedError: the hospital's limits forbid the run, or the method needs a consent that
                the hospital has not given.
            SettingError: a setting of the run is invalid, or does not fit the data or this machine.
            CheckpointError: stored counts or the ledger are damaged, or cannot be written.
        """
        settings = site.settings
        own: Any = build_settings(settings_class(settings.method), site.run_config)
        session = cls(
            **vars(site),
            reported=reported_counts(site),
            method=site_class(settings.method)(own),
            compute=compute_of(settings),
            sampling=settings,
            # The run's own settings decide it, because a hospital may change its cap during a run
            digest=settings_digest_of(build_settings(CommonSettings, site.run_config), own),
            compression=compression_of(settings),
            smallest_batch=1 if site.cap else site.limits.minimum_batch,
        )
        session._refuse_unfit()
        session.method.admit(session)
        return session

    def with_data(self) -> SiteSession:
        """Return a copy of the session with the real data in place of the all-zero samples.

        This is for a hospital at trust 'sums', which was checked without its data. The reported
        counts stay those that the hospital declared. If the run uses class weights, they are
        checked on the real data.

        Once the real data are open, an error could reveal a patient. So the caller must keep every
        error from the server, and add 0 to the secret sum instead.

        Raises:
            DataError: the data cannot be read.
            SiteError: the data no longer match the hospital's declaration.
            RefusedError: there are fewer training samples than the hospital's minimum, or the class
                weights let too few of them decide a step.
        """
        session = replace(self, silo=self.read_declared())
        if session.settings.class_weights != "none":
            session._refuse_few_weighed()
        return session

    def measured_splits(self) -> tuple[str, ...]:
        """Return the splits whose metrics may leave the site, in the order "train", "val", "test".

        A split needs at least as many reported samples as the hospital's 'minimum-measured'. Unless
        the run's trust is 'sums', an empty split is returned too, because it has no metrics.

        A hospital with its own cap on epsilon never returns "train". With a cap, no split is
        returned in two cases:

        - The run's trust is 'sums', where metrics are summed over sites without noise.
        - The method measures a model trained without noise, which noise on the metrics would not
          hide.
        """
        is_summed = self.settings.trust == SUMS
        if self.cap and (is_summed or self.method.measures_what_stays):
            return ()
        splits = []
        for name in SPLITS:
            size = sum(self.reported.get(name, ()))
            # An empty split has no metrics; only in a sum would it add zeros of its own
            has_few = (size > 0 or is_summed) and size < self.limits.minimum_measured
            is_private = self.cap is not None and name == "train"
            if not has_few and not is_private:
                splits.append(name)
        return tuple(splits)

    def silo_for(self, content: RecordDict) -> Silo:
        """Return the site's data with standardised table features and with 0 for missing values.

        Numeric outcomes stay in their unit, but the result records their mean and deviation, which
        the loss uses. If the mean and deviation of all columns are unchanged, the last result is
        returned. Otherwise a new result is made. The site's log then names columns that seem to be
        in another unit.

        Args:
            content: the server's message, which has the pooled mean and standard deviation.

        Raises:
            SettingError: 'data.standardise' is 'declared', but the schema declares no mean and
                deviation.
            SiteError: 'data.standardise' is 'pooled', but the message lacks the pooled statistics.
        """
        standardisation = find_standardisation(self.silo, self.settings, content)
        key = standardisation.mean.tobytes(), standardisation.std.tobytes()
        if key not in self._standardised:
            self._standardised.clear()
            self._standardised[key] = standardise_silo(self.silo, standardisation)
            self._log_unlike_columns(standardisation)
        return self._standardised[key]

    def _log_unlike_columns(self, statistics: FeatureStatistics) -> None:
        """Log which columns of this site differ much from the statistics that standardise them.

        ``statistics`` has a mean and a standard deviation for each column: a table's features and a
        numeric outcome. The lines go only to the site's own log. A process logs the same line only
        once. Nothing is logged in two cases:

        - 'data.standardise' is 'site'. The site's own statistics cannot differ from its data.
        - The site is simulated and 'data.standardise' is 'pooled'. The server then compares the
          sites.
        """
        settings = self.settings
        is_known = self.simulated and settings.standardise == "pooled"
        if settings.standardise == "site" or is_known:
            return
        whose = "in the schema"
        if settings.standardise == "pooled":
            whose = "over all sites"
        own = sums_of(self.silo.column_values())
        floor = settings.sums_min_count
        for unlike in compare_with(self.silo.columns(), own, statistics, floor):
            log_once(f"site {self.silo.name}: {unlike.sentence(whose)}")

    def phase_function(self, phase: str) -> Callable[[Any], Any]:
        """Return the method's function for a phase that a message names.

        A phase must be listed in the method's ``phases``. Otherwise a server could call any
        function of the method by name, such as a helper that returns samples.

        Args:
            phase: the phase's name in the message. Its dashes become underscores in the function's
                name.

        Raises:
            SiteError: the phase is not listed, or the method has no function of that name.
        """
        name = phase.replace("-", "_")
        if phase not in self.method.phases or not hasattr(self.method, name):
            raise SiteError(
                f"site {self.silo.name}: method '{self.settings.method}' has no phase '{phase}': "
                f"list it in 'phases' of '{type(self.method).__name__}' and write the function "
                f"'{name}', or install the server's version of fedsilo"
            )
        return cast(Callable[[Any], Any], getattr(self.method, name))

    def state_folder(self, instruction: Instruction) -> Path:
        """Return the folder for this site's private state in a run; the folder may not exist yet.

        The folder is ``<state-dir>/<run>/<site>``. In a simulation without 'state-dir' it is
        ``<run-dir>/sites/<site>``. In ``<site>``, characters that are unsafe in paths are encoded.

        Args:
            instruction: the server's request, which has the run's name and, in a simulation, its
                folder.

        Raises:
            SiteError: the node config has no 'state-dir'. In a simulation, ``instruction`` also has
                no folder.
        """
        name, site = instruction.run_name, self.silo.name
        if "state-dir" in self.node_config:
            return Path(str(self.node_config["state-dir"])) / name / self.folder
        if self.simulated and instruction.run_dir:
            return Path(instruction.run_dir) / "sites" / self.folder
        raise SiteError(
            f"site {site}: the node config has no 'state-dir', which keeps this site's private "
            "state over restarts; start the SuperNode with one"
        )

    def held_bytes(self) -> int:
        """Return the bytes of all samples in this session, including standardised copies."""
        silos = [self.silo, *self._standardised.values()]
        return sum(s.inputs.nbytes + s.labels.nbytes for o in silos for s in o.splits().values())

    def _refuse_unfit(self) -> None:
        """Check that the run fits this site's sample counts and the hospital's limits.

        The checks are made in this order:

        - There are enough reported training samples in total, per label and for one batch.
        - The data's schema declares means and deviations, if the run standardises by them.
        - A hospital that only declares its counts has enough steps, and enough samples in each
          step.
        - The augmentation fits the images.
        - The class weights do not let a few samples decide a step.
        - Each of the first optimiser steps has an effect on the result.

        Raises:
            RefusedError: a limit of the hospital forbids the run.
            SettingError: a setting does not fit the data.
        """
        counts, settings = self.reported["train"], self.settings
        refuse_few_samples(self.silo.name, counts, self.node_config)
        if sum(counts) < self.limits.minimum_batch:
            raise RefusedError(
                f"site {self.silo.name} has fewer than {self.limits.minimum_batch} training "
                "samples ('minimum-batch'): it takes no part"
            )
        if self.standardises and settings.standardise == "declared":
            # Raises a SettingError at the hello: later the run has begun, and inside a secret sum
            # the error may not leave
            find_standardisation(self.silo, settings, RecordDict())
        if self.stand_in:
            self._refuse_small_steps(sum(counts))
        if settings.augmentation:
            check_images(settings, self.silo)
        if settings.class_weights != "none":
            self._refuse_few_weighed()  # raises here instead of at the first training
        refuse_forgetful(settings, self.limits.minimum_steps_per_reply)

    def _refuse_small_steps(self, samples: int) -> None:
        """Check that a round has enough optimiser steps, and enough samples in each step.

        This check is for a hospital that declares its sample counts before its data are opened.
        Later no error may reach the server, so the shortage must be found here.

        Args:
            samples: the declared number of training samples.

        Raises:
            RefusedError: a round has fewer steps than 'minimum-steps-per-reply', or a step has
                fewer samples than 'minimum-batch'. If there are too few of both, the error names
                only the steps.
        """
        settings, limits = self.settings, self.limits
        if settings.epoch_steps:
            steps, size = settings.pace, batch_of(samples, settings)
        else:
            steps = steps_of(samples, settings, limits.minimum_batch)
            size = min(samples, settings.batch_size)
        fault = ""
        if steps < limits.minimum_steps_per_reply:
            fault = (
                f"a round would have {steps} optimiser step(s) over the samples that "
                f"this hospital declares, but it needs {limits.minimum_steps_per_reply} "
                "('minimum-steps-per-reply'): raise 'train.local-epochs' or 'train.local-steps', "
                "lower 'train.batch-size', or leave the site out"
            )
        elif size < limits.minimum_batch:
            fault = (
                f"a step would use fewer than {limits.minimum_batch} of the samples "
                "that this hospital declares ('minimum-batch'): lower 'train.epoch-steps', or "
                "leave the site out"
            )
        if fault:
            raise RefusedError(f"site {self.silo.name}: {fault}")

    def _refuse_few_weighed(self) -> None:
        """Check that the run's class weights do not let a few training samples decide a step.

        Kish's effective sample size of all training samples' weights must reach 'minimum-batch'.
        Two kinds of sites always pass: a simulated site, and a hospital with its own cap on
        epsilon, where clipping and noise hide each sample.

        Raises:
            RefusedError: the effective sample size is below 'minimum-batch'.
            SettingError: the run lists class weights, but not one for each class.
        """
        weights = class_weights(self.settings, self.silo)[self.silo.train.labels]
        least, effective = self.limits.minimum_batch, effective_samples(weights)
        if not self.simulated and self.cap is None and effective < least:
            raise RefusedError(
                f"site {self.silo.name}: with the run's 'train.class-weights' fewer than {least} "
                "training samples decide a step ('minimum-batch'): set them closer to one another "
                "or to 'none', or leave the site out"
            )


def reported_counts(site: OpenedSite) -> Counts:
    """Return the number of samples of each class that the site reports to the server, by split.

    There are three cases:

    - A hospital with its own cap on epsilon reports the true counts with Gaussian noise. The noise
      is drawn once for the same data, stored, and charged to the ledger (the hospital's record of
      spent epsilon).
    - A hospital at trust 'sums' reports the lower bounds of its counts that it declared.
    - Any other site reports the true counts.

    Raises:
        EpsilonSpentError: the counts need new noise, whose epsilon would exceed the cap.
        SettingError: the hospital sets no 'counts-noise', and no amount of noise keeps within its
            cap.
        CheckpointError: the stored counts or the ledger are damaged, or cannot be written.
    """
    if site.cap is None:
        return (site.stand_in or site.silo).label_counts()
    data = {**site.silo.fingerprints, "data set": site.settings.dataset}
    return noisy_counts(site.silo.label_counts(), data, site.limits.counts_noise, site.cap)


_sessions: OrderedDict[Hashable, SiteSession] = OrderedDict()


def session_of(context: Context, again: bool = False) -> SiteSession:
    """Return this node's session for a run: its site, opened and admitted to the run.

    A real hospital opens a new session for each message, so that its site file, ledgers and data
    are read again. A simulated site's session is cached by run, node and settings. If the cached
    sessions of the remaining sites hold more than 256 MiB of samples, the least recently used ones
    are dropped.

    Args:
        context: Flower's context of the message.
        again: True to replace a cached session, because a run begins and the data may have changed.

    Raises:
        FedsiloError: the site cannot take part.
    """
    configs = f"{context.node_config} {context.run_config}"
    # A hash, because the configs themselves are 15 KB per site
    key = context.run_id, context.node_id, hash(configs)
    # Only simulated sites have a cached session
    if key in _sessions and not again:
        _sessions.move_to_end(key)
        return _sessions[key]
    if not is_simulated(context):
        return SiteSession.from_context(context)
    _sessions.pop(key, None)
    _sessions[key] = SiteSession.from_context(context)
    others = sum(session.held_bytes() for session in list(_sessions.values())[:-1])
    # The oldest sessions are dropped, because a large simulation would hold all silos in memory
    while others > _OTHERS:
        others -= _sessions.popitem(last=False)[1].held_bytes()
    return _sessions[key]


def finished_session(settings: CommonSettings, own: Any, silo: Silo) -> SiteSession:
    """Build a simulated site's session, to apply the models of a finished run to the site's data.

    The session has no limits and no cap on epsilon, and nothing is checked. Its reported counts are
    the true counts, without noise.

    Args:
        settings: the run's common settings.
        own: the settings of the run's method.
        silo: the site's data.
    """
    return SiteSession(
        settings,
        silo,
        True,
        NO_LIMITS,
        {},
        {},
        None,
        reported=silo.label_counts(),
        method=site_class(settings.method)(own),
        compute=compute_of(settings),
        sampling=settings,
        digest=settings_digest_of(settings, own),
    )
