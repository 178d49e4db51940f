"""Commands beside a run that are refused or fail, and their fixes."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedsilo.cli.main import main
from fedsilo.comparison import trials
from fedsilo.core.errors import FedsiloError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Silo
from fedsilo.datasets.synthetic import phantoms
from fedsilo.engines import ray_engine
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from tests.support.fixes import Values, tiny
from tests.support.tiny import VIT

# Parts of the errors that the functions below try
TRIED = (
    "restarts in each round, so the comparison would be unfair: set",
    "have images of different sizes",
    "are needed: raise 'split.public-share'",
    "pre-training diverged in epoch",
    "validation loss is not finite: lower 'train.learning-rate'",
    "fits the network to be trained: leave 'network.width' and 'vit.backbone-...' at the run's",
    "a client process sees only the GPU that it is given",
    "in the experiment's 'resources' (0.5 for two clients at once), or take --engine inline",
)
EXPERIMENTS = """
pretraining: {epochs: 1, batch-size: 64, warmup-epochs: 0}
experiments:
  once:
    config: {method: local, dataset: heart-synthetic, network: logistic, rounds: 1, mc-passes: 0,
             device: cpu}
  goes-on: {base: once, config: {method: fedavg, optimiser-state: run}}
  paced: {base: once, config: {method: fedavg, epoch-steps: 2, pace: 2}}
  skin:
    config: {method: fedevprompt, dataset: dermoscopy-phantom, image-size: 32, sample-share: 0.003,
             public-share: 0.3, network: vit, backbone-weights: tiny.safetensors,
             backbone-width: 8, backbone-depth: 1, backbone-heads: 1, backbone-patch: 16,
             prompt-length: 1, basic-layers: 1, mc-passes: 0, device: cpu}
"""
ANGIOGRAMS = ("--task", "segmentation", "--dataset", "angiogram-phantom", "--weights", "scratch")
DIGITS = ("--task", "classification", "--dataset", "digits", "--weights", "scratch")
Command = Callable[..., str]


@pytest.fixture
def command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Return a function that runs a command on the experiments above and gives its error."""
    monkeypatch.chdir(tmp_path)
    # Of so small a network a second thread makes nothing faster, on a busy machine all slower
    monkeypatch.setattr(trials, "cores", lambda: 1)
    Path("simulation.yaml").write_text(EXPERIMENTS)
    outs = (f"out{number}" for number in range(100))

    def run(*words: str, changes: Sequence[str] = ()) -> str:
        capsys.readouterr()
        more = [part for change in changes for part in ("--set", change)]
        code = main([*words, "--out", next(outs), *more])
        said = capsys.readouterr().err
        assert (code != 0) == said.startswith("fedsilo: error"), said
        return said

    return run


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("other", "instead"),
    [("goes-on", ("train.optimiser-state=round",)), ("paced", ("train.epoch-steps=0", "pace=40"))],
)
def test_compare_with_one_optimiser_rule_for_all_runs(
    other: str, instead: tuple[str, ...], command: Command
) -> None:
    compare = ("compare", "once", other, "--seeds", "1", "--supernodes", "1", "--unequal")
    told = command(*compare)
    assert (
        f"the optimiser of experiment '{other}' continues over rounds, but that of 'once'" in told
    )
    assert (
        f"set 'train.optimiser-state' to 'run' for all ('train.epoch-steps' of '{other}' is "
        in told
    )
    assert "or to 'round' if 'train.epoch-steps' is 0" in told
    assert not command(*compare, changes=("train.optimiser-state=run",))
    assert not command(*compare, changes=instead)


def test_pretrain_with_larger_public_share_runs(command: Command) -> None:
    pretrain = ("pretrain", "skin", "--save-as", "w.safetensors")
    told = command(*pretrain, changes=("split.public-share=0.05",))
    assert "images, but at least 20 are needed: raise 'split.public-share'" in told
    assert not command(*pretrain, changes=("split.public-share=0.3",))


def test_pretrain_at_lower_rate_does_not_diverge(command: Command) -> None:
    file, weights = Path("simulation.yaml"), Path("w.safetensors")
    section = "pretraining: {learning-rate: 1.0e+38, "
    file.write_text(EXPERIMENTS.replace("pretraining: {", section))
    pretrain = ("pretrain", "skin", "--save-as", str(weights))
    assert "lower 'learning-rate' in the simulation file's 'pretraining'; no" in command(*pretrain)
    assert not weights.exists()
    file.write_text(EXPERIMENTS.replace("pretraining: {", "pretraining: {learning-rate: 0.001, "))
    assert not command(*pretrain)
    assert weights.exists()


def _finetuned(command: Command, *words: str, changes: Sequence[str] = ()) -> str:
    small = ("--seeds", "1", "--epochs", "1", "--device", "cpu")
    return command("finetune", *words, *small, changes=changes)


def test_finetune_at_lower_rate_does_not_diverge(command: Command) -> None:
    one_step = (
        "silos=3",
        "split.silo-train-size=40",
        "split.silo-test-size=10",
        "width=4",
        "train.batch-size=128",
    )
    told = _finetuned(command, *DIGITS, changes=(*one_step, "train.learning-rate=1e30"))
    assert "validation loss is not finite: lower 'train.learning-rate'" in told
    assert not _finetuned(command, *DIGITS, changes=(*one_step, "train.learning-rate=1e-3"))


@pytest.mark.parametrize(
    ("run", "change"),
    [({}, "width=8"), ({**VIT, "vit.train-backbone": True}, "vit.backbone-width=32")],
    ids=["conv", "vit"],
)
def test_finetune_without_size_takes_the_runs(run: Values, change: str, command: Command) -> None:
    values = {**tiny("fedavg", rounds=1), **run, "run.name": "run", "run.out": str(Path.cwd())}
    run_inline(resolve(values), 3)
    finetune = ("--task", "classification", "--weights", "run")
    told = _finetuned(command, *finetune, changes=(change,))
    assert (
        "fits the network to be trained: leave 'network.width' and 'vit.backbone-...' at the run's"
        in told
    )
    assert not _finetuned(command, *finetune)


class _Uneven(phantoms.AngiogramPhantom):
    """Sites of which each has a size of its own, unless the settings give one for all."""

    def load_masked(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        size = settings.image_size or {"human": 32, "animal": 40}[name]
        return super().load_masked(name, dataclasses.replace(settings, image_size=size), places)


def test_finetune_with_size_pools_images_of_different_sizes(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phantoms, "ANGIOGRAM_PHANTOM", _Uneven())
    words = (*ANGIOGRAMS, "--site", "human", "--site", "animal")
    small = ("split.sample-share=0.03", "split.val-folds=2", "width=4")
    told = _finetuned(command, *words, changes=small)
    assert "sites human, animal have images of different sizes" in told
    assert "set 'data.image-size'" in told
    assert not _finetuned(command, *words, changes=(*small, "data.image-size=32"))


def test_ray_without_gpu_runs_with_each_fix(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts(*_: Any) -> None:
        raise FedsiloError("a SuperLink starts")

    monkeypatch.setattr(ray_engine, "_superlink", starts)
    simulate = ("simulate", "once", "--engine", "ray")
    told = command(*simulate, changes=("device=cuda:1",))
    assert "set 'machine.device' to 'cuda', and CUDA_VISIBLE_DEVICES to choose among GPUs" in told
    told = command(*simulate, changes=("device=cuda",))
    assert "set 'client-resources-num-gpus' in the experiment's 'resources' (0.5 for two" in told
    assert "or take --engine inline" in told
    assert "Ray" not in command(*simulate[:3], "inline", changes=("device=cuda",))
    resources = "  once:\n    resources: {client-resources-num-gpus: 0.5}"
    Path("simulation.yaml").write_text(EXPERIMENTS.replace("  once:", resources))
    assert "a SuperLink starts" in command(*simulate, changes=("device=cuda",))
