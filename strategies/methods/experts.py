"""Experts on the server's side: what both the ensemble and PICSR collect from the sites."""

from __future__ import annotations

from collections.abc import Mapping

from fedsilo.models.networks.exchanged import exchanged_arrays
from fedsilo.models.networks.mixture import expert_array
from fedsilo.models.networks.site_network import TokenClassifier
from fedsilo.strategies.loop.method import ArraySpec, Reply
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Specs


def expert_specs(network: TokenClassifier, prefix: str = "") -> dict[str, ArraySpec]:
    """Return what an expert's arrays must be, by the run's ``network``."""
    return {
        f"{prefix}{name}": ArraySpec(tuple(array.shape))
        for name, array in exchanged_arrays(network).items()
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
