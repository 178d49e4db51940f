"""Ensemble: each silo trains alone, and the probabilities of all models are averaged.

Messages: only instructions until the last round, whose reply holds the site's weights by state-dict
name. The final evaluation sends all of them, ``expert/<site>/<array>``, to all sites.
"""

from dataclasses import replace
from typing import Any

from fedsilo.core.array_names import with_prefix
from fedsilo.core.messages import TRAIN
from fedsilo.models.networks.mixture import expert_array
from fedsilo.strategies.loop.method import Ask, Capabilities, Disclosures, Method, State


class Ensemble(Method):
    """Collects the sites' own models once."""

    # A mixture of probabilities has no evidence alpha
    capabilities = Capabilities(vit=False, paced_epochs=True, evidence=False, initial_weights=True)

    def round(self, state: State, ask: Ask) -> State:
        """Let each site train alone; collect the models in the last round."""
        send = {site: self.start(site, ask) for site in ask.sites}
        if state.round + 1 != self.common.rounds:
            ask(TRAIN, send, expect={})
            return state
        trained = ask(TRAIN, send, expect=dict.fromkeys(ask.sites, self.weight_specs()))
        experts: dict[str, Any] = {}
        for site, reply in trained.items():
            experts |= with_prefix(expert_array(site, ""), reply.arrays)
        return replace(state, arrays=experts)

    def disclosures(self) -> Disclosures:
        """Describe the weights."""
        return Disclosures(
            "once, after the last round: all weights and batch-norm statistics of the site's own "
            "model, which go to all other sites"
        )
