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

        At trust 'sums' a hospital is opened without its data. All-zero samples stand in, as many as
        it declared. A hospital with a 'state-dir' makes random draws from its own secret seed,
        other sites from the run's seed.

        Raises:
            FedsiloError: the site cannot take part.
        """
        session = cls.admit(open_site(context, with_data=False))
        folder = own_folder(context, session.silo.name)
        if session.simulated or folder is None:
            return session
        return replace(session, sampling=replace(session.settings, seed=secret_seed(folder)))

    @classmethod
    def admit(cls, site: OpenedSite) -> SiteSession:
        """Build the session of an opened site, and check that the site can take part in the run.

        The run must fit the site's sample counts, the hospital's limits and the method's checks.

        Raises:
            EpsilonSpentError: noisy counts would exceed the cap on epsilon.
            SiteError: the site has too few samples.
            RefusedError: the hospital's limits forbid the run.
            SettingError: a setting is invalid.
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

        This is for a hospital at trust 'sums'. The reported counts stay. The caller must hide every
        error from the server, because errors could reveal a patient.

        Raises:
            DataError: the data are unreadable.
            SiteError: the data contradict the declaration.
            RefusedError: too few samples decide a step.
        """
        session = replace(self, silo=self.read_declared())
        if session.settings.class_weights != "none":
            session._refuse_few_weighed()
        return session

    def measured_splits(self) -> tuple[str, ...]:
        """Return the splits whose metrics may leave the site, in the order "train", "val", "test".

        A split needs as many reported samples as 'minimum-measured'. An empty split passes too,
        except at trust 'sums'. A hospital with a cap on epsilon never returns "train". It returns
        no split at trust 'sums', or if the method measures a model trained without noise.
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

        Numeric outcomes stay in their unit, but the result records their mean and deviation. With
        'data.standardise' "pooled", the server's message ``content`` has the statistics.

        Raises:
            SettingError: "declared" is set, but the schema declares no statistics.
            SiteError: the message lacks the pooled statistics.
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

        The lines stay in the site's own log. Nothing is logged if the statistics are the site's
        own. A simulated site logs nothing for pooled ones, which the server compares itself.
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

        A phase must be listed in the method's ``phases``. In the function's name, underscores
        replace the phase's dashes.

        Raises:
            SiteError: the phase is not listed, or the method has no such function.
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
        """Return the folder for this site's private state in a run, which may not exist yet.

        The folder is ``<state-dir>/<run>/<site>``. In a simulation without 'state-dir' it is
        ``<run-dir>/sites/<site>``, where ``instruction`` has the run's folder. Unsafe characters in
        ``<site>`` are encoded.

        Raises:
            SiteError: the node config has no 'state-dir', and there is no run folder.
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

        There must be enough training samples, also in each step. The schema must declare the
        statistics that the run needs. Augmentation must fit the images. Each first optimiser step
        must affect the result.
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

        ``samples`` is the number that the hospital declares before its data are opened. The limits
        are 'minimum-steps-per-reply' and 'minimum-batch'. The error names only the first limit that
        is broken.
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
        Simulated sites and hospitals with their own cap on epsilon always pass.
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

    - A hospital with its own cap on epsilon adds Gaussian noise, drawn once for the same data.
    - A hospital at trust 'sums' reports its declared lower bounds.
    - Any other site reports the true counts.

    Raises:
        EpsilonSpentError: new noise would exceed the cap.
    """
    if site.cap is None:
        return (site.stand_in or site.silo).label_counts()
    data = {**site.silo.fingerprints, "data set": site.settings.dataset}
    return noisy_counts(site.silo.label_counts(), data, site.limits.counts_noise, site.cap)


_sessions: OrderedDict[Hashable, SiteSession] = OrderedDict()


def session_of(context: Context, again: bool = False) -> SiteSession:
    """Return this node's session for a run, with its site opened and admitted to the run.

    A hospital opens a new session for each message. A simulated site's session is cached by run,
    node and settings. If ``again``, this session is replaced, because the data may have changed.

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
