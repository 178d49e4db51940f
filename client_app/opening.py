"""Opening a message: this site's silo and folders, and the method that the message asks for.

Who the site is stands in ``client_app/site/identity.py``. A site file's limits (see
``client_app/site/policy.py``) stand in the node config by the time it is read here; ``state-dir``
in it is where a hospital's private states lie.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Message

from fedsilo.client_app.methods.base import SiteContext, SiteMethod
from fedsilo.client_app.methods.registry import method_class
from fedsilo.client_app.privacy.protection import LEDGER, affordable
from fedsilo.client_app.site.identity import node_cap, site_name, site_settings
from fedsilo.client_app.site.limits import NO_LIMITS, Limits, limits_of
from fedsilo.client_app.site.node import is_simulated, own_folder
from fedsilo.client_app.site.policy import refuse_few
from fedsilo.client_app.site.private_state import SiteState, settings_digest_of
from fedsilo.client_app.site.request import OwnCap, Request
from fedsilo.client_app.site.secret_seed import secret_seed
from fedsilo.client_app.site.standardised import ready_silo
from fedsilo.client_app.site_round import SiteRound
from fedsilo.client_app.training.compute import compute_of
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import SPLITS, Silo
from fedsilo.datasets.weights.backbones import backbone_digest
from fedsilo.models.contract.errors import DataError, RefusedError, SettingError, SiteError
from fedsilo.models.contract.feature_statistics import Sums
from fedsilo.models.contract.messages import CONFIG, Instruction
from fedsilo.models.contract.methods import settings_class
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import as_mapping, build, defaults, keys_with
from fedsilo.models.contract.versions import installed_software
from fedsilo.models.maths.standardisation import sums_of
from fedsilo.models.privacy.gaussian_mechanism import check_privacy_settings

_CUTS = (*keys_with(CommonSettings, "folds"), *keys_with(CommonSettings, "sampling"))


@dataclass(frozen=True)
class Site:
    """A site: settings (node config over run config), silo, whether it is simulated, its limits.

    ``capped`` tells whether the hospital has a cap of its own on epsilon.
    """

    settings: CommonSettings
    silo: Silo
    simulated: bool
    limits: Limits = NO_LIMITS
    capped: bool = False

    def backbone(self) -> str:
        """Return the digest of the weights that this site's network starts from, if it has any.

        Raises:
            SettingError: the weights are missing.
        """
        return backbone_digest(self.settings)

    def measured(self) -> tuple[str, ...]:
        """Return the splits of which measurements leave.

        Those of few samples do not, nor a training loss under a cap of the hospital's own: noise in
        proportion to one patient's part of a mean hides nobody in what training made of all.
        """
        enough = self.limits.minimum_measured
        few = {name for name, split in self.silo.splits().items() if 0 < len(split) < enough}
        withheld = few | ({"train"} if self.capped else set())
        return tuple(name for name in SPLITS if name not in withheld)

    def software(self) -> dict[str, str]:
        """Return what this hospital runs and on which device; of a simulated one nothing.

        Raises:
            SettingError: there is no such device.
        """
        if self.simulated:
            return {}
        settings = self.settings
        compute = compute_of(settings)
        return installed_software() | {"device": str(compute.device)}

    def sums(self) -> Sums | None:
        """Return what this site sends towards pooled figures; None: nothing.

        Raises:
            SiteError: so few rows are behind a sum that it says too much of each of them, or the
                hospital has a cap on epsilon, and exact sums have none.
        """
        if not self.silo.features or self.settings.standardise != "pooled":
            return None
        if self.settings.max_epsilon:
            raise RefusedError(
                f"site {self.silo.name} has a cap on epsilon and sends no exact sums: set "
                "'standardise' to 'declared' or 'site', or leave the site out"
            )
        sums, min_rows = sums_of(self.silo.train.inputs), self.settings.sums_min_count
        rows = len(self.silo.train)
        few = [f"it has {rows} training rows"] if rows < min_rows else []
        few += [
            f"{int(count)} training rows have a value of '{feature}'"
            for feature, count in zip(self.silo.features, sums.count, strict=True)
            if 0 < count < min_rows
        ]
        if few:
            raise RefusedError(
                f"site {self.silo.name} sends no sums: {few[0]} and at least {min_rows} are needed "
                "('sums-min-count'); leave the site out, or set 'standardise' to 'declared'"
            )
        return sums


def own_cap(context: Context, site: str) -> OwnCap | None:
    """Return the hospital's own cap over all its runs; None if its node config has none."""
    capped, folder = node_cap(context), own_folder(context, site)
    if not capped.max_epsilon or folder is None:
        return None
    _bring_old_ledger(folder, site)
    return OwnCap(folder / LEDGER, capped.max_epsilon, capped.delta)


def _bring_old_ledger(folder: Path, site: str) -> None:
    """Move the ledger from where it was before it had a folder of its own."""
    old = folder.parent.parent / f"{site}-{LEDGER}"
    if old.is_file() and not (folder / LEDGER).exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        old.replace(folder / LEDGER)


def open_site(context: Context) -> Site:
    """Load this node's silo.

    Raises:
        SiteError: the server chooses among a real hospital's samples. By sums over the same ones
            but one it could learn that one.
        SettingError: settings of differential privacy contradict each other.
    """
    settings, simulated = site_settings(context), is_simulated(context)
    values, usual = as_mapping(settings), defaults(CommonSettings)
    chosen = [key for key in _CUTS if values[key] != usual[key]]
    if chosen and not simulated and context.node_config.get("allow-folds") is not True:
        raise RefusedError(
            f"the run's {', '.join(chosen)} choose which of this site's samples are used, and "
            "what is sent of different samples tells of single patients: set 'allow-folds=true' in "
            "the node config if that is wanted"
        )
    silo = _load(site_name(context, settings), settings, context)
    if node_cap(context).max_epsilon:
        _refuse_without_epsilon(settings)
    if settings.clip_norm or settings.noise_multiplier or settings.secure_aggregation != "none":
        check_privacy_settings(settings, bool(silo.features))  # whatever the server has checked
    capped = bool(node_cap(context).max_epsilon)
    return Site(settings, silo, simulated, limits_of(context), capped)


def _refuse_without_epsilon(settings: CommonSettings) -> None:
    """Refuse what a hospital's own cap on epsilon cannot count.

    Raises:
        RefusedError: names the run's setting.
    """
    zero = "noise-multiplier" if settings.clip_norm else "clip-norm"
    if not settings.noise_multiplier:
        raise RefusedError(
            f"the site has a cap on epsilon and the run's '{zero}' is 0: without clipping and "
            "noise there is no epsilon, of arrays or of measurements; set 'clip-norm' and "
            "'noise-multiplier', or leave the site out"
        )
    if settings.secure_noise != "own":
        raise RefusedError(
            "the site has a cap on epsilon and the run's 'secure-noise' is 'spread': its epsilon "
            "would rest on the noise of other hospitals; set it to 'own', or leave the site out"
        )


def _load(name: str, settings: CommonSettings, context: Context) -> Silo:
    """Load the silo; what is wrong with the hospital's 'data-dir' as a whole is said with the rest.

    Raises:
        DataError: the files cannot be used. No file is named that the data set does not name: a
            file's name may tell of a patient.
    """
    fault = _folder_fault(str(context.node_config.get("data-dir", "")))
    try:
        return load_silo(name, settings)
    except DataError as error:
        raise (DataError(f"{error}; {fault}") if fault else error) from None
    except OSError as error:
        if is_simulated(context):
            raise
        logging.getLogger("flwr").exception("fedsilo: the data of this site cannot be opened")
        cause = error.strerror or type(error).__name__
        hint = fault or "the site's own log names the file"
        raise DataError(f"the data cannot be opened ({cause}): {hint}") from None


def _folder_fault(folder: str) -> str:
    """Say what is wrong with a node config's 'data-dir'; empty: nothing, or it names none."""
    try:
        entry = next(Path(folder).expanduser().iterdir(), None) if folder else Path()
    except OSError as error:
        return f"the node config's 'data-dir' cannot be read: {error.strerror}"
    return "" if entry else "the node config's 'data-dir' is empty"


def admit(site: Site, context: Context) -> None:
    """Let the method refuse this site before anything leaves it.

    Raises:
        SiteError: the method cannot use so few samples without giving them away, or sends what a
            hospital must agree to, or the hospital's own limits are higher, or its epsilon spent.
    """
    refuse_few(site.silo, context.node_config)
    if len(site.silo.train) < site.limits.minimum_batch:
        raise RefusedError(
            f"site {site.silo.name} has fewer than {site.limits.minimum_batch} training samples "
            "('minimum-batch'): it takes no part"
        )
    cls = method_class(site.settings.method)
    method_settings: Any = build(settings_class(site.settings.method), context.run_config)
    consent = None if site.simulated else cls.consent(method_settings)
    if consent and context.node_config.get(consent[0]) is not True:
        key, purpose = consent
        raise RefusedError(
            f"site {site.silo.name} has not agreed: {purpose}; set '{key}=true' in the node "
            "config if that is wanted"
        )
    cls.admit(site.silo, site.settings, method_settings)
    if own := own_cap(context, site.silo.name):
        affordable(own, site.settings.noise_multiplier)  # before the work that could not be told


def open_round(message: Message, context: Context) -> SiteRound:
    """Return what answers ``message``, by the method that the run config names.

    Raises:
        FedsiloError: the site cannot take part, or the message cannot be answered here.
    """
    return SiteRound(open_method(message, context))


def open_method(message: Message, context: Context) -> SiteMethod:
    """Build the method that the run config names, for ``message``.

    Raises:
        FedsiloError: the site cannot take part, or the message cannot be answered here.
    """
    site = open_site(context)
    admit(site, context)
    cls, settings = method_class(site.settings.method), site.settings
    instruction = Instruction.from_config(message.content[CONFIG])
    method_settings: Any = build(settings_class(site.settings.method), context.run_config)
    folder = state_folder(context, instruction, site.silo.name)
    own = own_cap(context, site.silo.name)
    request = Request(instruction, message.content, site.simulated, own)
    silo = ready_silo(site.silo, settings, message.content)
    # A hospital may change its own cap during a run: the digest is of the run's settings
    digest = settings_digest_of(build(CommonSettings, context.run_config), method_settings)
    compute = compute_of(settings)
    compute.begin()
    state = SiteState(folder, digest)
    return cls(
        SiteContext(
            request,
            silo,
            settings,
            method_settings,
            state,
            compute,
            site.limits,
            _seed(context, site),
        )
    )


def _seed(context: Context, site: Site) -> int:
    """Return what the site draws from: in a simulation the run's seed, else the hospital's own."""
    folder = own_folder(context, site.silo.name)
    if site.simulated or folder is None:
        return site.settings.seed
    return secret_seed(folder)


def state_folder(context: Context, instruction: Instruction, site: str) -> Path:
    """Return the folder of this site's private state for the run.

    Raises:
        SiteError: a real site (not a simulated one) named no ``state-dir``.
        SettingError: the run's name would leave the folder.
    """
    name = instruction.run_name
    if not name or name != Path(name).name or name.startswith("."):
        raise SettingError(f"run name '{name}' is no plain folder name")
    if "state-dir" in context.node_config:
        return Path(str(context.node_config["state-dir"])) / name / site
    if is_simulated(context) and instruction.run_dir:
        return Path(instruction.run_dir) / "sites" / site
    raise SiteError(
        f"site {site}: the node config names no 'state-dir', where this site's "
        "private state survives a restart; start the SuperNode with one"
    )
