"""A finished run for Python: its files as frames, its model as a module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.config.trusted_plugins import name_plugins
from fedsilo.server_app.run.arguments import AnyRun, Plugins, folder_of, path_of, plugin_texts

if TYPE_CHECKING:
    import pandas as pd

    from fedsilo.server_app.studies.finished_run import FinishedRun
    from fedsilo.server_app.studies.predict.model import SiteModel


# The columns of the table for a data set that is a plugin
_METRICS = ("accuracy", "balanced-accuracy", "auc", "loss")


@dataclass(frozen=True)
class Run:
    """A finished run; each file is read at its first use."""

    finished: FinishedRun

    def _repr_html_(self) -> str:
        """Build the final table for a notebook, without the metrics that no page may show."""
        from fedsilo.datasets.registry import DATA_SETS, data_set
        from fedsilo.server_app.records.summary import summary_lines
        from fedsilo.server_app.run.notebook import html_of_lines
        from fedsilo.server_app.studies.report.shown import ShownRun

        shown = ShownRun(self.path)
        name = shown.summary["dataset"]
        # A plugin's code is not imported only to show its run
        metrics = data_set(name).headline if name in DATA_SETS else _METRICS
        lines = [*summary_lines(shown.summary, shown.silos, metrics)]
        if shown.withheld:
            lines.append(
                f"Some metrics of {', '.join(shown.withheld)} are not shown, because they rest on "
                f"fewer than {shown.floor} patients, or would reveal a metric that does."
            )
        return html_of_lines([*lines, str(self.path)])

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.finished.path

    @property
    def summary(self) -> Mapping[str, Any]:
        """``summary.json``: final metrics, seconds, bytes, failures (docs/run-directory.md)."""
        return self.finished.summary

    @cached_property
    def settings(self) -> dict[str, Value]:
        """Every setting of the run, by its key."""
        return self.finished.settings.as_mapping()

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """``metrics.csv``: a row per number, ``round, site, split, metric, value``."""
        return _frame(self.finished.metrics, "round,site,split,metric,value", value=float)

    @cached_property
    def traffic(self) -> pd.DataFrame:
        """``traffic.csv``: a row per message with its bytes, seconds, optimiser steps, samples."""
        numbers = {"bytes_down": int, "bytes_up": int, "seconds": float}
        numbers |= dict.fromkeys(("steps", "samples"), int)
        columns = f"round,phase,site,{','.join(numbers)}"
        return _frame(self.finished.traffic, columns, **numbers)

    @cached_property
    def sites(self) -> pd.DataFrame:
        """A row per site: ``site, distribution, train, val, test`` (samples) and ``dropped``."""
        import pandas as pd

        return pd.DataFrame(
            {"site": site, "distribution": facts["distribution"], **facts["sizes"]}
            | {"dropped": facts["dropped"]}
            for site, facts in self.finished.silos.items()
        )

    def model(
        self,
        site: str | None = None,
        *,
        data_dir: Path | str | None = None,
        state_dir: Path | str | None = None,
        best: bool = False,
    ) -> SiteModel:
        """Return the final model, opened with the data of a site.

        Its ``network`` is an ``nn.Module`` in eval mode; it takes ``inputs(split)``, which are
        decoded and standardised samples. Its ``module()`` maps samples as they are read to class
        probabilities.

        Without ``site``, the first site whose data are on this machine is used, if all sites share
        one model. ``best`` selects the model of the best round ('early-stopping-metric').

        Raises:
            FedsiloError: the run has no such site, or its model or data are not on this machine.
        """
        from fedsilo.server_app.studies.predict.model import open_model

        return open_model(self.path, site, path_of(data_dir), path_of(state_dir), best)

    def predictions(
        self,
        site: str | None = None,
        split: str = "test",
        *,
        data_dir: Path | str | None = None,
        best: bool = False,
    ) -> pd.DataFrame:
        """Predict a split of a site, as the command ``predict`` does.

        Raises:
            FedsiloError: as ``model``, or the split is unknown or empty, or differs from the run's.
        """
        from fedsilo.server_app.studies.predict.inputs import open_inputs
        from fedsilo.server_app.studies.predict.novelty import reference_of
        from fedsilo.server_app.studies.predict.prediction import predict_inputs
        from fedsilo.server_app.studies.predict.request import CaseSource

        model = self.model(site, data_dir=data_dir, best=best)
        inputs = open_inputs(model, CaseSource("split", split))
        return predict_inputs(model, inputs, reference=reference_of(model, site)).frame()


def load_run(path: AnyRun, *, plugin: Plugins = None) -> Run:
    """Read a finished run; ``plugin`` are the reader's own copies of the run's plugins."""
    from fedsilo.server_app.studies.finished_run import finished_run

    name_plugins(plugin_texts(plugin))
    return Run(finished_run(folder_of(path)))


def _frame(rows: list[dict[str, str]], columns: str, **types: Any) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows, columns=columns.split(",")).astype({"round": int} | types)
