"""Cross (Fed-Align-CL, table III): each silo alone, and every silo's model tested at every silo.

Messages as the ensemble's: nothing but instructions until the last round, whose reply holds the
site's weights by state-dict name; the final evaluation carries all of them,
``expert/<site>/<array>``, to all. Its reply has the metrics of the site's own model and
``<metric>-from-<site>`` of every model received (``models.methods.cross``). The diagonal of the
matrix is method ``local``, the paper's "Single".
"""

from collections.abc import Mapping
from typing import Any

from fedsilo.models.methods.cross import CROSSED, metric_from
from fedsilo.strategies.loop.method import Capabilities, Disclosures, State
from fedsilo.strategies.methods.ensemble import Ensemble

_DOCUMENT = "cross.json"


class Cross(Ensemble):
    """Collects the sites' own models once and sends all of them to all sites, to be measured."""

    # A site has the frozen backbone; only what was trained is sent
    capabilities = Capabilities(paced_epochs=True, initial_weights=True)

    def disclosures(self) -> Disclosures:
        """Name the weights and the figures of others' models."""
        return Disclosures(
            "once, after the last round: all trained weights and batch-norm statistics of the "
            "site's own model, which go to all other sites once",
            f"at the end: {', '.join(CROSSED)} of every site's model on this site's validation and "
            "test data",
        )

    def documents(self, state: State, values: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """Return cross.json: of each metric that is defined somewhere the matrix of test figures.

        A row is a training site, a column a testing one. None is where a site's test labels
        leave the metric undefined, or where a site failed: in the last round its model is missing,
        in the final evaluation its figures.
        """
        sites = self.participants.sites()
        document = {}
        for metric in CROSSED:
            matrix = [
                [values.get(tested, {}).get(metric_from(metric, trained)) for tested in sites]
                for trained in sites
            ]
            if any(value is not None for row in matrix for value in row):
                document[metric] = {"trained": sites, "tested": sites, "values": matrix}
        return {_DOCUMENT: document} if document else {}
