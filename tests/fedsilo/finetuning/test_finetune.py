"""``fedsilo finetune``: what is taken from a run, trained, measured, written and refused."""

import csv
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.numpy
import torch
from torch import Tensor, nn

from fedsilo import finetune as tune
from fedsilo.cli.main import main
from fedsilo.client_app.training.compute import Compute
from fedsilo.core.files.state_files import load_state
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.silo.silos import Split
from fedsilo.engines.inline_engine import run_inline
from fedsilo.finetuning.finetune import train_seed
from fedsilo.finetuning.tasks import (
    Pooled,
    Segmentation,
    Study,
    TrainedSeed,
    predicted_masks,
)
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.server_app.config.settings import resolve
from tests.support import tiny

CPU = Compute(torch.device("cpu"), bf16=False)
VIT = tiny.VIT | {"vit.train-backbone": True, "vit.backbone-patch": 8, "vit.prompt-length": 2}
ANGIO: dict[str, Value] = {
    "method": "fedavg",
    "dataset": "angiogram-phantom",
    "split.sample-share": 0.03,
    "split.val-folds": 2,
    "data.image-size": 32,
    "rounds": 1,
    "train.local-epochs": 1,
    "train.batch-size": 8,
    "network.width": 4,
    "train.mc-passes": 0,
    "machine.device": "cpu",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with finished runs 'conv' and 'vit' on angiograms."""
    out = tmp_path_factory.mktemp("angiograms")
    for name, more in {"conv": {}, "vit": VIT}.items():
        values: dict[str, Value] = {**ANGIO, **more, "run.name": name, "run.out": str(out)}
        run_inline(resolve(values), 4)
    return out


Finetune = Callable[..., int]


@pytest.fixture
def finetune(tmp_path: Path) -> Finetune:
    """Return a function that runs the command: task, weights, further options."""

    def run(task: str, weights: list[str | Path], *more: str, out: str = "out") -> int:
        named = [part for one in weights for part in ("--weights", str(one))]
        small = ["--seeds", "1", "--epochs", "1", "--device", "cpu"]
        return main(
            ["finetune", "--task", task, *named, "--out", str(tmp_path / out), *small, *more]
        )

    return run


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "finetune.json").read_text())
    return found


def test_a_u_net_starts_from_the_run_s_encoder_beside_one_from_scratch(
    finetune: Finetune, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune("segmentation", [runs / "conv", "scratch"], "--seeds", "2") == 0
    out = tmp_path / "out"
    said = capsys.readouterr().out
    assert "conv: gives 45 of the encoder's 45 arrays, 100.0 % of its numbers" in said
    assert "unet on angiogram-phantom, test metrics, mean ± sd over 2 seeds" in said
    assert sorted(path.name for path in out.iterdir()) == [
        "curves.csv",
        "figures.csv",
        "finetune.json",
        "model.safetensors",
        "overlays.png",
    ]
    told = read(out)
    assert (told["task"], told["network"]) == ("segmentation", "unet")
    assert [line["weights"] for line in told["lines"]] == ["conv", "scratch"]
    assert [line["method"] for line in told["lines"]] == ["fedavg", None]
    assert told["lines"][0]["taken"]["share"] == 1
    assert told["lines"][1]["taken"] is None
    assert told["settings"]["data.image-size"] == 32, "the run's data"
    assert told["settings"]["network.width"] == 4, "the run's network"
    assert "rounds" not in told["settings"]
    for line in told["lines"]:
        values = [seed["test"]["dice"] for seed in line["seeds"]]
        assert line["mean"]["dice"] == pytest.approx(sum(values) / 2)
        assert line["sd"]["dice"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    with (out / "figures.csv").open(newline="") as file:
        metrics = list(csv.DictReader(file))
    assert [(row["network"], row["weights"], row["metric"]) for row in metrics] == [
        ("unet", weights, metric)
        for weights in ("conv", "scratch")
        for metric in ("dice", "jaccard", "miou", "dice-pooled")
    ]
    first = told["lines"][0]
    assert float(metrics[0]["mean"]) == pytest.approx(first["mean"]["dice"], abs=1e-6)
    assert float(metrics[0]["sd"]) == pytest.approx(first["sd"]["dice"], abs=1e-6)
    assert metrics[0]["seeds"] == "2"
    with (out / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    places = {(r["weights"], r["seed"], r["epoch"], r["split"]) for r in rows}
    assert places == {
        (weights, seed, "1", split)
        for weights in ("conv", "scratch")
        for seed in "01"
        for split in ("train", "val")
    }
    assert (out / "overlays.png").read_bytes().startswith(b"\x89PNG")
    arrays, facts = load_state(out / "model.safetensors")
    assert facts["weights"] == "conv"
    assert facts["seed"] in (0, 1)
    assert "pyramid.encoder.stages.0.weight" in arrays


def test_what_came_of_each_start_is_returned_and_its_lines_are_told_not_printed(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    finetuned = tune(
        task="classification",
        weights=(str(finished / "fedavg"), "scratch"),
        out=tmp_path / "out",
        seeds=1,
        epochs=1,
        device="cpu",
        tell=lines.append,
    )
    from_run, scratch = finetuned.starts
    assert (from_run.label, from_run.method) == ("fedavg", "fedavg")
    assert from_run.transfer is not None
    assert from_run.transfer.head is True
    assert (scratch.label, scratch.method, scratch.transfer) == ("scratch", "", None)
    assert [result.seed for result in scratch.trained] == [0]
    assert finetuned.study.epochs == 1
    assert [line.split(":")[0] for line in lines] == [
        "digits, s1a, s2a, s3a",
        "fedavg",
        "fedavg, seed 0",
        "scratch, seed 0",
    ]
    assert capsys.readouterr().out == ""


def test_operations_without_a_deterministic_form_are_named_at_the_end(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warned(*arguments: Any) -> TrainedSeed:
        said = "nll_loss2d_forward_out does not have a deterministic implementation, but you set"
        warnings.warn(said, stacklevel=1)
        return train_seed(*arguments)

    monkeypatch.setattr("fedsilo.finetuning.finetune.train_seed", warned)
    weights, out, lines = (str(finished / "fedavg"),), tmp_path / "out", list[str]()
    small = {"seeds": 1, "epochs": 1, "device": "cpu", "tell": lines.append}
    with warnings.catch_warnings(record=True) as passed:
        tune(task="classification", weights=weights, out=out, **small)
    assert lines[-1].endswith("no deterministic form on this device: nll_loss2d_forward_out")
    assert not any("deterministic" in str(warning.message) for warning in passed)


def test_equal_commands_give_equal_bytes(finetune: Finetune, runs: Path, tmp_path: Path) -> None:
    for out in ("first", "again"):
        assert finetune("segmentation", [runs / "conv"], out=out) == 0
        torch.rand(3)
    for name in ("curves.csv", "figures.csv", "model.safetensors", "overlays.png"):
        first, again = ((tmp_path / out / name).read_bytes() for out in ("first", "again"))
        assert first == again, name


def test_a_vit_starts_from_the_run_s_vit_and_its_position_embeddings_take_another_size(
    finetune: Finetune, runs: Path, tmp_path: Path
) -> None:
    small = ("--set", "data.image-size=16", "--site", "human")
    assert finetune("segmentation", [runs / "vit"], *small) == 0
    told = read(tmp_path / "out")
    assert told["network"] == "vit"
    assert told["sites"] == ["human"]
    assert told["lines"][0]["taken"]["share"] == 1
    assert told["lines"][0]["taken"]["left"] == []


def test_images_are_classified_by_the_run_s_network_and_for_the_same_classes_by_its_head(
    finetune: Finetune, finished: Path, tmp_path: Path
) -> None:
    assert finetune("classification", [finished / "fedavg", "scratch"]) == 0
    told = read(tmp_path / "out")
    assert told["lines"][0]["taken"]["head"] is True
    assert set(told["definitions"]) >= {"accuracy", "balanced-accuracy", "auc"}
    assert told["images"] == {"train": 108, "val": 12, "test": 45}, "of three sites"
    assert {"accuracy", "balanced-accuracy"} <= told["lines"][1]["mean"].keys()
    assert not (tmp_path / "out" / "overlays.png").exists()


def test_another_data_set_takes_the_encoder_but_not_the_head_nor_the_run_s_data_settings(
    finetune: Finetune, finished: Path, tmp_path: Path
) -> None:
    data = ("--dataset", "angiogram-phantom", "--set", "split.sample-share=0.03", "--site", "human")
    small = ("--set", "data.image-size=16", "--set", "split.val-folds=2")
    assert finetune("classification", [finished / "fedavg"], *data, *small) == 0
    told = read(tmp_path / "out")
    assert told["lines"][0]["taken"]["head"] is False
    assert told["lines"][0]["taken"]["share"] == 1
    assert "split.silo-train-size" not in told["settings"]


def test_a_method_without_a_shared_model_gives_a_site_s_own(
    finetune: Finetune, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune("classification", [finished / "local"]) == 1
    assert "method 'local' has no shared model; choose a site's model" in capsys.readouterr().err
    assert finetune("classification", [finished / "local"], "--from-site", "s2a") == 0
    (line,) = read(tmp_path / "out")["lines"]
    assert line["weights"] == "local, s2a"
    assert line["taken"]["share"] == 1


def test_a_swin_network_is_trained_from_scratch(finetune: Finetune, tmp_path: Path) -> None:
    data = ("--dataset", "angiogram-phantom", "--set", "split.sample-share=0.08", "--site", "human")
    small = ("--set", "data.image-size=16", "--set", "network.width=4")
    assert finetune("segmentation", ["scratch"], *data, *small, "--network", "swin") == 0
    told = read(tmp_path / "out")
    assert told["network"] == "swin"
    assert told["settings"]["split.val-folds"] == 5, "where none are set, one in five is held out"
    assert "split.partition" not in told["settings"], "masks belong to the data set's own sites"


@pytest.mark.parametrize("network", ["unet", "swin", "swinunet"])
def test_a_network_that_takes_no_vit_learns_the_run_s_tokens_first(
    network: str,
    finetune: Finetune,
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ("--network", network, "--set", "network.width=4")
    assert finetune("segmentation", [runs / "vit"], *more) == 1
    assert "remove --network, give --distil-epochs to let" in capsys.readouterr().err
    assert finetune("segmentation", [runs / "vit", "scratch"], *more, "--distil-epochs", "2") == 0
    assert "vit: its ViT's tokens were distilled into the encoder for 2" in capsys.readouterr().out
    told = read(tmp_path / "out")
    learned, scratch = told["lines"]
    assert told["network"] == network
    assert told["settings"]["vit.backbone-width"] == 0, "nothing of the run's own network"
    assert learned["taken"] is scratch["taken"] is scratch["distilled"] is None
    first, last = learned["distilled"]["losses"]
    assert last < first
    assert learned["seeds"][0]["test"]["loss"] != scratch["seeds"][0]["test"]["loss"]


def test_a_trans_unet_starts_from_the_run_s_vit_but_for_what_embeds_images(
    finetune: Finetune, runs: Path, tmp_path: Path
) -> None:
    assert finetune("segmentation", [runs / "vit"], "--network", "transunet") == 0
    (line,) = read(tmp_path / "out")["lines"]
    assert line["taken"]["share"] == 1
    arrays, _ = load_state(tmp_path / "out" / "model.safetensors")
    assert "pyramid.embed.weight" in arrays
    assert not [name for name in arrays if "patch_embed.proj" in name]


@pytest.mark.parametrize("network", ["vit", "transunet"])
def test_a_vit_s_file_is_taken_as_initial_weights_are(
    network: str, finetune: Finetune, runs: Path, tmp_path: Path
) -> None:
    vit, _ = load_state(runs / "vit" / "model.safetensors")
    plain = {n.removeprefix("encoder.vit."): torch.from_numpy(a) for n, a in vit.items()}
    file = tmp_path / "clip.pt"
    torch.save({n: a for n, a in plain.items() if not n.startswith(("prompts", "head"))}, file)
    own = ("split.sample-share", "split.val-folds", "data.image-size", "network.width")
    values = VIT | {key: ANGIO[key] for key in own}
    idle = ("network.name", "vit.backbone-weights", "vit.train-backbone")
    changes = [p for k, v in values.items() if k not in idle for p in ("--set", f"{k}={v}")]
    data = ("--dataset", "angiogram-phantom", "--site", "human")
    assert finetune("segmentation", [file], *data, *changes, "--network", network) == 0
    (line,) = read(tmp_path / "out")["lines"]
    assert line["weights"] == "clip.pt"
    assert line["taken"]["left"] == ["prompts.b", "prompts.t"]


def test_of_a_frozen_vit_the_prompts_are_the_run_s_and_the_backbone_is_that_beside_it(
    finetune: Finetune, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vit, _ = load_state(runs / "vit" / "model.safetensors")
    named = "encoder.vit."
    plain = {n.removeprefix(named): a for n, a in vit.items() if n.startswith(named)}
    file = tmp_path / "backbone.safetensors"
    safetensors.numpy.save_file(plain, file)
    frozen = {**ANGIO, **VIT, "vit.train-backbone": False, "run.out": str(tmp_path)}
    for weights in (str(file), "random"):
        values: dict[str, Value] = {**frozen, "vit.backbone-weights": weights}
        run_inline(resolve({**values, "run.name": Path(weights).stem}), 4)
    one_site = ("--site", "human")
    assert finetune("segmentation", [tmp_path / "random"], *one_site) == 1
    assert "its ViT is frozen and random, so the run has trained no enc" in capsys.readouterr().err
    assert finetune("segmentation", [tmp_path / "backbone"], *one_site) == 0
    assert f"a backbone from '{file}', as the run's" in capsys.readouterr().out
    taken = read(tmp_path / "out")["lines"][0]["taken"]
    assert (taken["arrays"], taken["left"]) == (2, [])
    file.write_bytes(b"others")
    assert finetune("segmentation", [tmp_path / "backbone"], *one_site, out="again") == 1
    assert "are not those of the run in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "weights", "more", "told"),
    [
        ("segmentation", ["scratch"], [], "without a run, the data set is unknown"),
        ("segmentation", ["fedavg"], [], "data set 'digits' has no masks: take one of angiogram"),
        ("segmentation", ["nowhere"], [], "nowhere', but no such run directory or file"),
        ("segmentation", ["fedavg"], ["--network", "vit"], "network 'vit' does not accept the w"),
        ("segmentation", ["fedavg"], ["--network", "swin"], "of fedavg (network 'co"),
        (
            "segmentation",
            ["vit"],
            ["--from-site", "s2a", "--network", "unet"],
            "s2a (network 'vit')",
        ),
        ("segmentation", ["fedavg"], ["--network", "transunet"], "(network 'conv')"),
        ("segmentation", ["fedavg"], ["--distil-epochs", "2"], "is for a run of a ViT and a --net"),
        ("segmentation", ["scratch"], ["--distil-epochs", "-1"], "must be at least 0, but is -1"),
        (
            "segmentation",
            ["fedavg"],
            ["--network", "unt"],
            "swin, transunet, swinunet, but is 'unt'",
        ),
        ("classification", ["fedavg"], ["--network", "swin"], "one of conv, vgg16-bn, resnet22,"),
        ("classification", ["vit"], [], "method 'local' has no shared model"),
        ("classification", ["ensemble"], [], "the model of method 'ensemble' has no encoder"),
        (
            "classification",
            ["table"],
            [],
            "table is a run on a table, but fine-tuning needs images",
        ),
        ("classification", ["fedavg"], ["--site", "s9a"], "'digits' has no site 's9a': choose one"),
        (
            "classification",
            ["fedavg"],
            ["--set", "split.silos=4"],
            "'split.silos' is 4, but fedavg was trained",
        ),
        (
            "classification",
            ["fedavg"],
            ["--set", "seed=3"],
            "'seed' has no effect with fine-tuning",
        ),
        ("classification", ["fedavg"], ["--set", "rounds=3"], "'rounds' has no effect with fine-t"),
        (
            "classification",
            ["fedavg"],
            ["--set", "machine.vectorised=2"],
            "'machine.vectorised' has no effect with",
        ),
        (
            "classification",
            ["fedavg"],
            ["--set", "machine.memory-format=contiguous"],
            "'machine.memory-format' has no effect with fine-tuning",
        ),
        ("classification", ["fedavg"], ["--set", "network.name=vit"], "give --network instead"),
        (
            "classification",
            ["fedavg"],
            ["--set", "learning-rat=1"],
            "did you mean 'train.learning-rate",
        ),
        ("classification", ["fedavg"], ["--set", "network.width=8"], "none of the"),
        ("classification", ["fedavg"], ["--epochs", "0"], "--epochs must be at least 1, but is 0"),
        ("classification", ["fedavg"], ["--seeds", "0"], "--seeds must be at least 1, but is 0"),
        ("classification", ["fedavg", "fedavg"], [], "fedavg twice: name each once"),
        ("classification", ["scratch"], ["--from-site", "s1a"], "but --weights names none"),
        ("classification", ["fedavg"], ["--device", "tpu"], "'machine.device' must be auto, cpu"),
    ],
)
def test_what_cannot_be_is_told_in_one_line_and_nothing_is_written(
    task: str,
    weights: list[str],
    more: list[str],
    told: str,
    finetune: Finetune,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = [one if one == "scratch" else finished / one for one in weights]
    assert finetune(task, named, *more) == 1
    error = capsys.readouterr().err
    assert error.startswith("fedsilo: error")
    assert told in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_not_written_over(
    finetune: Finetune, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    assert finetune("classification", [finished / "fedavg"]) == 1
    assert "out already exists: remove it, or give another --out" in capsys.readouterr().err


def test_training_that_diverges_is_told_and_nothing_is_written(
    finetune: Finetune, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--set", "train.learning-rate=1e30", "--epochs", "3")
    assert finetune("classification", [finished / "fedavg"], *more) == 1
    assert "training diverged" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


class Dots(nn.Module):
    """Finds bright pixels: a logit per pixel, of its brightness, times one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(-1.0))

    def forward(self, images: Tensor) -> Tensor:
        one = self.weight * images[:, 0]
        return torch.stack([-one, one], dim=1)


def dots(count: int) -> Split:
    masks = (torch.rand(count, 4, 4, generator=torch.Generator().manual_seed(count)) > 0.5).byte()
    return Split(masks[:, None] * 255, masks)


def study(epochs: int = 30, rate: float = 0.3) -> Study:
    settings = CommonSettings(width=2, device="cpu", learning_rate=rate, batch_size=2, mc_passes=0)
    pooled = Pooled(dots(4), dots(3), dots(2), NetworkShape((1, 4, 4), 2), (), ("a",), ("a", "a"))
    return Study(Segmentation("unet"), settings, pooled, CPU, 1, epochs)


def test_the_best_epoch_is_chosen_on_validation_images_and_tested() -> None:
    found = train_seed(study(), Dots(), 0)
    by_epoch = {e: v for e, split, metric, v in found.curves if (split, metric) == ("val", "dice")}
    assert list(by_epoch) == list(range(1, 31))
    assert by_epoch[found.epoch] == max(by_epoch.values()) == 1
    assert found.val["dice"] == 1
    assert found.test == pytest.approx(
        {"dice": 1, "jaccard": 1, "dice-pooled": 1, "miou": 1, "loss": found.test["loss"]}
    )
    losses = {e: v for e, split, metric, v in found.curves if (split, metric) == ("val", "loss")}
    equal = [e for e, dice in by_epoch.items() if dice == 1]
    assert found.epoch == min(equal, key=lambda e: losses[e]), "of equals the one of least loss"


def test_the_arrays_are_those_of_the_best_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    order = iter([0.2, 0.9, 0.5, 1.0])  # three epochs, then the test images
    seen: list[float] = []

    def measured(self: object, network: nn.Module, *_: object) -> dict[str, float]:
        seen.append(cast(Dots, network).weight.item())
        return {"dice": next(order), "loss": 1.0}

    monkeypatch.setattr(Segmentation, "measure_split", measured)
    found = train_seed(study(3), Dots(), 0)
    assert found.epoch == 2
    assert float(found.arrays["weight"]) == seen[1] == seen[3] != seen[2]
    assert found.val["dice"] == 0.9


def test_predictions_do_not_depend_on_how_images_are_batched() -> None:
    images = dots(40).inputs
    network = Dots()
    with torch.no_grad():
        network.weight.fill_(2.0)
    assert torch.equal(predicted_masks(network, images, CPU), (images[:, 0] > 0).long())
