"""A site's name, and the run's settings overridden by the site's own config.

The node config overrides the run config: ``site`` (without it ``partition-id`` picks the silo),
``device``, ``backbone-weights`` and ``plugin``. Its keys have no group prefix, like those of a site
file. Only the node config tells where a real site's files are. A plugin is executed only if the
node config lists it, or if a package installed at the hospital offers it. The node config can only
tighten the limits on what leaves: ``sums-min-count``, and ``max-epsilon`` at ``delta``.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context

from fedsilo.client_app.site.limits import limits_of
from fedsilo.client_app.site.node import build_settings, is_simulated, own_cache
from fedsilo.core.errors import FedsiloError, RefusedError, SettingError, SiteError
from fedsilo.core.files.locations import BACKBONES, find_places
from fedsilo.core.methods import load_plugin_files
from fedsilo.core.plugins import changed_plugins, digest_plugins, module_of, plugin_entries
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import key_of, keys_of, keys_with, setting
from fedsilo.datasets.partition.silo_sets import GAIA
from fedsilo.datasets.registry import data_set, plugs_of, silo_names

_OWN = keys_with(CommonSettings, "own")
# Key of the node config -> field of the run's settings that it overrides
NODE_FIELDS: dict[str, str] = {}
for _name, _key in keys_of(CommonSettings).items():
    if _key in _OWN:
        NODE_FIELDS[key_of(_name)] = _name


@dataclass(frozen=True)
class NodeCap:
    """A node config's own cap on epsilon (0 means no cap), and the delta for epsilon."""

    max_epsilon: float = setting(0.0, "cap over all runs, or 0 for none", ge=0.0)
    delta: float = setting(1e-5, "delta at which the cap holds", gt=0.0, lt=1.0)


def site_settings(context: Context) -> CommonSettings:
    """Return the run's settings, overridden by this node's own folders, device and limits.

    If run and node differ in 'sums-min-count', the cap on epsilon or its delta, the stricter value
    wins. A real site ignores the run's folders and plugin files, and uses those of its node config.
    The files in the result's 'plugin' are loaded, which executes them.

    Raises:
        SettingError: a value has the wrong type or is out of range. The error also means that a
            value names a thing that neither fedsilo nor a plugin has, an unusable plugin file or a
            forbidden weights file.
        RefusedError: at a real site, 'split.silo-set' names a file, or the run needs a plugin that
            the hospital lacks or has in another version.
    """
    settings, node = build_settings(CommonSettings, context.run_config), context.node_config
    own: dict[str, Any] = {}
    for key, name in NODE_FIELDS.items():
        if key in node:
            own[name] = str(node[key])
    own["sums_min_count"] = max(settings.sums_min_count, limits_of(context).sums_min_count)
    capped = node_cap(context)
    if capped.max_epsilon:
        # A run without a cap of its own has 0
        own["max_epsilon"] = min(settings.max_epsilon or capped.max_epsilon, capped.max_epsilon)
        # The smaller delta holds, because with a delta near 1, which a server might choose, every
        # epsilon is small
        own["delta"] = min(settings.delta, capped.delta)
    settings = dataclasses.replace(settings, **own)
    if not is_simulated(context):
        settings = _with_own_places(settings, context)
    # A real site's own 'plugin' has replaced the run's above
    if settings.plugin:
        load_plugin_files(settings.plugin)
    if not is_simulated(context):
        _refuse_other_plugs(settings)
    return settings


def _with_own_places(settings: CommonSettings, context: Context) -> CommonSettings:
    """Return a copy of the settings with the folders, plugin and backbone weights of this node.

    The run's own paths would let a server find out which files a hospital has. So the data folder
    and the plugin come from the node config, and are empty if they are missing there. The cache
    folder is that of ``own_cache``. If the node config has 'backbone-weights', the caller has put
    them into ``settings``, and they are not changed here. Otherwise the run's
    'vit.backbone-weights' may only name a file, and is replaced by the path that this file would
    have in this node's cache. The values "", "timm" and "random" stay.

    Raises:
        RefusedError: 'split.silo-set' is neither empty nor "gaia", so it names a file.
        SettingError: the node config has no 'backbone-weights', and the run's
            'vit.backbone-weights' is neither the plain name of a .safetensors file nor "timm",
            "random" or empty.
    """
    if settings.silo_set not in ("", GAIA):
        raise RefusedError(
            "the run's 'split.silo-set' is a file, but no run opens a hospital's files: use "
            f"'{GAIA}', or leave it empty"
        )
    settings = dataclasses.replace(
        settings,
        data_dir=str(context.node_config.get("data-dir", "")),
        cache_dir=own_cache(context),
        plugin=str(context.node_config.get("plugin", "")),
    )
    if "backbone-weights" in context.node_config:
        return settings
    return dataclasses.replace(settings, backbone_weights=_weights_by_name(settings))


def _refuse_other_plugs(settings: CommonSettings) -> None:
    """Check that this hospital has the run's plugins, in the run's version.

    A hospital has a plugin if its node config lists the module in 'plugin', or if an installed
    package offers the plugin by an entry point. Otherwise a server could execute any module here.
    The versions are compared by digests of the plugin's files. A run without plugins passes.

    Raises:
        RefusedError: the hospital lacks a plugin, the plugin's files differ from those of the run,
            or the run gives no digests.
        SettingError: a setting names neither something that fedsilo has nor a plugin.
    """
    plugs, fault = plugs_of(settings), ""
    # A module is installed with all modules below it
    installed = tuple(f"{module_of(entry)}." for entry in plugin_entries(settings.plugin))
    absent = [
        plug.module
        for plug in plugs
        if not plug.invited and not f"{plug.module}.".startswith(installed)
    ]
    if absent:
        fault = (
            f"the run needs plugin '{absent[0]}', but this hospital has not installed it: name its "
            "file or module in 'plugin' in the node config"
        )
    elif plugs and not settings.plugin_digests:
        fault = (
            "the run does not name the version of its plugins: 'fedsilo deploy run' fills "
            "in 'plugin-digests'"
        )
    elif plugs:
        # Read only now: digests of a plugin that is not installed would need its files
        other = changed_plugins(digest_plugins(plugs), settings.plugin_digests)
        if other:
            fault = (
                f"plugin {' and '.join(other)} is not this hospital's version: server and hospital "
                "must have the same files"
            )
    if fault:
        raise RefusedError(fault)


def node_cap(context: Context) -> NodeCap:
    """Read the hospital's own cap on epsilon, which all its runs share, and the cap's delta.

    Both values come from the node config. A missing value gets its default: a cap of 0, which means
    no cap, and a delta of 1e-5. The site file is not read here, because its limits are first merged
    into the node config.

    Raises:
        SettingError: a value has the wrong type or is out of range.
    """
    keys = keys_of(NodeCap).values()
    return build_settings(
        NodeCap, {k: context.node_config[k] for k in keys if k in context.node_config}
    )


def _weights_by_name(settings: CommonSettings) -> str:
    """Return the run's 'vit.backbone-weights', with a file name made a path in the site's cache.

    The path is in the cache's folder of backbones. Whether the file exists is not checked. The
    values "", "timm" and "random" name no file and are returned unchanged.

    Raises:
        SettingError: the setting is not a plain file name without a folder, or does not end in
            ".safetensors".
    """
    name = settings.backbone_weights
    if name in ("", "timm", "random"):
        return name
    if name != Path(name).name or not name.endswith(".safetensors"):
        raise SettingError(
            "the run's 'vit.backbone-weights' is not a plain name of a .safetensors file: a "
            "hospital names its weights itself, in the node config's 'backbone-weights'"
        )
    cache = find_places(settings.data_dir, settings.cache_dir).cache
    return str((cache / BACKBONES / name).absolute())


def site_name(context: Context, settings: CommonSettings) -> str:
    """Return the node config's 'site' or, if that is missing, the name of the site's silo.

    A silo is a site's part of the data set. The node config's 'partition-id' is the position of the
    silo, from 0, in the data set's list of silos.

    Raises:
        SiteError: the node config has no 'site', and its 'partition-id' is missing or is not below
            the number of silos. A site that is not simulated (``is_simulated``) must have 'site' if
            the data set names silos after files, because names of files must not leave a hospital.
        DataError: the files that name the silos are missing or unusable.
    """
    if "site" in context.node_config:
        return str(context.node_config["site"])
    names = silo_names(settings)
    if not is_simulated(context) and data_set(settings.dataset).silos_by_files:
        raise SiteError(
            "the node config names no 'site', but names of files are not sent: start "
            "the SuperNode with --node-config 'site=\"NAME\"'"
        )
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


def own_name(context: Context) -> str:
    """Return the site's name for errors and the audit log, with a substitute if it cannot be found.

    The name is the node config's 'site' or, if that is missing, the name of the site's silo (its
    part of the data set). The substitute is "partition N" with the 'partition-id', or "partition
    unknown" without one. No FedsiloError is raised.
    """
    if "site" in context.node_config:
        return str(context.node_config["site"])
    try:
        return site_name(context, site_settings(context))
    except FedsiloError:
        return f"partition {context.node_config.get('partition-id', 'unknown')}"


@contextmanager
def prefix_refusals(site: str) -> Iterator[None]:
    """Turn each refusal in the ``with`` block into a RefusedError that begins with "site <name>: ".

    The server needs the name, because before a site's first answer it does not know which site
    answers. The name is added even if the text begins with it already.

    Raises:
        RefusedError: the block raised a SettingError or a RefusedError. Subclasses of the two count
            too. Other errors pass unchanged.
    """
    try:
        yield
    except (RefusedError, SettingError) as error:
        raise RefusedError(f"site {site}: {error}") from None
