"""Weighted means of site arrays by Flower's own FedAvg arithmetic, in float64 and site order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

from models.contract.messages import ARRAYS, METRICS, NUM_EXAMPLES
from strategies.loop.state import SiteReply
from strategies.wire.records import NDArray


def weighted_mean(
    replies: Mapping[str, SiteReply], names: Iterable[str], equal: bool = False
) -> dict[str, NDArray]:
    """Return the n_k-weighted mean of the arrays ``names`` over ``replies``, float32.

    With ``equal`` each site weighs the same, however many samples it has.

    Flower's ``aggregate_arrayrecords`` adds up in the arrays' own type, so it is handed float64
    copies, sorted by site: the same replies give the same bits whatever order they came in.
    """
    wanted = sorted(names)
    records = [
        RecordDict(
            {
                ARRAYS: ArrayRecord({n: Array(reply.array(n).astype(np.float64)) for n in wanted}),
                METRICS: MetricRecord({NUM_EXAMPLES: 1 if equal else reply.examples()}),
            }
        )
        for _, reply in sorted(replies.items())
    ]
    mean = aggregate_arrayrecords(records, NUM_EXAMPLES)
    return {name: mean[name].numpy().astype(np.float32) for name in wanted}
