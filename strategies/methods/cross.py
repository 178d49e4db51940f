"""Cross (Fed-Align-CL, table III): each silo trains alone, and every model is tested at every silo.

Messages are the ensemble's: only instructions until the last round, whose reply holds the site's
weights by state-dict name. The final evaluation sends all of them, ``expert/<site>/<array>``, to
all sites. Its reply has the metrics of the site's own model and ``<metric>-from-<site>`` for every
received model (``models.methods.cross``). The diagonal of the matrix is method ``local``, the
paper's "Single".
"""

from collections.abc import Mapping
from typing import Any

from fedsilo.models.methods.cross import CROSSED, metric_from
from fedsilo.strategies.loop.method import Capabilities, Disclosures, State
from fedsilo.strategies.methods.ensemble import Ensemble

_DOCUMENT = "cross.json"


class Cross(Ensemble):
    """Collects the sites' own models once, and sends all of them to all sites for testing."""

    # Sites have the frozen backbone, so only trained weights are sent
    capabilities = Capabilities(paced_epochs=True, initial_weights=True)

    def disclosures(self) -> Disclosures:
        """Describe the weights and the metrics of other sites' models."""
        return Disclosures(
            "once, after the last round: all trained weights and batch-norm statistics of the "
            "site's own model, which go to all other sites once",
            f"at the end: {', '.join(CROSSED)} of every site's model on this site's validation and "
            "test data",
        )

    def documents(self, state: State, values: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """Return cross.json: for each metric the matrix of test values.

        Rows are training sites, columns are testing sites. A value is None if the testing site's
        labels leave the metric undefined, or if a site failed: the training site in the last round,
        or the testing site in the final evaluation. A metric without any value is left out.
        """
        sites = self.participants.sites()
        document = {}
        for metric in CROSSED:
            matrix: list[list[float | None]] = []
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
