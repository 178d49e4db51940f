"""Methods whose sites train alone: Local, Ensemble and Cross.

Messages: an instruction to each site, and metrics back. Each site starts from the seed's initial
weights, or from 'train.initial-weights', which its first message holds as ``start/<name>``, and
keeps its model on its own disk. With Local no array leaves a site. With Ensemble and Cross the
reply of the last round holds the site's weights by state-dict name, and the final evaluation sends
all of them, ``expert/<site>/<array>``, to all sites.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedsilo.core.array_names import with_prefix
from fedsilo.core.messages import TRAIN
from fedsilo.models.methods.cross import crossed_metrics, metric_from
from fedsilo.models.networks.mixture import expert_array
from fedsilo.strategies.loop.method import Arrays, Ask, Capabilities, Disclosures, Method, State


class Local(Method):
    """Lets each site train alone and collects metrics: the baseline of every federated method."""

    capabilities = Capabilities(paced_epochs=True, initial_weights=True)

    def round(self, state: State, ask: Ask) -> State:
        """Let each site train its own model, and return the state unchanged.

        Sites return metrics but no arrays. If 'train.initial-weights' names a file, the first
        message to a site holds its weights.
        """
        send = {site: self.start(site, ask) for site in ask.sites}
        ask(TRAIN, send, expect={})
        return state

    def model_for(self, site: str, state: State) -> Arrays:
        """Return no arrays, because each site measures its own model."""
        return {}

    def disclosures(self) -> Disclosures:
        """Return no sentences, because sites send no arrays."""
        return Disclosures()


class Ensemble(Method):
    """Collects the sites' own models once; predictions are the mean of their probabilities."""

    # A mixture of probabilities does not have evidence alpha
    capabilities = Capabilities(vit=False, paced_epochs=True, evidence=False, initial_weights=True)

    def round(self, state: State, ask: Ask) -> State:
        """Let each site train its own model, and in the run's last round collect the models.

        A collected model is stored as ``expert/<site>/<array>``. A site that gave no usable reply
        in the last round has no stored model. In earlier rounds sites return only metrics, and the
        state does not change.
        """
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
        """List the data sent by a site: its model, once, after the last round."""
        return Disclosures(
            "once, after the last round: all weights and batch-norm statistics of the site's own "
            "model, which go to all other sites"
        )


_DOCUMENT = "cross.json"


class Cross(Ensemble):
    """Collects the sites' own models once, and sends all of them to all sites for testing.

    This is table III of Fed-Align-CL. The reply to the final evaluation has the metrics of the
    site's own model, and ``<metric>-from-<site>`` for every received model
    (``models.methods.cross``). The diagonal of the matrix is method ``local``, "Single" in the
    paper.
    """

    # Sites have the frozen backbone, so only trained weights are sent
    capabilities = Capabilities(paced_epochs=True, initial_weights=True)

    def disclosures(self) -> Disclosures:
        """Describe the data that a site sends, in two sentences for ``privacy.json``.

        A site sends its own trained model once, after the last round. At the end it also sends
        metrics of every site's model, such as accuracy, on its validation and test samples.
        """
        metrics = ", ".join(crossed_metrics(self.common.task))
        return Disclosures(
            "once, after the last round: all trained weights and batch-norm statistics of the "
            "site's own model, which go to all other sites once",
            f"at the end: {metrics} of every site's model on this site's validation and test data",
        )

    def documents(self, state: State, values: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """Return the content of ``cross.json`` by file name: each model's test values at each site.

        Each metric has an entry with three keys. "trained" and "tested" list the sites. "values" is
        a matrix with a row for each site that trained a model, and a column for each site that
        tested it. A value is None if the tester reported none, for example because its labels do
        not define the metric. A metric without any value is left out. If no metric is left, the
        mapping is empty.

        Args:
            state: ignored.
            values: the final test metrics: testing site -> ``<metric>-from-<site>`` -> value.
        """
        sites = self.participants.sites()
        document = {}
        for metric in crossed_metrics(self.common.task):
            matrix: list[list[float | None]] = []
            # A metric that no site could measure would be a matrix of only None
            has_values = False
            for trained in sites:
                key = metric_from(metric, trained)
                matrix.append([values.get(tested, {}).get(key) for tested in sites])
                has_values = has_values or matrix[-1] != [None] * len(sites)
            if has_values:
                document[metric] = {"trained": sites, "tested": sites, "values": matrix}
        if not document:
            return {}
        return {_DOCUMENT: document}
