"""A finished run's model at one site, as a module of PyTorch, and what it answers there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from torch import Tensor

from client_app.methods.base import SiteMethod
from client_app.training.evaluation import predict
from datasets.silo.silos import Split
from models.contract.errors import DataError, SettingError
from models.contract.messages import INCOMING
from models.maths.mc_dropout import predictive_entropy
from models.networks.encoders import float_inputs
from models.networks.site_network import SiteNetwork
from server_app.records.finished_site import opened, sites_of

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class SiteModel:
    """A model as it was measured at the end of a run, with the samples of its site.

    Attributes:
        method: the site's method, which holds its silo, decoded and standardised as in the run.
        network: maps inputs (n, *input_shape) to logits (n, classes).
    """

    method: SiteMethod
    network: SiteNetwork

    @property
    def classes(self) -> Sequence[str]:
        """The classes' names, numbers where the data set has none."""
        return self.method.silo.class_names()

    def inputs(self, split: str = "test") -> Tensor:
        """Return a split's samples as the network takes them: (n, *input_shape) float32.

        Raises:
            SettingError: there is no such split.
        """
        inputs: Tensor = float_inputs(self._samples(split).inputs)
        return inputs

    def predictions(self, split: str = "test") -> pd.DataFrame:
        """Return a row a sample: ``label``, ``predicted``, ``p-<class>`` and ``entropy`` in nats.

        Probabilities are those that the run's figures of the split were computed from: the mean
        over its Monte Carlo dropout passes, by the same draws.

        Raises:
            SettingError: there is no such split.
            DataError: it is empty.
        """
        samples, silo = self._samples(split), self.method.silo
        if not len(samples):
            raise DataError(f"site {silo.name} has no {split} samples to predict: choose another")
        key = (self.method.request.instruction.round, silo.name, INCOMING, split)
        probabilities = predict(
            self.network, samples, self.method.drawing, self.method.compute, key
        )
        names = np.array(self.classes, dtype=object)
        columns = {f"p-{name}": probabilities[:, at].numpy() for at, name in enumerate(names)}
        return pd.DataFrame(
            {
                "label": names[samples.labels.numpy()],
                "predicted": names[probabilities.argmax(dim=1).numpy()],
                **columns,
                "entropy": predictive_entropy(probabilities).numpy(),
            }
        )

    def _samples(self, split: str) -> Split:
        if split not in SPLITS:
            raise SettingError(f"there is no split '{split}': it is one of {', '.join(SPLITS)}")
        return self.method.silo.splits()[split]


def site_model(
    run_dir: Path, site: str, data_dir: Path | None = None, state_dir: Path | None = None
) -> SiteModel:
    """Open the model of a finished run at a site whose data are here.

    Args:
        run_dir: the run directory.
        site: the site.
        data_dir: the data directory; None: the run's own.
        state_dir: the folder of the site's private state; None: the run directory's.

    Raises:
        FedsiloError: the run has not ended, has no such site, or nothing of its model or the data
            is here.
    """
    sites_of(run_dir, [site])
    method, network = opened(run_dir, site, data_dir, state_dir)
    measured = next(iter(method.measured(network)))  # of prototypes that answer, for example
    measured.network.eval()
    return SiteModel(method, measured.network)
