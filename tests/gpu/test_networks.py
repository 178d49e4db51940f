"""Every network trains on a GPU in each precision, and large silos are streamed to it."""

from pathlib import Path

import pytest
import torch

from fedsilo.cli.main import main
from fedsilo.client_app.training import compute
from fedsilo.client_app.training.compute import Compute, Streamed, choose_compute
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from tests.support.tiny import TINY, VIT

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: make test-gpu", allow_module_level=True)

NETWORKS: dict[str, dict[str, Value]] = {
    "conv": {},
    "conv-unnormed": {"network.name": "conv", "network.leading-norm": False},
    "resnet22": {"network.name": "resnet22"},
    "resnet22-checkpointed": {"network.name": "resnet22", "network.gradient-checkpointing": True},
    "vit": {**VIT},
    "vit-fine-tuned": {**VIT, "vit.train-backbone": True},
    "logistic": {"dataset": "heart-synthetic", "network.name": "logistic"},
    "mlp": {"dataset": "heart-synthetic", "network.name": "mlp", "network.width": 8},
    "vgg16-bn": {
        "dataset": "dermoscopy-phantom",
        "split.sample-share": 0.01,
        "data.image-size": 32,
        "network.name": "vgg16-bn",
    },
    "timm": {
        "dataset": "dermoscopy-phantom",
        "split.sample-share": 0.01,
        "data.image-size": 64,
        "network.name": "timm:resnet10t",
    },
}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_trains_and_is_measured(name: str, precision: str, tmp_path: Path) -> None:
    own = {
        "method": "fedavg",
        "machine.device": "cuda",
        "machine.precision": precision,
        "train.local-steps": 2,
    }
    values = TINY | own | NETWORKS[name] | {"run.name": "run", "run.out": str(tmp_path)}
    if "dataset" in NETWORKS[name]:
        values = {key: value for key, value in values.items() if not key.startswith("split.silo")}
    directory = run_inline(resolve(values), int(values.get("split.silos", 4)))
    assert directory.read_json("summary.json")["rounds"] == 2


@pytest.mark.parametrize("network", ["unet", "vit", "swin", "transunet", "swinunet"])
def test_a_segmentation_network_is_trained_on_the_gpu(network: str, tmp_path: Path) -> None:
    words = ["finetune", "--task", "segmentation", "--dataset", "angiogram-phantom"]
    words += ["--weights", "scratch", "--seeds", "1", "--epochs", "1", "--network", network]
    words += ["--site", "human", "--device", "cuda", "--out", str(tmp_path / "out")]
    words += [
        "--set",
        "split.sample-share=0.08",
        "--set",
        "data.image-size=64",
        "--set",
        "network.width=4",
    ]
    assert main(words) == 0


def test_a_streamed_silo_gives_the_rows_of_one_that_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor, place = torch.rand(64, 3, 16, 16), choose_compute("cuda", "fp32", 1)
    rows = [torch.randperm(64)[:size] for size in (16, 16, 32, 5)]
    whole = place.hold(tensor)
    monkeypatch.setattr(compute, "_HELD", 0)
    part = place.hold(tensor)
    assert isinstance(part.__self__, Streamed)  # type: ignore[attr-defined]
    taken = [part(picked) for picked in rows]  # kept, so that none is written over unseen
    for batch, picked in zip(taken, rows, strict=True):
        assert batch.device.type == "cuda"
        assert torch.equal(batch, whole(picked))


def test_the_share_of_a_gpu_bounds_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSILO_GPU_SHARE", "0.1")
    device = choose_compute("cuda", "fp32", 1).device
    total = torch.cuda.get_device_properties(device).total_memory
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(total // 5, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_true_fp32_is_computed_where_it_is_asked_for() -> None:
    torch.manual_seed(0)
    a, b = torch.rand(256, 256), torch.rand(256, 256)
    place: Compute = choose_compute("cuda", "fp32", 1)
    product = (place.bring(a) @ place.bring(b)).cpu().double()
    exact = a.double() @ b.double()
    assert ((product - exact).abs() / exact.abs()).max() < 1e-5
