"""Sites that are trained as one against the loop over them."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from fedsilo.client_app.training.compute import choose_compute
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.core.errors import FedsiloError, SettingError
from fedsilo.core.methods import METHODS as METHODS_OF_ALL
from fedsilo.core.methods import site_class
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value
from fedsilo.engines import inline_engine, together
from fedsilo.engines.inline_engine import choose_together, run_inline
from fedsilo.engines.stacked_steps import HeldSamples, StackedSteps
from fedsilo.models.networks.stacked import Rows, StackedNetwork
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.float64 import ABSOLUTE, RELATIVE, train_in_float64
from tests.support.tiny import TINY, TINY_METHOD

HEART: dict[str, Value] = {
    "method": "fedavg",
    "dataset": "heart-synthetic",
    "train.batch-size": 48,
    "rounds": 2,
    "network.name": "mlp",
    "network.width": 4,
    "train.mc-passes": 3,
    "network.dropout": 0.2,
    "machine.device": "cpu",
}
# A silo of 52 images, the others of 90: it takes fewer steps, and a smaller batch that is padded
UNEQUAL: dict[str, Value] = {
    **TINY,
    "method": "fedavg",
    "split.partition": "dirichlet",
    "split.concentration": 0.2,
    "split.silos": 5,
    "split.silo-train-size": 100,
    "train.batch-size": 40,
    "network.width": 2,
    "server.evaluate-every": 0,
    "rounds": 1,
}
_OF_THE_MACHINE = ("seconds", "peak-memory-bytes")


# What a method's sites do besides training the model they were sent, within two rounds
METHODS: dict[str, dict[str, Value]] = {
    "fedprox": HEART | {"fedprox.proximal-mu": 0.5},
    "scaffold": HEART | {"train.optimiser": "sgd"},
    "feddyn": HEART,
    "fednova": HEART,
    "fedper": HEART,
    "fedrep": HEART,
    "ditto": HEART | {"ditto.personal-lambda": 0.5},
    "local": HEART,
    "fedavg-ft": HEART | {"fedavg-ft.finetune-rounds": 1},
    "fedbabu": HEART | {"fedavg-ft.finetune-rounds": 1},
    "fedbn": UNEQUAL | {"rounds": 2},
    "apfl": UNEQUAL | {"network.dropout": 0.2},
    "moon": UNEQUAL | {"rounds": 2},
    "cdl": HEART,
    "fedproto": HEART | TINY_METHOD["fedproto"],
    "feddistill": HEART | TINY_METHOD["feddistill"],
    "fedpac": HEART | TINY_METHOD["fedpac"],
    "picsr": HEART | TINY_METHOD["picsr"] | {"rounds": 3},
    "fedcross": HEART | {"rounds": 1},
    # Those of ensemble train in the same way, and those of star and matcha as those of ring
    "cross": HEART | {"rounds": 1},
    "ring": HEART | {"rounds": 1},
    "uefl": UNEQUAL | TINY_METHOD["uefl"] | {"rounds": 2, "uefl.segments": 2},
}


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
    stacks, _ = equal_runs(values, sites, vectorised, tmp_path)
    assert max(stacks) == vectorised


@pytest.mark.parametrize("method", METHODS)
def test_sites_of_a_method_trained_as_one_come_to_what_each_comes_to(
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train_in_float64(monkeypatch)
    sites = int(METHODS[method].get("split.silos", 4))
    stacks, alone = equal_runs(METHODS[method] | {"method": method}, sites, sites, tmp_path)
    # UEFL gives an uncertain site a book of its own, whose arrays the other sites do not have
    expected: dict[str, tuple[set[int], int]] = {
        "uefl": ({sites - 1, sites}, 1),
        # A router reads the mean samples of all sites, so its two rounds are not stacked
        "picsr": ({sites}, 2 * sites),
    }
    assert (set(stacks), alone) == expected.get(method, ({sites}, 0))
    said = [line for line in capsys.readouterr().out.splitlines() if "one after another" in line]
    assert len(said) == (method == "picsr")
    assert all("round 2" in line and "'picsr'" in line for line in said)


def test_sites_trained_as_one_twice_have_the_same_bits(tmp_path: Path) -> None:
    values = HEART | {"method": "apfl", "rounds": 1, "machine.deterministic": "true"}
    runs = [ran(tmp_path / str(turn), values, 4, 4) for turn in range(2)]
    first, second = (arrays_of(run) for run in runs)
    assert first.keys() == second.keys()
    assert all(array.tobytes() == second[name].tobytes() for name, array in first.items())
    assert measured(runs[0]) == measured(runs[1])


def test_frozen_copies_in_a_loss_and_layers_in_eval_mode_stay_as_they_are() -> None:
    frozen = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5))
    frozen.requires_grad_(False).eval()
    trained = torch.nn.Sequential(torch.nn.Linear(2, 2))
    parts = torch.nn.ModuleList([trained, frozen])
    stack = StackedNetwork([parts, parts], Rows([1, 1]))
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    torch.testing.assert_close(stack.network[1](rows), rows, rtol=1e-4, atol=0)
    assert set(stack.trained) == {"0.0.weight", "0.0.bias"}
    assert not stack.arrays["1.0.running_mean"].any()
    optimiser = torch.optim.SGD(list(stack.trained.values()), lr=1.0)
    stack.keep(1, optimiser)
    assert len(dict(stack.network.named_parameters())["0.0.weight"]) == 1
    assert len(stack.arrays["0.0.weight"]) == 2


def equal_runs(
    values: dict[str, Value], sites: int, vectorised: int, folder: Path
) -> tuple[list[int], int]:
    """Compare a run with one whose sites are trained as one.

    Returns:
        The sizes of the second run's stacks, and how many of its trainings were of a single site.
    """
    loop = ran(folder, values, 1, sites)
    alone = mock.patch.object(LocalTraining, "run", autospec=True, side_effect=LocalTraining.run)
    with mock.patch.object(together, "StackedSteps", wraps=StackedSteps) as steps, alone as runs:
        one = ran(folder, values, vectorised, sites)
    arrays = arrays_of(loop)
    assert arrays
    found = arrays_of(one)
    assert arrays.keys() == found.keys()
    for name, array in arrays.items():
        np.testing.assert_allclose(found[name], array, RELATIVE, ABSOLUTE, err_msg=name)
    numbers = [measured(run) for run in (loop, one)]
    assert numbers[0] == pytest.approx(numbers[1], rel=RELATIVE, abs=ABSOLUTE)
    assert numbers[0]
    return [len(call.args[0]) for call in steps.call_args_list], runs.call_count


def arrays_of(run: RunDirectory) -> dict[str, Any]:
    """Return the arrays of the final model and of what the sites keep, by file and name."""
    arrays = {}
    for path in sorted(run.path.rglob("*.safetensors")):
        for name, array in load_file(path).items():
            arrays[f"{path.relative_to(run.path)}/{name}"] = array
    return arrays


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
    states = [torch.Generator().manual_seed(seed).get_state() for seed in (5, 6)]
    rows = Rows([2, 3], states)
    stack = StackedNetwork([torch.nn.Sequential(torch.nn.Dropout(0.5))] * 2, rows)
    found = rows.split(stack.network(torch.ones(6, 4)))
    for site, (seed, size) in enumerate([(5, 2), (6, 3)]):
        torch.manual_seed(seed)
        expected = torch.nn.functional.dropout(torch.ones(size, 4), 0.5)
        assert torch.equal(found[site, :size], expected)
    assert not found[0, 2].any(), "padding"


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_of_padded_rows_is_of_the_real_ones(momentum: float | None) -> None:
    def layer() -> torch.nn.BatchNorm2d:
        # In float64, since float32 sums differ with the order in which a processor adds
        return torch.nn.BatchNorm2d(3, momentum=momentum).double()

    rows = Rows([4, 2])
    stack = StackedNetwork([torch.nn.Sequential(layer()) for _ in rows.sizes], rows)
    owns = [layer() for _ in rows.sizes]
    generator = torch.Generator().manual_seed(1)
    for batch in (1, 2):
        images = torch.randn(8, 3, 2, 2, generator=generator).double()
        found = rows.split(stack.network(images))
        for site, (size, own) in enumerate(zip(rows.sizes, owns, strict=True)):
            torch.testing.assert_close(found[site, :size], own(images[4 * site : 4 * site + size]))
            torch.testing.assert_close(stack.arrays["0.running_mean"][site], own.running_mean)
            torch.testing.assert_close(stack.arrays["0.running_var"][site], own.running_var)
            assert stack.arrays["0.num_batches_tracked"][site] == batch


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": "feddbe"}, "'feddbe' has training steps that sites cannot take as one"),
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


def test_plug_with_a_site_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine_together.py").write_text(
        "from fedsilo.client_app.methods.fedavg import FedAvgSite\n"
        "from fedsilo.strategies.methods.fedavg import FedAvg\n\n\n"
        "class Mine(FedAvg):\n    pass\n\n\nclass MineSite(FedAvgSite):\n    pass\n"
    )
    plug = {"method": "mine_together", "plugin": str(tmp_path / "mine_together.py")}
    with pytest.raises(SettingError, match="'mine_together' has training steps"):
        resolve({**HEART, **plug, "machine.vectorised": 4})


def test_the_page_lists_each_method_by_whether_its_sites_train_as_one() -> None:
    page = (Path(__file__).parents[3] / "docs" / "engines.md").read_text()
    allowed, others = page.partition("| allowed |")[2].split("| method |")
    for method in METHODS_OF_ALL.keys() - {"fedevprompt"}:  # its class imports timm, for seconds
        stacks = vars(site_class(method)).get("trains_stacked", False)
        listed = f"`{method}`" in allowed, f"| `{method}` |" in others
        assert listed == (stacks, not stacks), method


class Operations(TorchDispatchMode):
    """Counts the operators that PyTorch runs in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        self.counts[operator.overloadpacket.__name__] += 1
        return operator(*arguments, **(named or {}))


# Each makes the program wait for a GPU: a number or a shape is read from it, or copied to it
WAITING = {"_local_scalar_dense", "item", "nonzero", "equal", "lift_fresh", "unique", "_to_copy"}


def test_a_step_reads_nothing_from_the_device_and_copies_nothing_to_it(tmp_path: Path) -> None:
    take, counted = StackedSteps._take, Counter[str]()

    def watched(steps: StackedSteps, step: int) -> torch.Tensor:
        with Operations() as operations:
            losses = take(steps, step)
        counted.update(operations.counts)
        return losses

    values = UNEQUAL | {"method": "fedprox", "network.dropout": 0.2, "train.local-steps": 4}
    with mock.patch.object(StackedSteps, "_take", watched):
        ran(tmp_path, values, 5, 5)
    assert counted["convolution"]
    assert counted["bernoulli_"]
    # 8-bit images become floats, which is a copy on the device
    assert WAITING & counted.keys() <= {"_to_copy"}
    assert counted["_to_copy"] == 4


def test_samples_of_the_same_sites_stay_on_the_device() -> None:
    held, compute = HeldSamples(), choose_compute("cpu", "fp32", 1)
    parts = [torch.arange(3.0), torch.arange(3.0, 5.0)]
    pick = held.pick(parts, compute)
    assert pick(torch.tensor([0, 4])).tolist() == [0, 4]
    assert held.pick(list(parts), compute) is pick
    assert held.pick([parts[0].clone(), parts[1]], compute) is not pick
    for _ in range(4):  # other groups take the place of those that were used long ago
        held.pick([torch.zeros(1)], compute)
    assert held.pick(parts, compute) is not pick


@pytest.mark.parametrize("vectorised", [0, 4])
def test_sites_that_do_not_fit_into_memory_train_alone_unless_they_were_asked_to(
    vectorised: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inline_engine, "choose_together", lambda *_: 4)
    full = torch.OutOfMemoryError("CUDA out of memory")
    alone = mock.patch.object(LocalTraining, "run", autospec=True, side_effect=LocalTraining.run)
    values = HEART | {"rounds": 1}
    with mock.patch.object(StackedSteps, "take_all", side_effect=full) as tried, alone as runs:
        if vectorised:
            with pytest.raises(FedsiloError, match=r"'machine\.vectorised' below 4"):
                ran(tmp_path, values, vectorised, 4)
        else:
            ran(tmp_path, values, vectorised, 4)
    assert tried.call_count == 1
    assert runs.call_count == (0 if vectorised else 4)


@pytest.mark.parametrize(
    ("own", "gpu", "chosen", "lines"),
    [
        ({}, True, 9, 1),
        ({"method": "feddbe"}, True, 1, 1),
        ({"method": "uefl"}, True, 9, 1),
        ({"device": "cpu"}, True, 1, 0),
        ({}, False, 1, 0),
        ({"vectorised": 3}, True, 3, 0),
        ({"vectorised": 1}, True, 1, 0),
        ({"network": "resnet22"}, True, 1, 1),
    ],
)
def test_on_a_gpu_all_sites_train_as_one_where_they_can(
    own: dict[str, Any],
    gpu: bool,
    chosen: int,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(inline_engine, "has_gpu", lambda: gpu)
    common = CommonSettings(**{"method": "fedavg", "vectorised": 0} | own)
    assert choose_together(common, 9) == chosen
    said = capsys.readouterr().out
    assert said.count("\n") == lines
    assert ("because" in said) == (lines == 1 and chosen == 1)
