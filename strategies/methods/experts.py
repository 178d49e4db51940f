"""Experts on the server's side: what both the ensemble and PICSR collect from the sites."""

from __future__ import annotations

from collections.abc import Mapping

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.models.networks.mixture import expert_array
from fedsilo.strategies.loop.initial_arrays import initial_weights
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import ArraySpec, Reply, Specs


def expert_specs(common: CommonSettings, task: Task, prefix: str = "") -> dict[str, ArraySpec]:
    """Return what an expert's arrays must be."""
    network = build_classifier(common, task)
    return {
        f"{prefix}{name}": ArraySpec(array.shape)
        for name, array in initial_weights(network).items()
    }


def collected_experts(
    replies: Mapping[str, Reply], specs: Specs, prefix: str = ""
) -> dict[str, NDArray]:
    """Return the experts in ``replies`` by their wire names; ``specs`` as in ``expert_specs``."""
    return {
        expert_array(site, name.removeprefix(prefix)): reply.arrays[name]
        for site, reply in replies.items()
        for name in specs
    }
