"""FedPer, FedRep and FedBN at the server: messages are FedAvg's without the arrays that stay.

The settings' ``personal`` names these arrays: the last layers, or with FedBN the batch norms.
"""

from dataclasses import replace
from functools import cached_property

from fedsilo.core.errors import SettingError
from fedsilo.core.messages import EVALUATE, TRAIN
from fedsilo.strategies.loop.method import Arrays, Ask, Disclosures, State
from fedsilo.strategies.methods.fedavg import FedAvg


class FedPer(FedAvg):
    """Averages the shared arrays; all other arrays stay at the sites.

    The settings' ``personal`` names the arrays that stay.
    """

    capabilities = replace(FedAvg.capabilities, some_sites=False)

    def initial_state(self) -> State:
        """Return a state with the initial weights of the shared arrays.

        The personal arrays, which the method's settings select, are left out. They stay at the
        sites.

        Raises:
            SettingError: all or none of the network's arrays are personal, or a file of weights is
                missing or does not fit the network.
        """
        arrays = self.starting_weights()
        shared = dict(arrays)
        for name in self._personal:
            shared.pop(name, None)
        refuse_one_part(self.common.method, len(shared), len(arrays) - len(shared))
        return State(shared)

    def round(self, state: State, ask: Ask) -> State:
        """Send the shared arrays to each asked site, and average the shared arrays that return.

        A site trains the shared arrays together with personal arrays, which never leave it. The
        first message to a site also holds initial weights if 'train.initial-weights' names a file.
        'server.aggregation' is the rule of the average, usually the mean weighted by samples. A
        site without a usable reply does not count.
        """
        before = dict.fromkeys(ask.sites, state.arrays)
        trained = ask(TRAIN, self._with_starts(state, ask), reference=before)
        return replace(state, arrays=self.average(trained, state.arrays))

    def evaluate(self, state: State, ask: Ask) -> None:
        """Let each site measure the shared arrays together with the arrays that it has kept.

        A site that has not kept any yet uses their initial values. Sites return only metrics.
        """
        ask(EVALUATE, self._with_starts(state, ask), expect={})

    def _with_starts(self, state: State, ask: Ask) -> dict[str, Arrays]:
        """Return the arrays to send to each asked site, by site.

        These are the shared arrays and, if the site needs them, initial weights (``start``).
        """
        return {site: {**state.arrays, **self.start(site, ask)} for site in ask.sites}

    def disclosures(self) -> Disclosures:
        """List the data sent by a site: all weights except the arrays that stay there."""
        shared, *more = super().disclosures().leaves
        return Disclosures(f"{shared}, except {', '.join(self._personal)}, which stay", *more)

    @cached_property
    def _personal(self) -> list[str]:
        return list(self.settings.personal(self.blueprint))


def refuse_one_part(method: str, shared: int, personal: int) -> None:
    """Check that the method shares some of the network's arrays and keeps others at the sites.

    Args:
        method: the method's name, which the error states.
        shared: the number of arrays that the sites share.
        personal: the number of arrays that stay at the sites.

    Raises:
        SettingError: ``shared`` or ``personal`` is 0.
    """
    if not shared or not personal:
        raise SettingError(
            f"method '{method}' would share {shared} of {shared + personal} arrays of this "
            "network: choose another 'network.name' or method"
        )


class FedRep(FedPer):
    """Averages the representation (all layers but the head); the heads stay at the sites."""

    capabilities = replace(FedPer.capabilities, paced_epochs=False)


class FedBN(FedPer):
    """Averages everything except batch norms; networks for tables and ViTs have no batch norms."""

    capabilities = replace(FedPer.capabilities, vit=False, tables=False)
