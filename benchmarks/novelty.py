"""Whether ``fedsilo predict`` tells patients of another hospital from those it was trained for.

Each of the four heart hospitals is left out in turn, and FedAvg is trained on the other three with
the settings of ``fedavg-heart`` and a fifth of the training rows for validation. Every patient of
the hospital that was left out is then predicted as a new case, as the test rows of the three are.
``auroc`` is of the novelty score, of "this is from elsewhere". ``marked`` is the share beyond the
limit that the three hospitals' validation rows set for 5 %, ``answered`` the accuracy of what is
left. A row whose blood pressure of 0 the schema refuses is counted as ``refused`` alone.

    python benchmarks/novelty.py --data-dir DIR --csv docs/results/novelty.csv [--seeds 3]
"""

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import yaml
from sklearn.metrics import roc_auc_score

from fedsilo import predict
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.processes import app_folder
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import silo_names
from fedsilo.datasets.tables import heart
from fedsilo.engines.experiments import find_experiment
from fedsilo.engines.inline_engine import run_inline
from fedsilo.inference.predict.answers import Predictions
from fedsilo.inference.predict.inputs import CaseSource, open_inputs
from fedsilo.inference.predict.novelty_reference import reference_of
from fedsilo.inference.predict.prediction import predict_inputs
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.settings import resolve


def main() -> None:
    """Write a line for each hospital and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = list(_rows(options.data_dir, options.seeds))
    write_atomically(options.csv, pd.DataFrame(rows).round(4).to_csv(index=False))


def _rows(data_dir: Path, seeds: int) -> Iterator[dict[str, Value]]:
    schema = yaml.safe_load(Path(heart.__file__).with_name("heart.yaml").read_text())
    for column in schema["columns"]:
        if column["name"] == "chol":
            column["range"] = [0.0, 1500.0]  # 0 is what tells Swiss patients from others here
    files = schema["sites"]
    for left_out in files:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for file in files.values():
                shutil.copy(data_dir / "heart_disease" / file, folder / file)
            own = {site: file for site, file in files.items() if site != left_out}
            (folder / "schema.yaml").write_text(
                yaml.safe_dump(schema | {"sites": own}, sort_keys=False)
            )
            for seed in range(seeds):
                run = _run(folder, seed)
                yield {"left-out": left_out, "seed": seed} | _metrics(run, folder, files[left_out])


def _run(folder: Path, seed: int) -> Path:
    values = dict(find_experiment(app_folder() / "simulation.yaml", "fedavg-heart").values)
    values |= {"dataset": "table", "data.dir": str(folder), "data.cache-dir": str(folder / "cache")}
    values |= {"seed": seed, "split.val-folds": 5, "run.out": str(folder), "run.name": f"run{seed}"}
    settings = resolve(values)
    return run_inline(settings, len(silo_names(settings.common))).path


def _metrics(run: Path, folder: Path, file: str) -> dict[str, Value]:
    labels = pd.read_csv(folder / file, header=None).iloc[:, -1].clip(0, 1)
    reference = reference_of(FinishedRun.open(run).model(), None)
    new = predict(run, table=folder / file, answer_all=True)
    kept = [int(new.inputs.names[place]) - 1 for place in new.inputs.kept()]
    elsewhere = _cases(new, labels[kept].to_numpy())
    tests = []
    for site in FinishedRun(run).silos:
        model = FinishedRun.open(run).model(site)
        inputs = open_inputs(model, CaseSource("split", "test"))
        found = predict_inputs(model, inputs, reference=reference)
        assert inputs.truth is not None
        tests.append(_cases(found, inputs.truth.numpy()))
    own = pd.concat(tests)
    places = np.repeat([0, 1], [len(own), len(elsewhere)])
    scores = pd.concat([own, elsewhere])["novelty"]
    metrics: dict[str, Value] = {"auroc": float(roc_auc_score(places, scores))}
    for name, cases in (("own", own), ("elsewhere", elsewhere)):
        metrics[f"{name}-cases"] = len(cases)
        metrics[f"{name}-marked"] = float(cases["marked"].mean())
        metrics[f"{name}-accuracy"] = float(cases["right"].mean())
        metrics[f"{name}-answered"] = float(cases[~cases["marked"]]["right"].mean())
        metrics[f"{name}-marked-accuracy"] = float(cases[cases["marked"]]["right"].mean())
    return metrics | {"refused": sum("impossible" in fault for fault in new.faults.values())}


def _cases(found: Predictions, labels: npt.NDArray[np.int64]) -> pd.DataFrame:
    assert not isinstance(found.novelty, str)
    right = found.probabilities.argmax(dim=1).numpy() == labels
    marks = {"novelty": found.novelty.scores(), "marked": found.novelty.unusual()}
    return pd.DataFrame(marks | {"right": right})


if __name__ == "__main__":
    main()
