"""Open a site for a run: read its settings, its limits and its data, before anything leaves.

Until the data are read, every refusal depends only on the run's settings and the hospital's rules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from flwr.app import Context

from fedsilo.client_app.privacy.declared_data import FILE as DECLARED
from fedsilo.client_app.privacy.declared_data import declared_data
from fedsilo.client_app.privacy.ledger import LEDGER, Ledger
from fedsilo.client_app.site.identity import node_cap, site_name, site_settings
from fedsilo.client_app.site.limits import Limits, limits_of
from fedsilo.client_app.site.node import forget_opening, is_simulated, note_opening, own_folder
from fedsilo.client_app.site.policy import refuse_few_samples
from fedsilo.client_app.site.trust import tells_single_answers
from fedsilo.core.errors import DataError, RefusedError, SettingError, SiteError
from fedsilo.core.files.locations import find_places
from fedsilo.core.plugins import with_plugin_settings
from fedsilo.core.seeding import generator
from fedsilo.core.settings.common_settings import SUMS, CommonSettings
from fedsilo.core.settings_schema import Value, as_mapping, defaults, keys_with
from fedsilo.datasets.registry import data_set, load_silo
from fedsilo.datasets.silo.silos import Silo, log_once
from fedsilo.models.privacy.promises import check_privacy_settings

_CUTS = (*keys_with(CommonSettings, "folds"), *keys_with(CommonSettings, "sampling"))


@dataclass(frozen=True)
class OpenedSite:
    """A site whose settings, limits and data were read for a run; nothing has left it yet."""

    # The run's settings, overridden by the site's own folders, device and limits
    settings: CommonSettings
    silo: Silo  # the site's data; a table's features are not standardised
    simulated: bool  # whether this is a site of a simulation
    limits: Limits  # the hospital's floors and quotas; they limit nothing at a simulated site
    node_config: Mapping[str, Value]  # the node's own config, with a site file's limits in it
    run_config: Mapping[str, Value]  # the run's settings as the server sent them
    # The ledger of the hospital's own cap on epsilon over all runs; None without a cap
    cap: Ledger | None
    # Zero samples in the counts that a hospital declares at 'trust: sums'. Admission and hello use
    # them instead of the data. None if the site reports its exact counts
    stand_in: Silo | None = None
    load: Callable[[], Silo] | None = None  # reads the data that ``stand_in`` stands for

    def noise(self, *key: int | str) -> torch.Generator | None:
        """Return a random generator for noise at a simulated site, or None at a real site.

        None means the operating system's randomness. A simulated site's generator depends only on
        the run's seed and ``key``, so ``key`` must contain the site's name. A server knows the
        run's seed. If a real site used it, the server could subtract that site's noise.
        """
        if not self.simulated:
            return None
        return generator(self.settings.seed, *key)

    def require_consent(self, key: str, purpose: str) -> None:
        """Check that a real hospital's node config sets ``key=true``; a simulated site passes.

        Args:
            key: the key of the node config, such as "allow-embeddings".
            purpose: what the hospital would agree to, for the error.

        Raises:
            RefusedError: the key is missing, or its value is not the boolean true.
        """
        if not self.simulated and self.node_config.get(key) is not True:
            raise RefusedError(
                f"site {self.silo.name} has not agreed: {purpose}; set '{key}=true' in the node "
                "config if that is wanted"
            )

    def read_declared(self) -> Silo:
        """Read and return the real data, in place of the zero samples (``stand_in``) used so far.

        The object itself is not changed. The caller must hide any error from the server, because
        the error may depend on a patient.

        Raises:
            DataError: the data cannot be read.
            SiteError: a class has fewer samples than declared; or the task, the input shape, the
                features, the classes or the schema changed.
            RefusedError: there are fewer training samples than the hospital's own minimum.
        """
        declared = self.stand_in
        assert declared is not None
        assert self.load is not None
        silo = self.load()
        counts = silo.label_counts()
        fewer = False
        for split, bounds in declared.label_counts().items():
            # Declared counts are rounded down, so the data must have at least as many samples of
            # each class
            for exact, least in zip(counts.get(split, []), bounds, strict=False):
                fewer = fewer or exact < least
        if _kind_of(silo) != _kind_of(declared) or fewer:
            raise SiteError(
                f"site {silo.name}: the data are fewer or of another kind than when this hospital "
                f"declared them: remove '{DECLARED}' in its 'state-dir' to have them counted again"
            )
        refuse_few_samples(silo.name, counts["train"], self.node_config)
        return silo


def _refuse_other_task(silo: Silo, settings: CommonSettings) -> None:
    """Check that the labels of this site's data suit the run's task, such as regression.

    Each data set has labels for one task.

    Raises:
        SettingError: the site's labels are for another task.
    """
    if silo.task != settings.task:
        raise SettingError(
            f"site {silo.name}: 'task' is '{settings.task}', but the labels of data set "
            f"'{settings.dataset}' are for '{silo.task}': set 'task' to '{silo.task}', or correct "
            "the schema"
        )


def _kind_of(silo: Silo) -> tuple[object, ...]:
    return silo.task, silo.shape, silo.features, silo.classes, silo.schema


def open_site(context: Context, with_data: bool = True) -> OpenedSite:
    """Open a site for a run: read its settings, its limits and its data.

    Args:
        context: Flower's context of the message.
        with_data: True to read the real data. If False, a hospital at trust 'sums' gets all-zero
            samples instead, as many of each class as it has declared. Declared numbers are rounded
            down. Any other site reads its data in both cases.

    Raises:
        RefusedError: the hospital's rules forbid the run's settings (``_run_settings``). A required
            'state-dir' or the consent to send folder names is missing. A hospital that declares its
            data has stored too many declarations, or has fewer samples than its own minimum.
        SettingError: a setting is invalid, settings of privacy contradict each other, or the labels
            are for another task than the run's.
        SiteError: the node config names no site, or the data no longer match the stored
            declaration.
        DataError: the data cannot be read.
        CheckpointError: the stored declaration of the data is damaged, or cannot be written.
        OSError: a simulated site's files cannot be opened.
    """
    simulated, run, node = is_simulated(context), context.run_config, context.node_config
    settings = _run_settings(context)
    if settings.plugin_settings:
        run = with_plugin_settings(run, defaults(CommonSettings))
    site = site_name(context, settings)
    capped, folder = node_cap(context), own_folder(context, site)
    # Checked here too, because a server may not have checked. No data are open yet, so the reason
    # may leave
    check_privacy_settings(settings, data_set(settings.dataset).is_table)
    declares = not simulated and settings.trust == SUMS
    if folder is None and (declares or capped.max_epsilon):
        what = "the ledger of its cap on epsilon"
        if declares:
            what = "what it declares of its data"
        raise RefusedError(
            f"site {site} keeps {what} in its 'state-dir', but the node config names none: start "
            "the SuperNode with one"
        )
    load, stand_in = partial(_load, site, settings, context), None
    if folder is not None and declares:
        stand_in = declared_data(folder, settings, load).stand_in(site)
        forget_opening()
    silo = stand_in or load()
    _refuse_other_task(silo, settings)
    check_privacy_settings(settings, bool(silo.features))
    cap = None
    if folder is not None and capped.max_epsilon:
        cap = Ledger(folder / LEDGER, capped.max_epsilon, capped.delta, of_all_runs=True)
    limits = limits_of(context)
    opened = OpenedSite(settings, silo, simulated, limits, node, run, cap, stand_in, load)
    if with_data and stand_in is not None:
        opened = replace(opened, silo=opened.read_declared())
    if settings.dataset == "folder":  # its class names are names of the hospital's folders
        opened.require_consent("allow-folder-names", "names of folders are sent as class names")
    return opened


def _run_settings(context: Context) -> CommonSettings:
    """Return the run's settings, with the site's own folders, device and limits in their place.

    If the server must not see any answer of a real site alone, broken images are always skipped
    there, because an error would depend on a patient.

    Raises:
        RefusedError: the run's folds or sampling would choose among a real site's samples, but
            'allow-folds' is not set. The run adds no noise, but the hospital has a cap on epsilon.
            The run names a file that a real site would have to read, or a plugin that the site
            lacks.
        SettingError: a value of the run or of the node config is invalid.
    """
    settings, node = site_settings(context), context.node_config
    if not is_simulated(context):
        if not tells_single_answers(node, context.run_config):
            # Whether one image can be read must not decide whether there is an answer, so broken
            # images count as absent
            settings = replace(settings, broken_images="skip")
        if node.get("allow-folds") is not True:
            _refuse_chosen_samples(settings)
    if node_cap(context).max_epsilon:
        _refuse_without_epsilon(settings)
    return settings


def _refuse_chosen_samples(settings: CommonSettings) -> None:
    """Check that the run's folds and sampling have their defaults, which use all of the samples.

    Results over different samples would reveal single patients. The caller skips this check at
    simulated sites, and at hospitals that set 'allow-folds=true'.

    Raises:
        RefusedError: a setting differs from its default. The error names the settings, and
            'allow-folds', which would permit them.
    """
    values, usual = as_mapping(settings), defaults(CommonSettings)
    chosen = [key for key in _CUTS if values[key] != usual[key]]
    if chosen:
        raise RefusedError(
            f"the run's {', '.join(chosen)} choose which of this site's samples are used, but "
            "results over different samples reveal single patients: set 'allow-folds=true' in "
            "the node config if that is wanted"
        )


def _refuse_without_epsilon(settings: CommonSettings) -> None:
    """Check that a run is private, so that its epsilon is finite and can be held against a cap.

    A private run clips gradients and adds noise. The caller skips this check at a site without a
    cap on epsilon.

    Raises:
        RefusedError: the run is not private ('privacy.sample-clip-norm' is 0).
    """
    if not settings.is_private():
        raise RefusedError(
            "the site has a cap on epsilon, but the run's 'privacy.sample-clip-norm' is 0: without "
            "clipping and noise no epsilon can be computed, neither for arrays nor for "
            "measurements; set "
            "'privacy.sample-clip-norm' and 'privacy.noise-multiplier', or leave the site out"
        )


def _log_what_is_left_out(silo: Silo, settings: CommonSettings) -> None:
    """Log how many samples a run cannot use at this site, and which files it does not read.

    The number of samples is logged in each call, unless it is 0. The data set writes a sentence
    about each kind of unread file, and a sentence is logged once per process. The caller calls this
    only at a real hospital.
    """
    if silo.dropped:
        logging.getLogger("flwr").warning(
            "fedsilo: %d samples of this site cannot be used and are left out", silo.dropped
        )
    places = find_places(settings.data_dir, settings.cache_dir)
    for sentence in data_set(settings.dataset).unread_files(settings, places):
        log_once(sentence)


def _load(name: str, settings: CommonSettings, context: Context) -> Silo:
    """Load the site's data, and log which samples and files a real hospital leaves out.

    If loading fails and 'data-dir' is empty or unreadable, the text of the DataError says so.

    Raises:
        DataError: the files are unusable, or a real site's files cannot be opened. If the text
            quotes names of files in the data, the error is a FileNamesError. Its text never leaves
            a real site, because a file name may identify a patient.
        OSError: a simulated site's files cannot be opened.
    """
    note_opening()
    try:
        silo = load_silo(name, settings)
        if not is_simulated(context):
            _log_what_is_left_out(silo, settings)
        return silo
    except DataError as error:
        fault = _folder_fault(context)
        if not fault:
            raise
        raise type(error)(f"{error}; {fault}") from None
    except OSError as error:
        if is_simulated(context):
            raise
        logging.getLogger("flwr").exception("fedsilo: the data of this site cannot be opened")
        cause = error.strerror or type(error).__name__
        hint = _folder_fault(context) or "the site's own log names the file"
        raise DataError(f"the data cannot be opened ({cause}): {hint}") from None


def _folder_fault(context: Context) -> str | None:
    """Return a sentence that 'data-dir' is empty or cannot be read; None if neither is the case.

    'data-dir' is the data folder in the node config. Without it the result is None.
    """
    folder = str(context.node_config.get("data-dir", ""))
    if not folder:
        return None
    try:
        for _ in Path(folder).expanduser().iterdir():
            return None
    except OSError as error:
        return f"the node config's 'data-dir' cannot be read: {error.strerror}"
    return "the node config's 'data-dir' is empty"
