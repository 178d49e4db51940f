"""Who this site is: its name, its silo, its folders, and the method that a message asks for.

Node config wins over run config, because a hospital's own words about its own disk count:
``site`` (else the ``partition-id`` picks the silo), ``data-dir``, ``cache-dir``, ``state-dir``
and ``device``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context, Message

from client_app.base import Request, SiteMethod
from client_app.registry import method_class
from client_app.state import SiteState
from datasets.silos import Silo, load_silo, silo_names
from models.contract import CONFIG, Instruction
from models.errors import SettingError, SiteError
from models.schema import build
from models.settings import CommonSettings

_NODE_KEYS = ("data-dir", "cache-dir", "device")


@dataclass(frozen=True)
class Site:
    """A site: its settings (node config over run config) and its silo."""

    settings: CommonSettings
    silo: Silo


def site_settings(context: Context) -> CommonSettings:
    """Return the run's settings with this node's own folders and device put over them."""
    settings = build(CommonSettings, context.run_config)
    own = {
        key.replace("-", "_"): str(context.node_config[key])
        for key in _NODE_KEYS
        if key in context.node_config
    }
    return dataclasses.replace(settings, **own)  # type: ignore[arg-type]  # the three are texts


def site_name(context: Context, settings: CommonSettings) -> str:
    """Return the node config's ``site``, else the silo of its ``partition-id``.

    Raises:
        SiteError: the node config names neither, or the partition has no silo.
    """
    if "site" in context.node_config:
        return str(context.node_config["site"])
    names = silo_names(settings.silos)
    if "partition-id" not in context.node_config:
        raise SiteError(
            "the node config names no 'site': start the SuperNode with "
            f"--node-config 'site=\"{names[0]}\"' (silos: {', '.join(names)})"
        )
    partition = int(context.node_config["partition-id"])
    if partition >= len(names):
        raise SiteError(
            f"SuperNode {partition + 1} has no silo: 'silos' is {settings.silos}; start at most "
            f"that many SuperNodes or raise 'silos'"
        )
    return names[partition]


def open_site(context: Context) -> Site:
    """Load this node's silo."""
    settings = site_settings(context)
    return Site(settings, load_silo(site_name(context, settings), settings))


def open_method(message: Message, context: Context) -> SiteMethod:
    """Build the method that the run config names, ready to answer ``message``."""
    site = open_site(context)
    cls = method_class(site.settings.method)
    instruction = Instruction.from_config(message.content[CONFIG])
    return cls(
        Request(instruction, message.content),
        site.silo,
        site.settings,
        build(cls.settings_class, context.run_config),
        SiteState(state_folder(context, instruction, site.silo.name)),
    )


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
    if "partition-id" in context.node_config and instruction.run_dir:
        return Path(instruction.run_dir) / "sites" / site
    raise SiteError(
        f"site {site}: the node config names no 'state-dir', where this site's "
        "private state survives a restart; start the SuperNode with one"
    )
