"""FedCross at the server: every site trains one of several models, which are then mixed in pairs.

Messages down: a model by plain array names, and ``model/<array>``, the mean of all models, if the
round measures it. Messages up: the trained model. There are as many models as sites.
"""

from dataclasses import replace

import numpy as np

from fedsilo.core.array_names import arrays_below, is_statistic, with_prefix
from fedsilo.core.errors import SettingError
from fedsilo.core.messages import TRAIN
from fedsilo.core.seeding import derive_seed
from fedsilo.models.methods.decentralised import MODEL
from fedsilo.models.methods.fedcross import FedCrossSettings, collaborators
from fedsilo.strategies.loop.method import (
    Arrays,
    Ask,
    Capabilities,
    Disclosures,
    Method,
    State,
)
from fedsilo.strategies.wire.records import NDArray

# The paper's name for the models; in the state <kind><number>/<array>
_MIDDLEWARE = "middleware/"


class FedCross(Method):
    """Keeps as many models as sites; the mean of all is the model that is measured."""

    settings: FedCrossSettings
    capabilities = Capabilities(initial_weights=True)

    def initial_state(self) -> State:
        """Return a state with one model per site, all with the network's initial weights.

        Raises:
            SettingError: only one site takes part, so there is no second model to mix with, or a
                file of weights is missing or does not fit the network.
        """
        sites = self.participants.sites()
        if len(sites) < 2:
            raise SettingError(
                "method 'fedcross' mixes the models of two sites or more, and one takes part: "
                "add a site, or choose 'fedavg'"
            )
        weights = self.starting_weights()
        return self._state_of(State(), [weights] * len(sites))

    def round(self, state: State, ask: Ask) -> State:
        """Let each asked site train a model drawn for it, then mix each model with another one.

        There are as many models as sites, and a draw from the seed and the round gives each site
        one. A model whose site is not asked, or gives no usable reply, is mixed without training.

        Each model becomes alpha * model + (1 - alpha) * collaborator, where alpha is 'cross-alpha'.
        The setting 'collaborator' chooses this other model: the one with the least similar weights,
        the one with the most similar weights, or each one in turn from round to round. The new
        state has the mixed models and their mean.
        """
        # Drawn over all sites, also those that are not asked, so that each model has one site
        models, sites = self._models(state), self.participants.sites()
        seed = derive_seed(self.common.seed, "fedcross", state.round + 1)
        drawn = dict(zip(sites, np.random.default_rng(seed).permutation(len(sites)), strict=True))
        before: dict[str, Arrays] = {site: models[drawn[site]] for site in ask.sites}
        send: dict[str, Arrays] = {}
        for site, model in before.items():
            send[site] = {**model, **self._mean_to_measure(state)}
        # Updates are measured from the drawn model, not from the mean that is sent beside it
        for site, reply in ask(TRAIN, send, reference=before).items():
            models[drawn[site]] = dict(reply.arrays)
        # Partners are chosen after the training, so similarity counts what was learnt in this round
        partners = collaborators(_vectors(models), self.settings.collaborator, state.round + 1)
        alpha = self.settings.cross_alpha
        mixed = []
        for model, partner in zip(models, partners, strict=True):
            mixed.append(_mean([model, models[partner]], [alpha, 1 - alpha]))
        return self._state_of(state, mixed)

    def model(self, state: State) -> Arrays:
        """Return the mean of all models."""
        return arrays_below(MODEL, state.arrays)

    def model_for(self, site: str, state: State) -> Arrays:
        """Return the mean of all models for the evaluation.

        The state of a finished run may hold only this mean, under plain array names.
        """
        return self.model(state) or state.arrays

    def disclosures(self) -> Disclosures:
        """Describe in one sentence that a site sends its weights and batch-norm statistics.

        The sentence adds that one other site receives them in the next round, mixed with weights of
        another site. It states the share of these weights, 1 - 'cross-alpha'.
        """
        share = self.settings.cross_alpha
        return Disclosures(
            "all weights and batch-norm statistics of the network as this site trained it, each "
            f"round; in the next round one other site gets them, with {1 - share:.2g} of another "
            "site's mixed in"
        )

    def _mean_to_measure(self, state: State) -> dict[str, NDArray]:
        """Return the mean of all models as ``model/<array>`` if sites measure it in the next round.

        'server.evaluate-every' decides. Otherwise the mapping is empty.
        """
        if not self.common.measures_in(state.round + 1):
            return {}
        return with_prefix(MODEL, self.model(state))

    def _models(self, state: State) -> list[dict[str, NDArray]]:
        """Return all models, in the order of their numbers."""
        count = len(self.participants.sites())
        return [arrays_below(f"{_MIDDLEWARE}{place}/", state.arrays) for place in range(count)]

    def _state_of(self, state: State, models: list[dict[str, NDArray]]) -> State:
        """Return the state with these models and their mean."""
        arrays = with_prefix(MODEL, _mean(models, [1 / len(models)] * len(models)))
        for place, model in enumerate(models):
            arrays |= with_prefix(f"{_MIDDLEWARE}{place}/", model)
        return replace(state, arrays=arrays)


def _mean(models: list[dict[str, NDArray]], weights: list[float]) -> dict[str, NDArray]:
    """Return the mean of the models as float32, weighted by ``weights``, which must sum to 1."""
    mean = {}
    for name in models[0]:
        total = np.zeros(models[0][name].shape)
        # float64, because many models' float32 sums would round
        for model, weight in zip(models, weights, strict=True):
            total += weight * model[name].astype(np.float64)
        mean[name] = total.astype(np.float32)
    return mean


def _vectors(models: list[dict[str, NDArray]]) -> NDArray:
    """Flatten each model's weights into one row, so that models can be compared.

    A row joins the model's arrays in the order of their names, without batch norm's running
    statistics. All models must have the same arrays.

    Returns:
        A float64 matrix (models, weights per model).
    """
    # Sorted by name, so that the same places of two rows are the same weights
    rows = []
    for model in models:
        parts = [model[n].ravel().astype(np.float64) for n in sorted(model) if not is_statistic(n)]
        rows.append(np.concatenate(parts))
    return np.stack(rows)
