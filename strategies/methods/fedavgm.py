"""FedAvgM at the server (Hsu et al. 2019); messages as FedAvg's, the moments are never sent."""

from collections.abc import Mapping

import numpy as np

from fedsilo.models.contract.array_names import is_statistic
from fedsilo.strategies.loop.state import RoundState, SiteReply
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.wire.records import NDArray

_MOMENTS = "moments/"  # moments/<array>: kept in the state, so in the checkpoint


class FedAvgM(FedAvg):
    """Steps towards the mean; batch norm's running figures are no weights and become the mean."""

    title = "FedAvgM"

    def model(self, state: RoundState) -> Mapping[str, NDArray]:
        """Return all but the moments: it is what sites are sent too."""
        return {n: array for n, array in state.arrays.items() if not n.startswith(_MOMENTS)}

    def combine(
        self, phase: str, state: RoundState, replies: Mapping[str, SiteReply]
    ) -> RoundState:
        """Return the model after the settings' step, with the moments."""
        after = self.average(replies, self.model(state))
        for name in [n for n in after if not is_statistic(n)]:
            old, key = state.arrays[name].astype(np.float64), f"{_MOMENTS}{name}"
            moments = [state.arrays[key].astype(np.float64)] if key in state.arrays else []
            step, moment = self.settings.step(after[name] - old, *moments)
            after[name], after[key] = (np.asarray(a, np.float32) for a in (old + step, moment))
        return RoundState(state.round, after, state.extras)
