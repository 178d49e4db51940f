"""Who this site is: its name, its silo, its folders, and the method that a message asks for.

Node config wins over run config, because a hospital's own words about its own disk count:
``site`` (else the ``partition-id`` picks the silo), ``data-dir``, ``cache-dir``, ``state-dir``,
``device`` and ``backbone-weights``. What a hospital gives away it can only bound more tightly than
the run: ``sums-min-count``, and ``max-epsilon`` at ``delta``. A site file's limits (see
``client_app/site/policy.py``) stand in the node config by the time it is read here.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict

from client_app.methods.base import SiteMethod
from client_app.methods.registry import method_class
from client_app.privacy.protection import LEDGER, OwnCap
from client_app.site.audit_log import RefusedError
from client_app.site.policy import refuse_few
from client_app.site.private_state import SiteState, promise_of
from client_app.site.request import Request
from datasets.io.locations import BACKBONES, find_places
from datasets.registry import load_silo, silo_names
from datasets.silo.silos import Silo, Split
from datasets.weights.backbones import backbone_digest
from models.contract.errors import DataError, FedsiloError, SettingError, SiteError
from models.contract.messages import CONFIG, FIGURES, Instruction
from models.contract.settings import CommonSettings
from models.contract.settings_schema import build, key_of
from models.maths.standardisation import Figures, Sums, pooled_figures, standardised, sums_of
from models.privacy.gaussian_mechanism import check_privacy_settings

_NODE_KEYS = ("data-dir", "cache-dir", "device", "backbone-weights")
_CUTS = (
    *("test_folds", "val_folds", "fold_seed", "sample_share", "public_share"),
    *("partition", "unseen"),
)
_FLOOR = "sums-min-count"  # a hospital can raise it, and nobody else lower it
_CAP, _DELTA = "max-epsilon", "delta"  # the same the other way round


@dataclass(frozen=True)
class Site:
    """A site: settings (node config over run config), silo, and whether it is a simulated one."""

    settings: CommonSettings
    silo: Silo
    simulated: bool

    def backbone(self) -> str:
        """Return the digest of the weights that this site's network starts from, if it has any.

        Raises:
            SettingError: the weights are missing.
        """
        return backbone_digest(self.settings)

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
        sums, least = sums_of(self.silo.train.inputs), self.settings.sums_min_count
        rows = len(self.silo.train)
        few = [f"it has {rows} training rows"] if rows < least else []
        few += [
            f"{int(count)} training rows have a value of '{feature}'"
            for feature, count in zip(self.silo.features, sums.count, strict=True)
            if 0 < count < least
        ]
        if few:
            raise RefusedError(
                f"site {self.silo.name} sends no sums: {few[0]} and at least {least} are needed "
                "('sums-min-count'); leave the site out, or set 'standardise' to 'declared'"
            )
        return sums


def site_settings(context: Context) -> CommonSettings:
    """Return the run's settings with this node's own folders and device put over them."""
    settings = build(CommonSettings, context.run_config)
    own = {
        key.replace("-", "_"): str(context.node_config[key])
        for key in _NODE_KEYS
        if key in context.node_config
    }
    floor = build(CommonSettings, {k: v for k, v in context.node_config.items() if k == _FLOOR})
    if _FLOOR in context.node_config:
        least = max(settings.sums_min_count, floor.sums_min_count)
        settings = dataclasses.replace(settings, sums_min_count=least)
    settings = dataclasses.replace(settings, **own)  # type: ignore[arg-type]  # all are texts
    settings = _with_own_cap(settings, context)
    if is_simulated(context) or "backbone-weights" in context.node_config:
        return settings
    return dataclasses.replace(settings, backbone_weights=_weights_by_name(settings))


def _with_own_cap(settings: CommonSettings, context: Context) -> CommonSettings:
    """Return the settings with the hospital's own cap on epsilon, where it has one.

    The cap is at the hospital's own delta: at a delta near 1, which a server might name, every
    epsilon is small.
    """
    own = {key: context.node_config[key] for key in (_CAP, _DELTA) if key in context.node_config}
    capped = build(CommonSettings, own)
    if not capped.max_epsilon:
        return settings
    least = min(cap for cap in (settings.max_epsilon, capped.max_epsilon) if cap)
    delta = min(settings.delta, capped.delta)
    return dataclasses.replace(settings, max_epsilon=least, delta=delta)


def own_cap(context: Context, folder: Path) -> OwnCap | None:
    """Return the hospital's own cap over all its runs; None if its node config has none.

    ``folder`` is the site's of the run, in the 'state-dir': the ledger lies above all runs.
    """
    own = {key: context.node_config[key] for key in (_CAP, _DELTA) if key in context.node_config}
    capped = build(CommonSettings, own)
    if not capped.max_epsilon:
        return None
    ledger = folder.parent.parent / f"{folder.name}-{LEDGER}"
    return OwnCap(ledger, capped.max_epsilon, capped.delta)


def _weights_by_name(settings: CommonSettings) -> str:
    """Return the file of the weights that a server names to a real site: of its cache, by name.

    A server that could name any path would learn by the digest what lies at a hospital.

    Raises:
        SettingError: it is more than a name.
    """
    name = settings.backbone_weights
    if name in ("", "timm", "random"):
        return name
    if name != Path(name).name or not name.endswith(".safetensors"):
        raise SettingError(
            "the run's 'backbone-weights' is no plain name of a .safetensors file: a hospital "
            "names its weights itself, in the node config's 'backbone-weights'"
        )
    cache = find_places(settings.data_dir, settings.cache_dir).cache
    return str((cache / BACKBONES / name).absolute())


def is_simulated(context: Context) -> bool:
    """Tell whether this is a site of a simulation: by its own node config, never by a message."""
    own = {"site", "state-dir"} & context.node_config.keys()
    return "partition-id" in context.node_config and not own


def who_is(context: Context) -> str:
    """Return the site's name as well as it is known, for errors."""
    try:
        return site_name(context, site_settings(context))
    except FedsiloError:
        return f"partition {context.node_config.get('partition-id', 'unknown')}"


def site_name(context: Context, settings: CommonSettings) -> str:
    """Return the node config's ``site``, else the silo of its ``partition-id``.

    Raises:
        SiteError: the node config names neither, or the partition has no silo.
    """
    if "site" in context.node_config:
        return str(context.node_config["site"])
    names = silo_names(settings)
    if "partition-id" not in context.node_config:
        raise SiteError(
            "the node config names no 'site': start the SuperNode with "
            f"--node-config 'site=\"{names[0]}\"' (silos: {', '.join(names)})"
        )
    partition = int(context.node_config["partition-id"])
    if partition >= len(names):
        raise SiteError(
            f"SuperNode {partition + 1} has no silo: there are {len(names)} "
            f"({', '.join(names)}); start at most that many SuperNodes"
        )
    return names[partition]


def open_site(context: Context) -> Site:
    """Load this node's silo.

    Raises:
        SiteError: the server chooses among a real hospital's samples. By sums over the same ones
            but one it could learn that one.
        SettingError: settings of differential privacy contradict each other.
    """
    settings, simulated = site_settings(context), is_simulated(context)
    usual = CommonSettings()
    chosen = [key for key in _CUTS if getattr(settings, key) != getattr(usual, key)]
    if chosen and not simulated and context.node_config.get("allow-folds") is not True:
        raise RefusedError(
            f"the run's {', '.join(map(key_of, chosen))} choose which of this site's samples are "
            "used, and what is sent of different samples tells of single patients: set "
            "'allow-folds=true' in the node config if that is wanted"
        )
    silo = _load(site_name(context, settings), settings, context)
    if settings.clip_norm or settings.noise_multiplier:
        check_privacy_settings(settings, bool(silo.features))  # whatever the server has checked
    return Site(settings, silo, simulated)


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
        told = fault or "the site's own log names the file"
        raise DataError(f"the data cannot be opened ({cause}): {told}") from None


def _folder_fault(folder: str) -> str:
    """Say what is wrong with a node config's 'data-dir'; empty: nothing, or it names none."""
    try:
        found = next(Path(folder).expanduser().iterdir(), None) if folder else Path()
    except OSError as error:
        return f"the node config's 'data-dir' cannot be read: {error.strerror}"
    return "" if found else "the node config's 'data-dir' is empty"


def admit(site: Site, context: Context) -> None:
    """Let the method refuse this site before anything leaves it.

    Raises:
        SiteError: the method cannot use so few samples without giving them away, or sends what a
            hospital must agree to, or the hospital's own limits are higher.
    """
    refuse_few(site.silo, context.node_config)
    cls = method_class(site.settings.method)
    own: Any = build(cls.settings_class, context.run_config)
    asked = None if site.simulated else cls.consent(own)
    if asked and context.node_config.get(asked[0]) is not True:
        key, why = asked
        raise RefusedError(
            f"site {site.silo.name} has not agreed: {why}; set '{key}=true' in the node config if "
            "that is wanted"
        )
    cls.admit(site.silo, site.settings, own)


def open_method(message: Message, context: Context) -> SiteMethod:
    """Build the method that the run config names, ready to answer ``message``."""
    site = open_site(context)
    admit(site, context)
    cls = method_class(site.settings.method)
    instruction = Instruction.from_config(message.content[CONFIG])
    own: Any = build(cls.settings_class, context.run_config)
    folder = state_folder(context, instruction, site.silo.name)
    return cls(
        Request(instruction, message.content, site.simulated, own_cap(context, folder)),
        ready_silo(site.silo, site.settings, message.content),
        site.settings,
        own,
        # A hospital may change its own cap during a run: the promise is of the run's settings
        SiteState(folder, promise_of(build(CommonSettings, context.run_config), own)),
    )


def ready_silo(silo: Silo, settings: CommonSettings, content: RecordDict) -> Silo:
    """Return the silo as networks take it: a table's features standardised, missing values 0.

    Raises:
        SettingError: ``standardise`` is 'declared' and the schema declares no figures.
        SiteError: the message lacks the pooled figures.
    """
    return with_figures(silo, figures_for(silo, settings, content)) if silo.features else silo


def figures_for(silo: Silo, settings: CommonSettings, content: RecordDict) -> Figures:
    """Return the figures by which this site standardises its features."""
    if settings.standardise == "site":
        return pooled_figures([sums_of(silo.train.inputs)])
    if settings.standardise == "declared":
        if silo.declared is None:
            raise SettingError(
                "setting 'standardise' is 'declared', and the schema gives no mean and std for "
                "every numeric column: add them, or set it to 'pooled'"
            )
        return silo.declared
    if FIGURES not in content.array_records:
        raise SiteError(
            "a message lacks the pooled figures: server and site run different versions of fedsilo"
        )
    record = content.array_records[FIGURES]
    return Figures(record["mean"].numpy(), record["std"].numpy())


def with_figures(silo: Silo, figures: Figures) -> Silo:
    """Return the silo with its features standardised by ``figures``."""
    train, val, test = (
        Split(standardised(split.inputs, figures), split.labels) for split in silo.splits().values()
    )
    return dataclasses.replace(silo, train=train, val=val, test=test)


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
