"""A site in one run: opened and checked once, then used to answer every message of the run.

A message holds only an instruction and arrays. At a real hospital each message is a separate
process, which opens its own session. A simulated site's session is kept between messages and opened
again at the hello with which a run begins.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import Context, RecordDict

from fedsilo.client_app.privacy.declared_data import FILE as DECLARED
from fedsilo.client_app.privacy.declared_data import declared_data
from fedsilo.client_app.privacy.ledger import LEDGER, Ledger
from fedsilo.client_app.privacy.opened_data import (
    forget_opening,
    note_opening,
    tells_single_answers,
)
from fedsilo.client_app.privacy.told_counts import Counts, told_counts
from fedsilo.client_app.site.identity import node_cap, site_name, site_settings
from fedsilo.client_app.site.limits import NO_LIMITS, Limits, limits_of
from fedsilo.client_app.site.node import built, is_simulated, own_folder
from fedsilo.client_app.site.policy import refuse_few
from fedsilo.client_app.site.private_state import settings_digest_of
from fedsilo.client_app.site.secret_seed import secret_seed
from fedsilo.client_app.training.augmentation import check_images
from fedsilo.client_app.training.compute import Compute, compute_of
from fedsilo.client_app.training.initial_network import class_weights, effective_samples
from fedsilo.client_app.training.loop import LocalTraining, steps_of
from fedsilo.client_app.training.optimisers import refuse_forgetful
from fedsilo.client_app.training.standardised import figures_for, with_figures
from fedsilo.datasets.registry import data_set, load_silo
from fedsilo.datasets.silo.silos import SPLITS, Silo
from fedsilo.models.contract.errors import DataError, RefusedError, SiteError
from fedsilo.models.contract.messages import Instruction
from fedsilo.models.contract.methods import settings_class, site_class
from fedsilo.models.contract.plugs import with_plugin_settings
from fedsilo.models.contract.seeding import generator
from fedsilo.models.contract.settings import SUMS, CommonSettings
from fedsilo.models.contract.settings_schema import Value, as_mapping, defaults, keys_with
from fedsilo.models.maths.pacing import batch_of
from fedsilo.models.privacy.promises import check_privacy_settings
from fedsilo.strategies.wire.compressed import Compression, compression_of

_CUTS = (*keys_with(CommonSettings, "folds"), *keys_with(CommonSettings, "sampling"))
_NO_PHASES = frozenset({"admit", "open", "measured"})  # functions of a method that are not phases
_OTHERS = 256 * 2**20  # the bytes of other sites' samples that a process keeps


@dataclass
class SiteSession:
    """One site in one run."""

    # The run's settings, overridden by the site's own folders, device and limits
    settings: CommonSettings
    silo: Silo  # the site's data; a table's features are not standardised
    simulated: bool  # whether this is a site of a simulation
    limits: Limits  # the hospital's floors and quotas; a simulated site has none
    node_config: Mapping[str, Value]  # the node's own config, with a site file's limits in it
    run_config: Mapping[str, Value]  # the run's settings as the server sent them
    # The ledger of the hospital's own cap on epsilon over all runs; None without a cap
    cap: Ledger | None
    # Empty samples, as many as a hospital declares at 'trust: sums'. Admission and hello use them
    # instead of ``silo``. None if the site tells its exact counts
    stand_in: Silo | None = None
    load: Callable[[], Silo] | None = None  # reads the data that ``stand_in`` stands for
    # The following fields are set once the site is admitted
    compute: Compute = field(init=False)  # the device and the precision
    # ``settings`` with the seed from which this site draws
    sampling: CommonSettings = field(init=False)
    # Compresses updates; None if this site sends whole arrays
    compression: Compression | None = field(init=False, default=None)
    # The fewest samples of an optimiser step. A hospital's own cap allows any number, because noise
    # hides them and a refusal would reveal it
    smallest_batch: int = field(init=False, default=1)
    # Identifies the settings that decide the meaning of a stored state
    digest: str = field(init=False, default="")
    method: Any = field(init=False, default=None)  # the run's method at this site
    # Replaces ``LocalTraining.run`` if this site is trained as one batch with others
    trainer: Callable[[LocalTraining], float] | None = field(init=False, default=None)
    _ready: tuple[Hashable, Silo] | None = field(init=False, default=None)

    def admit(self) -> SiteSession:
        """Check once, before anything leaves, that this site can take part; return the session.

        Raises:
            SiteError: the site has too few samples for the method, a hospital's consent is missing,
                or the hospital's own limits forbid the run.
        """
        counts = self.told()["train"]
        refuse_few(self.silo.name, counts, self.node_config)
        if sum(counts) < self.limits.minimum_batch:
            raise RefusedError(
                f"site {self.silo.name} has fewer than {self.limits.minimum_batch} training "
                "samples ('minimum-batch'): it takes no part"
            )
        if self.stand_in and self.silo.features and self.settings.standardise == "declared":
            # Raises here instead of inside the sum
            figures_for(self.silo, self.settings, RecordDict())
        if self.stand_in:
            self._refuse_small_steps(sum(counts))
        if self.settings.augmentation:
            check_images(self.settings, self.silo)
        if self.settings.class_weights != "none":
            self._refuse_few_weighed()  # raises here instead of at the first training
        refuse_forgetful(self.settings, self.limits.minimum_steps_per_reply)
        own: Any = built(settings_class(self.settings.method), self.run_config)
        method = site_class(self.settings.method)(own)
        method.admit(self)
        # The digest covers the run's settings only, because a
        # hospital may change its cap during a run
        self.digest = settings_digest_of(built(CommonSettings, self.run_config), own)
        self.compute, self.sampling = compute_of(self.settings), self.settings
        if self.cap is None:
            self.smallest_batch = self.limits.minimum_batch
        self.compression = compression_of(self.settings)
        self.method = method
        return self

    def _refuse_small_steps(self, samples: int) -> None:
        """Refuse a run whose rounds have too few or too small steps for ``samples`` samples.

        A hospital judges by its declaration. After the data are opened it could only fail inside
        the sum, and nobody would know why.
        """
        settings, limits, name = self.settings, self.limits, self.silo.name
        if settings.epoch_steps:
            steps, size = settings.pace, batch_of(samples, settings)
        else:
            steps = steps_of(samples, settings, limits.minimum_batch)
            size = min(samples, settings.batch_size)
        if steps < limits.minimum_steps_per_reply:
            raise RefusedError(
                f"site {name}: a round would have {steps} optimiser step(s) over the samples that "
                f"this hospital declares, but it needs {limits.minimum_steps_per_reply} "
                "('minimum-steps-per-reply'): raise 'train.local-epochs' or 'train.local-steps', "
                "lower 'train.batch-size', or leave the site out"
            )
        if size < limits.minimum_batch:
            raise RefusedError(
                f"site {name}: a step would use fewer than {limits.minimum_batch} of the samples "
                "that this hospital declares ('minimum-batch'): lower 'train.epoch-steps', or "
                "leave the site out"
            )

    def open_data(self) -> None:
        """Read the data in place of the stand-in; from here on every failure stays inside a sum.

        Raises:
            DataError: the data cannot be read.
            SiteError: the data no longer match the hospital's declaration.
        """
        if self.load is None or self.silo is not self.stand_in:
            return
        silo, declared = self.load(), self.stand_in
        kinds = [(s.task, s.features, s.classes, s.schema) for s in (silo, declared)]
        counts = silo.label_counts()
        fewer = any(
            exact < least
            for split, bounds in declared.label_counts().items()
            for exact, least in zip(counts.get(split, []), bounds, strict=False)
        )
        if kinds[0] != kinds[1] or fewer:
            raise SiteError(
                f"site {silo.name}: the data are fewer or of another kind than when this hospital "
                f"declared them: remove '{DECLARED}' in its 'state-dir' to have them counted again"
            )
        self.silo = silo
        refuse_few(silo.name, counts["train"], self.node_config)
        if self.settings.class_weights != "none":
            self._refuse_few_weighed()

    def _refuse_few_weighed(self) -> None:
        """Reject class weights that let a few samples dominate a step.

        A hospital with its own cap needs no check, because each sample's gradient is clipped and
        noise hides it.
        """
        weights = class_weights(self.settings, self.silo)[self.silo.train.labels]
        least, effective = self.limits.minimum_batch, effective_samples(weights)
        if not self.simulated and self.cap is None and effective < least:
            raise RefusedError(
                f"site {self.silo.name}: with the run's 'train.class-weights' fewer than {least} "
                "training samples decide a step ('minimum-batch'): set them closer to one another "
                "or to 'none', or leave the site out"
            )

    def told(self) -> Counts:
        """Return the number of samples of each class that this site reports, by split.

        At trust 'sums' it is the hospital's declaration: there are at least that many.

        Raises:
            EpsilonSpentError: this is a first report, and the hospital's cap is reached.
        """
        if self.cap is None:
            return (self.stand_in or self.silo).label_counts()
        data = {**self.silo.fingerprints, "data set": self.settings.dataset}
        return told_counts(self.silo.label_counts(), data, self.limits.counts_noise, self.cap)

    def noise(self, *key: int | str) -> torch.Generator | None:
        """Return the random source of noise for ``key``; None for the operating system's.

        Only a simulated site draws noise from the seed.

        A server knows the run's seed, so it could subtract noise that was drawn from the seed.
        """
        return generator(self.settings.seed, *key) if self.simulated else None

    def require_consent(self, key: str, purpose: str) -> None:
        """Refuse the run at a real hospital whose node config does not say ``key=true``."""
        if not self.simulated and self.node_config.get(key) is not True:
            raise RefusedError(
                f"site {self.silo.name} has not agreed: {purpose}; set '{key}=true' in the node "
                "config if that is wanted"
            )

    def measured_splits(self) -> tuple[str, ...]:
        """Return the splits whose metrics leave.

        Splits of few samples do not. Under a hospital's own cap, the training loss does not leave,
        nor do metrics of a model that was trained without noise: noise for one patient's share of a
        mean does not hide a patient on whom the whole model was trained. At trust 'sums', where
        metrics get no noise, no split leaves under a cap, nor do splits without samples.
        """
        sizes = {name: sum(counts) for name, counts in self.told().items()}
        sums = self.settings.trust == SUMS
        least = 0 if sums else 1
        withheld = {n for n, s in sizes.items() if least <= s < self.limits.minimum_measured}
        if self.cap:
            withheld |= set(SPLITS) if sums or self.method.measures_what_stays else {"train"}
        return tuple(name for name in SPLITS if name not in withheld)

    def silo_for(self, content: RecordDict) -> Silo:
        """Return a table's silo as networks take it: standardised, with missing values as 0.

        Raises:
            SettingError: ``standardise`` is 'declared', but the schema declares no mean and
                deviation.
            SiteError: the message lacks the pooled statistics.
        """
        figures = figures_for(self.silo, self.settings, content)
        key = figures.mean.tobytes(), figures.std.tobytes()
        if self._ready is None or self._ready[0] != key:
            self._ready = key, with_figures(self.silo, figures)
        return self._ready[1]

    def phase(self, phase: str) -> Callable[[Any], Any]:
        """Return the method's function for ``phase``.

        Raises:
            SiteError: the method has no such phase.
        """
        name = phase.replace("-", "_")
        is_phase = not name.startswith("_") and name not in _NO_PHASES
        handler = getattr(self.method, name, None) if is_phase else None
        if not callable(handler):
            raise SiteError(
                f"site {self.silo.name}: method '{self.settings.method}' has no phase '{phase}': "
                f"write that function in '{type(self.method).__name__}', or install the server's "
                "version of fedsilo"
            )
        return cast(Callable[[Any], Any], handler)

    def state_folder(self, instruction: Instruction) -> Path:
        """Return the folder of this site's private state in the run of a message.

        Raises:
            SiteError: a real site (not a simulated one) has no ``state-dir``.
        """
        name, site = instruction.run_name, self.silo.name
        if "state-dir" in self.node_config:
            return Path(str(self.node_config["state-dir"])) / name / site
        if self.simulated and instruction.run_dir:
            return Path(instruction.run_dir) / "sites" / site
        raise SiteError(
            f"site {site}: the node config names no 'state-dir', where this site's "
            "private state survives a restart; start the SuperNode with one"
        )

    def held_bytes(self) -> int:
        """Return the bytes of the samples that this session keeps in memory."""
        silos = [self.silo, *([self._ready[1]] if self._ready else [])]
        return sum(s.inputs.nbytes + s.labels.nbytes for o in silos for s in o.splits().values())


_sessions: OrderedDict[Hashable, SiteSession] = OrderedDict()


def session_of(context: Context, again: bool = False) -> SiteSession:
    """Return the admitted session of a run at this node; open it at the first message.

    Only a simulated site's session is kept. A hospital's site file, ledgers and data are read again
    for each of its messages.

    Args:
        context: Flower's context of the message.
        again: open it again, because a run begins and the data may have changed.

    Raises:
        FedsiloError: the site cannot take part.
    """
    if not is_simulated(context):
        session = open_session(context, with_data=False).admit()
        if folder := own_folder(context, session.silo.name):
            session.sampling = replace(session.settings, seed=secret_seed(folder))
        return session
    configs = f"{context.node_config} {context.run_config}"
    # A hash, because the configs themselves are 15 KB per site
    key = context.run_id, context.node_id, hash(configs)
    if again or key not in _sessions:
        _sessions.pop(key, None)
        _sessions[key] = open_session(context).admit()
        others = sum(session.held_bytes() for session in list(_sessions.values())[:-1])
        while others > _OTHERS:
            others -= _sessions.popitem(last=False)[1].held_bytes()
    _sessions.move_to_end(key)
    return _sessions[key]


def open_session(context: Context, with_data: bool = True) -> SiteSession:
    """Open this node's silo under the run's settings, without asking whether it can take part.

    Args:
        context: Flower's context of the message.
        with_data: False to use a stand-in for the data of a hospital that declares them.

    Raises:
        SiteError: the server chooses among a real hospital's samples. From sums with and without
            one sample it could learn that sample.
        SettingError: settings of differential privacy contradict each other.
    """
    settings, simulated = _session_settings(context), is_simulated(context)
    run = context.run_config
    if settings.plugin_settings:
        run = with_plugin_settings(run, defaults(CommonSettings))
    if not simulated and context.node_config.get("allow-folds") is not True:
        _refuse_chosen_samples(settings)
    site = site_name(context, settings)
    capped, folder = node_cap(context), own_folder(context, site)
    if capped.max_epsilon:
        _refuse_without_epsilon(settings)
    # Checked again, whatever the server has checked,
    # before data are opened, so the reason may leave
    check_privacy_settings(settings, data_set(settings.dataset).is_table)
    load, stand_in = partial(_load, site, settings, context), None
    if not simulated and settings.trust == SUMS:
        if folder is None:
            raise RefusedError(
                f"site {site} keeps what it declares of its data in its 'state-dir', but the node "
                "config names none: start the SuperNode with one"
            )
        stand_in = declared_data(folder, settings, load).stand_in(site)
        forget_opening()
    silo = stand_in or load()
    check_privacy_settings(settings, bool(silo.features))
    cap = None
    if capped.max_epsilon:
        if folder is None:
            raise RefusedError(
                f"site {site} has a cap on epsilon, but no 'state-dir' for its ledger: name one in "
                "the node config"
            )
        cap = Ledger(folder / LEDGER, capped.max_epsilon, capped.delta, of_all_runs=True)
    node = context.node_config
    limits = limits_of(context)
    session = SiteSession(settings, silo, simulated, limits, node, run, cap, stand_in, load)
    if with_data:
        session.open_data()
    if settings.dataset == "folder":  # the names of a hospital's folders would become class names
        session.require_consent("allow-folder-names", "folders' names are sent as those of classes")
    return session


def _session_settings(context: Context) -> CommonSettings:
    """Return the run's settings under the site's own words.

    Where a hospital does not tell single answers, whether one image can be read must not decide
    whether there is an answer: broken images count as absent.
    """
    settings = site_settings(context)
    tells = tells_single_answers(context.node_config, context.run_config)
    if is_simulated(context) or tells:
        return settings
    return replace(settings, broken_images="skip")


def finished_session(settings: CommonSettings, own: Any, silo: Silo) -> SiteSession:
    """Build the session of a finished run, with the method's ``own`` settings."""
    session = SiteSession(settings, silo, True, NO_LIMITS, {}, {}, None)
    session.method = site_class(settings.method)(own)
    session.compute, session.sampling = compute_of(settings), settings
    session.digest = settings_digest_of(settings, own)
    return session


def _refuse_chosen_samples(settings: CommonSettings) -> None:
    values, usual = as_mapping(settings), defaults(CommonSettings)
    if chosen := [key for key in _CUTS if values[key] != usual[key]]:
        raise RefusedError(
            f"the run's {', '.join(chosen)} choose which of this site's samples are used, but "
            "results over different samples reveal single patients: set 'allow-folds=true' in "
            "the node config if that is wanted"
        )


def _refuse_without_epsilon(settings: CommonSettings) -> None:
    """Refuse a run without clipping and noise, whose epsilon a hospital's cap cannot count."""
    if not settings.is_private():
        raise RefusedError(
            "the site has a cap on epsilon, but the run's 'privacy.sample-clip-norm' is 0: without "
            "clipping and noise there is no epsilon, of arrays or of measurements; set "
            "'privacy.sample-clip-norm' and 'privacy.noise-multiplier', or leave the site out"
        )


def _load(name: str, settings: CommonSettings, context: Context) -> Silo:
    """Load the silo; a fault of the hospital's whole 'data-dir' is added to an error.

    Raises:
        DataError: the files are unusable. It names only files that the data set itself names,
            because a file's name may identify a patient.
    """
    note_opening()
    try:
        silo = load_silo(name, settings)
        if silo.dropped and not is_simulated(context):
            logging.getLogger("flwr").warning(
                "fedsilo: %d samples of this site cannot be used and are left out", silo.dropped
            )
        return silo
    except DataError as error:
        fault = _folder_fault(context)
        raise (type(error)(f"{error}; {fault}") if fault else error) from None
    except OSError as error:
        if is_simulated(context):
            raise
        logging.getLogger("flwr").exception("fedsilo: the data of this site cannot be opened")
        cause = error.strerror or type(error).__name__
        hint = _folder_fault(context) or "the site's own log names the file"
        raise DataError(f"the data cannot be opened ({cause}): {hint}") from None


def _folder_fault(context: Context) -> str | None:
    """Describe the fault of a node config's 'data-dir'; None if it has none."""
    folder = str(context.node_config.get("data-dir", ""))
    try:
        entry = next(Path(folder).expanduser().iterdir(), None) if folder else Path()
    except OSError as error:
        return f"the node config's 'data-dir' cannot be read: {error.strerror}"
    return None if entry else "the node config's 'data-dir' is empty"
