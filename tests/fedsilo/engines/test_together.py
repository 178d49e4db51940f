"""Sites that are trained as one against the loop over them."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from fedsilo.core.errors import FedsiloError, SettingError
from fedsilo.core.settings_schema import Value
from fedsilo.engines import together
from fedsilo.engines.inline_engine import run_inline
from fedsilo.models.networks.stacked import Rows, StackedNetwork
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.float64 import ABSOLUTE, RELATIVE, train_in_float64
from tests.support.tiny import TINY

HEART: dict[str, Value] = {
    "method": "fedavg",
    "dataset": "heart-synthetic",
    "train.batch-size": 16,
    "rounds": 2,
    "network.name": "mlp",
    "network.width": 4,
    "train.mc-passes": 3,
    "network.dropout": 0.2,
    "machine.device": "cpu",
}
# Silos of many sizes, and so batches that are padded, by batch norm too
UNEQUAL: dict[str, Value] = {
    **{key: value for key, value in TINY.items() if not key.startswith("silo-")},
    "method": "fedavg",
    "split.partition": "dirichlet",
    "split.silos": 5,
    "train.batch-size": 64,
    "rounds": 1,
}
_OF_THE_MACHINE = ("seconds", "peak-memory-bytes")


def ran(folder: Path, values: dict[str, Value], vectorised: int, sites: int) -> RunDirectory:
    own = {**values, "machine.vectorised": vectorised, "run.out": str(folder / str(vectorised))}
    return run_inline(resolve({**own, "run.name": "run"}), sites)


@pytest.mark.parametrize(
    ("values", "sites", "vectorised"),
    [
        (HEART, 4, 4),
        (
            HEART
            | {"train.local-steps": 7, "train.schedule": "cosine", "train.optimiser": "nadam"},
            4,
            3,
        ),
        (HEART | {"train.rate-decay": "inverse-sqrt", "method": "fedadam"}, 4, 4),
        (HEART | {"train.optimiser": "sgd", "train.optimiser-arguments": "{momentum: 0.9}"}, 4, 4),
        (UNEQUAL, 5, 5),
        (UNEQUAL | {"network.leading-norm": False, "train.local-steps": 3}, 5, 2),
    ],
    ids=["epochs", "schedule", "train.rate-decay", "momentum", "batch-norm", "steps"],
)
def test_sites_trained_as_one_come_to_what_the_loop_over_them_comes_to(
    values: dict[str, Value],
    sites: int,
    vectorised: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train_in_float64(monkeypatch)  # a grouped convolution adds up in another order
    loop = ran(tmp_path, values, 1, sites)
    with mock.patch.object(together, "_take_steps", wraps=together._take_steps) as steps:
        one = ran(tmp_path, values, vectorised, sites)
    assert max(len(call.args[2]) for call in steps.call_args_list) == vectorised
    models = [load_file(run.path / "model.safetensors") for run in (loop, one)]
    assert models[0].keys() == models[1].keys()
    for name, array in models[0].items():
        np.testing.assert_allclose(models[1][name], array, RELATIVE, ABSOLUTE, err_msg=name)
    numbers = [measured(run) for run in (loop, one)]
    assert numbers[0] == pytest.approx(numbers[1], rel=RELATIVE, abs=ABSOLUTE)
    assert numbers[0]


def measured(run: RunDirectory) -> dict[tuple[str, ...], float]:
    """Return the numbers of a run's metrics.csv; what depends on the machine is left out."""
    return {
        (row["round"], row["site"], row["split"], row["metric"]): float(row["value"])
        for row in run.read_csv("metrics.csv")
        if row["metric"] not in _OF_THE_MACHINE
    }


def test_site_that_diverges_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    values = HEART | {"train.learning-rate": 1e30, "train.optimiser": "sgd", "train.local-steps": 9}
    said = []
    for vectorised in (1, 4):
        with pytest.raises(FedsiloError) as error:
            ran(tmp_path, values, vectorised, 4)
        said.append(str(error.value))
    assert "training diverged" in said[0]
    assert said[1] == said[0]


def test_dropout_of_several_sites_has_the_numbers_of_each() -> None:
    rows = Rows([2, 3], [torch.Generator().manual_seed(seed) for seed in (5, 6)])
    stack = StackedNetwork(torch.nn.Sequential(torch.nn.Dropout(0.5)), 2, rows)
    found = rows.split(stack.network(torch.ones(6, 4)))
    for site, (seed, size) in enumerate([(5, 2), (6, 3)]):
        torch.manual_seed(seed)
        expected = torch.nn.functional.dropout(torch.ones(size, 4), 0.5)
        assert torch.equal(found[site, :size], expected)
    assert not found[0, 2].any(), "padding"


def test_batch_norm_of_padded_rows_is_of_the_real_ones() -> None:
    rows = Rows([4, 2])
    # In float64, since float32 sums differ with the order in which a processor adds
    stack = StackedNetwork(torch.nn.Sequential(torch.nn.BatchNorm2d(3).double()), 2, rows)
    images = torch.randn(8, 3, 2, 2, generator=torch.Generator().manual_seed(1)).double()
    found = rows.split(stack.network(images))
    for site, size in enumerate(rows.sizes):
        own = torch.nn.BatchNorm2d(3).double()
        torch.testing.assert_close(found[site, :size], own(images[4 * site : 4 * site + size]))
        torch.testing.assert_close(stack.arrays["0.running_mean"][site], own.running_mean)
        torch.testing.assert_close(stack.arrays["0.running_var"][site], own.running_var)
        assert stack.arrays["0.num_batches_tracked"][site] == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": "fedprox"}, "does more than train the received model"),
        ({"train.optimiser-state": "run"}, "'train.optimiser-state' is 'run'"),
        ({"train.optimiser": "lbfgs"}, "'train.optimiser' is 'lbfgs'"),
        ({"train.class-weights": "balanced"}, "'train.class-weights' is 'balanced'"),
        (
            {"privacy.sample-clip-norm": 1.0, "privacy.noise-multiplier": 1.0},
            "'privacy.sample-clip-norm' is 1.0",
        ),
    ],
)
def test_what_sites_cannot_be_trained_as_one_with_is_refused(
    changes: dict[str, Value], reason: str
) -> None:
    with pytest.raises(
        SettingError, match=f"'machine.vectorised' is 4.*{reason}.*'machine.vectorised' to 1"
    ):
        resolve({**HEART, **changes, "machine.vectorised": 4})


def test_plug_that_extends_fedavg_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine_together.py").write_text(
        "from fedsilo.strategies.methods.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n    pass\n"
    )
    plug = {"method": "mine_together", "plugin": str(tmp_path / "mine_together.py")}
    with pytest.raises(SettingError, match="'mine_together' does more than train"):
        resolve({**HEART, **plug, "machine.vectorised": 4})
