from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.inference.predict.inputs import table_inputs

SCHEMA = """\
columns:
  - {name: age}
  - {name: weight}
label: {column: ill, classes: {well: [0], sick: [1]}}
policy: impute
sites: {north: north.csv}
"""


def test_the_terminal_counts_imputed_values_by_column(tmp_path: Path) -> None:
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    (tmp_path / "new.csv").write_text("age;weight\n50;\n;\n40;70\n")
    model: Any = SimpleNamespace(
        common=CommonSettings(dataset="table", data_dir=str(tmp_path)),
        silo=SimpleNamespace(standardisation=FeatureStatistics(np.zeros(2), np.ones(2))),
    )
    inputs = table_inputs(model, tmp_path / "new.csv", None)
    assert list(inputs.notes) == ["imputed: 3 missing values (1 of age, 2 of weight)"]
