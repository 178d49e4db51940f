"""Finds errors that would stop a simulation at every site, before Ray or a SuperLink starts."""

import os
from collections.abc import Mapping

from fedsilo.datasets.registry import cut_of, data_set, load_silo, silo_names
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.config.resources import free_memory

_PROCESS = 0.4e9  # bytes of memory that a site's process needs once it has imported PyTorch


def refuse_without_a_silo(common: CommonSettings) -> None:
    """Raise the first error that needs no silo to be found: missing weights, an impossible cut."""
    named = common.initial_weights
    if named and not named.startswith("timm:"):
        from fedsilo.datasets.weights.initial_weights import initial_file

        initial_file(common)
    if common.network == "vit" or _has_resnet_weights(common):
        from fedsilo.datasets.weights.backbones import weights_file

        weights_file(common)
    cut_of(common)  # a cut that leaves a silo empty would otherwise fail at every silo


def _has_resnet_weights(common: CommonSettings) -> bool:
    return common.network == "resnet22" and bool(common.backbone_weights)


def refuse_by_first_silo(common: CommonSettings) -> None:
    """Raise the first error that every simulated site would raise: on its data or start weights.

    Only the first silo is loaded. Synthetic data are skipped, because nothing in them can be
    missing.
    """
    if data_set(common.dataset).origin == "made-up" or not (names := silo_names(common)):
        return
    silo = load_silo(names[0], common)
    if common.initial_weights or _has_resnet_weights(common):
        from fedsilo.strategies.loop.method import starting_network

        starting_network(common, silo.task)


def refuse_little_memory(resources: Mapping[str, Value]) -> None:
    """Raise a SettingError if Ray would start more processes than fit into the free memory."""
    share = float(resources["client-resources-num-cpus"])
    cores = int(resources["init-args-num-cpus"]) or os.cpu_count() or 1  # as Ray counts them
    at_once = min(int(resources["num-supernodes"]), int(cores / share) if share else cores)
    needed, free = at_once * _PROCESS, free_memory()
    if needed > free:
        raise SettingError(
            f"Ray would start {at_once} processes, which need about {needed / 1e9:.1f} GB of "
            f"memory, but {free / 1e9:.1f} GB are free: use --engine inline, which needs one "
            "process"
        )
