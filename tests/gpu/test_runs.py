"""Every method trains on a GPU: measurements as on the CPU, and the same bytes twice."""

import csv
import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fedsilo.engines.inline_engine
from fedsilo import predict
from fedsilo.core.methods import METHODS, why_not_private
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import run_inline
from fedsilo.engines.process_engine import run_with_processes
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.dying_grid import DyingGrid
from tests.support.setting_keys import as_keys
from tests.support.tiny import VARIANTS

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: make test-gpu", allow_module_level=True)

GPU = "cuda"
ON_GPU: dict[str, Value] = {"machine.device": GPU, "machine.precision": "fp32"}
PRIVATE: dict[str, Value] = {
    "privacy.sample-clip-norm": 1.0,
    "privacy.noise-multiplier": 2.0,
    "privacy.trust": "nobody",
}

Tiny = Callable[..., dict[str, Value]]
Finished = Callable[..., RunDirectory]


@pytest.fixture(scope="module")
def finished(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Return a variant's run of two rounds with changed settings, run once for each ``turn``."""

    @functools.cache
    def run(variant: str, turn: int = 0, **changes: Value) -> RunDirectory:
        values = tiny(str(VARIANTS[variant]["method"])) | VARIANTS[variant]
        values |= {"rounds": 2, "run.name": "run", "run.out": str(tmp_path_factory.mktemp(variant))}
        values |= as_keys(changes)
        return run_inline(resolve(values), 3)

    return functools.partial(run, device=GPU, precision="fp32")


def measured(directory: RunDirectory) -> dict[tuple[str, ...], float]:
    """Return metrics.csv's values by round, site, split and metric."""
    with (directory.path / "metrics.csv").open(newline="") as file:
        rows = csv.DictReader(file)
        keys = ("round", "site", "split", "metric")
        return {tuple(row[key] for key in keys): float(row["value"]) for row in rows}


def contents(directory: RunDirectory) -> dict[str, bytes]:
    """Return the bytes that the seed decides, by file."""
    files = [directory.path / name for name in ("metrics.csv", "model.safetensors")]
    files += sorted(directory.path.glob("sites/*/*"))
    return {str(f.relative_to(directory.path)): f.read_bytes() for f in files if f.is_file()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_on_the_gpu_ends_with_finite_metrics_and_the_gpus_memory(
    variant: str, finished: Finished
) -> None:
    directory = finished(variant)
    summary = directory.read_json("summary.json")
    assert summary["rounds"] == 2
    assert all(0 < peak < 10**9 for peak in summary["peak-memory-bytes"].values())
    values = measured(directory)
    assert {key[0] for key in values} == {"0", "1", "2"}
    assert all(map(math.isfinite, values.values()))


# UEFL is never measured without dropout
@pytest.mark.parametrize("variant", sorted(METHODS.keys() - {"uefl"}))
def test_a_network_before_training_is_measured_as_on_the_cpu(
    variant: str, finished: Finished
) -> None:
    """Dropout draws differ, since they are drawn on the device, so it is measured without."""
    runs = (finished(variant, device=device, mc_passes=0) for device in (GPU, "cpu"))
    on_gpu, on_cpu = map(measured, runs)
    assert on_gpu.keys() == on_cpu.keys()
    keys = [key for key in on_cpu if key[0] == "0" and key[3] in ("accuracy", "loss")]
    if variant == "cyclic":  # a site validates what the one before it has trained
        keys = [key for key in keys if key[2] == "test"]
    assert keys
    for key in keys:
        assert on_gpu[key] == pytest.approx(on_cpu[key], rel=1e-3, abs=1e-4), key


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_seed_gives_the_same_bytes(variant: str, finished: Finished) -> None:
    """This is promised where summary.json names no operation; attention alone has to be told so."""
    first, second = (finished(variant, turn=turn, deterministic="true") for turn in (0, 1))
    assert first.read_json("summary.json")["unrepeatable-operations"] == []
    assert contents(second) == contents(first)


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_attention_is_unrepeatable_unless_it_must_be(variant: str, finished: Finished) -> None:
    named = finished(variant).read_json("summary.json")["unrepeatable-operations"]
    attention = VARIANTS[variant].get("network.name") == "vit" or "fedevprompt" in variant
    assert named == (["Memory-Efficient-attention"] if attention else [])


@pytest.mark.parametrize(
    ("variant", "precision"),
    [
        (variant, precision)
        for variant in ("fedavg", "uefl", "fedevprompt", "fedaligncl", "fedefm", "picsr")
        for precision in ("auto", "bf16", "fp16")
        if (variant, precision) != ("fedaligncl", "fp16")  # which it refuses
    ],
)
def test_half_precision_trains_every_paper(
    variant: str, precision: str, finished: Finished
) -> None:
    values = measured(finished(variant, precision=precision))
    assert all(map(math.isfinite, values.values()))
    exact = measured(finished(variant))
    before = [key for key in values if key[0] == "0" and key[3] == "loss"]
    for key in before:
        assert values[key] == pytest.approx(exact[key], rel=0.05), key


@pytest.mark.parametrize("variant", sorted(name for name in METHODS if not why_not_private(name)))
def test_private_training_runs_on_the_gpu(variant: str, tiny: Tiny, tmp_path: Path) -> None:
    values = tiny(variant) | PRIVATE | ON_GPU | {"run.name": "run", "run.out": str(tmp_path)}
    if variant == "uefl":
        values |= {"uefl.codeword-start": "gaussian", "uefl.refresh": "none"}
    directory = run_inline(resolve(values), 3)
    guarantee = directory.read_json("privacy.json")["guarantee"]
    assert all(0 <= epsilon < 1e6 for epsilon in guarantee["sites"].values())


def test_processes_that_share_a_gpu_give_the_bytes_of_one(
    tiny: Tiny, finished: Finished, tmp_path: Path
) -> None:
    values = tiny("fedavg") | ON_GPU | {"run.name": "run", "run.out": str(tmp_path)}
    resources: dict[str, Value] = {
        "num-supernodes": 3,
        "init-args-num-gpus": 1,
        "client-resources-num-gpus": 0.5,
    }
    assert contents(run_with_processes(resolve(values), resources)) == contents(finished("fedavg"))


@pytest.mark.parametrize("variant", ["fedavg-optimiser-state", "uefl", "fedaligncl", "fedefm"])
def test_a_run_that_ended_early_resumes_to_the_same_bytes(
    variant: str,
    tiny: Tiny,
    finished: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = tiny(str(VARIANTS[variant]["method"])) | VARIANTS[variant] | ON_GPU
    values |= {"run.name": "run", "run.out": str(tmp_path)}
    with monkeypatch.context() as patch:
        patch.setattr(fedsilo.engines.inline_engine, "InlineGrid", DyingGrid)
        DyingGrid.lives = 8  # three hellos, and some of the first round's
        with pytest.raises(KeyboardInterrupt):
            run_inline(resolve(values), 3)
    resumed = run_inline(resolve(values | {"resume": True}), 3)
    assert contents(resumed) == contents(finished(variant))


@pytest.mark.parametrize("method", METHODS)
def test_predictions_of_a_gpus_run_have_the_metrics_of_metrics_csv(
    method: str, tiny: Tiny, tmp_path: Path
) -> None:
    values = tiny(method) | ON_GPU | {"run.name": "run", "run.out": str(tmp_path)}
    directory = run_inline(resolve(values), 3)
    found = predict(directory.path, site="s1a", split="test")
    rows = measured(directory)
    for name, value in found.document["figures"].items():
        if (key := ("2", "s1a", "test", name)) in rows:
            assert value == pytest.approx(rows[key], rel=1e-5, abs=1e-6)
