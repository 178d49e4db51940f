"""Regressions of the pooled heart patients by statsmodels, for ``tests/methods/test_glm.py``.

    pip install --target DIR statsmodels==0.15.0
    PYTHONPATH=$PWD:DIR python -m tests.support.statsmodels_fits > fits.json

The file is kept as ``tests/methods/statsmodels_fits.json``.

Patients of the four hospitals stand below each other, without a column of their hospital, as in
``fedsilo fit``. A missing value is the mean of its column over all patients who have it.
"""

import json
from typing import Any

import numpy as np
import statsmodels
import statsmodels.api as sm

from fedsilo.datasets.registry import load_silo
from fedsilo.server_app.config.settings import resolve
from tests.methods.test_heart_regressions import HEART

SITES = ("cleveland", "hungary", "switzerland", "va")
_FAMILIES = {"logistic": sm.families.Binomial(), "poisson": sm.families.Poisson()}


def pooled_rows() -> tuple[list[str], Any, Any]:
    """Return the names of the columns, and the rows and labels of all hospitals."""
    common = resolve({"dataset": "heart", "method": "fedavg"}).common
    rows, labels = [], []
    for site in SITES:
        silo = load_silo(site, common)
        for part in silo.splits().values():
            rows.append(part.inputs.double().numpy())
            labels.append(part.labels.double().numpy())
    return list(silo.features), np.concatenate(rows), np.concatenate(labels)


def fit(family: str, outcome: str, columns: list[str]) -> dict[str, Any]:
    """Return the coefficients, their standard errors and the log-likelihood."""
    features, rows, labels = pooled_rows()
    x = rows[:, [features.index(name) for name in columns]]
    y = rows[:, features.index(outcome)] if outcome else labels
    x, y = x[~np.isnan(y)], y[~np.isnan(y)]
    x = sm.add_constant(np.where(np.isnan(x), np.nanmean(x, axis=0), x))
    if family == "linear":
        result = sm.OLS(y, x).fit()
    else:
        result = sm.GLM(y, x, family=_FAMILIES[family]).fit(tol=1e-14)
    return {
        "estimates": result.params.tolist(),
        "standard-errors": result.bse.tolist(),
        "log-likelihood": float(result.llf),
    }


if __name__ == "__main__":
    made: dict[str, Any] = {"statsmodels": statsmodels.__version__}
    for name, (outcome, columns) in HEART.items():
        made[name] = fit(name, outcome, columns.split(","))
    print(json.dumps(made, indent=1))
