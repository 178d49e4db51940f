"""``fedsilo fit`` on the four heart hospitals equals statsmodels on the pooled patients to 1e-6.

``tests/support/statsmodels_fits.py`` has made the expected numbers.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

import fedsilo

FOLDER = Path(os.environ.get("FEDSILO_DATA", ""), "heart_disease")
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs $FEDSILO_DATA/heart_disease")

# Outcome, empty for the label, and columns
HEART = {
    "logistic": ("", "age,sex,thalach,oldpeak"),
    "linear": ("thalach", "age,sex,exang,oldpeak"),
    "poisson": ("trestbps", "age,sex,chol"),
}
EXPECTED = json.loads(Path(__file__).with_name("statsmodels_fits.json").read_text())


@pytest.mark.parametrize(
    ("family", "trust"),
    [("logistic", "server"), ("logistic", "sums"), ("linear", "sums"), ("poisson", "sums")],
)
def test_a_fit_over_the_heart_hospitals_is_that_of_statsmodels(
    family: str, trust: str, tmp_path: Path
) -> None:
    outcome, columns = HEART[family]
    result = fedsilo.fit(
        family,
        dataset="heart",
        outcome=outcome,
        columns=columns,
        trust=trust,
        # One patient in Switzerland is healthy; and each site's own fit is not compared here
        settings={"privacy.sums-min-count": 1, "glm.heterogeneity": False},
        out=tmp_path,
    )
    expected, rows = EXPECTED[family], result.coefficients
    estimates = [row["estimate"] for row in rows]
    errors = [row["standard-error"] for row in rows]
    np.testing.assert_allclose(estimates, expected["estimates"], rtol=1e-6)
    np.testing.assert_allclose(errors, expected["standard-errors"], rtol=1e-6)
    likelihood = result.document["log-likelihood"]
    assert likelihood == pytest.approx(expected["log-likelihood"], rel=1e-6)
