"""``fedsilo pretrain``: a tiny ViT of made-up public images, and a run that begins with it."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fedsilo.cli.main import main
from fedsilo.client_app.training import compute
from fedsilo.core.errors import FedsiloError
from fedsilo.core.files.locations import find_places
from fedsilo.core.files.state_files import load_state
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import data_set, load_silo, silo_names
from fedsilo.engines.experiments import find_experiment, read_section
from fedsilo.engines.inline_engine import run_inline
from fedsilo.finetuning import pretrain
from fedsilo.finetuning.pretrain import Pretraining, augment, class_weights
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.settings import RunSettings, resolve

ROOT = Path(__file__).resolve().parents[3]
EXPERIMENTS = """
pretraining: {epochs: 2, batch-size: 8, warmup-epochs: 1}
experiments:
  skin:
    config: {method: fedevprompt, dataset: dermoscopy-phantom, image-size: 32, sample-share: 0.003,
             public-share: 0.3, network: vit, backbone-weights: tiny.safetensors,
             backbone-width: 16, backbone-depth: 2, backbone-heads: 2, backbone-patch: 8,
             prompt-length: 2, basic-layers: 1, rounds: 1, local-epochs: 1, dropout: 0.0,
             mc-passes: 0, device: cpu}
  all-private: {base: skin, config: {public-share: 0.0}}
  digits: {config: {method: fedavg, dataset: digits, device: cpu}}
  digits-vit:
    config: {method: fedavg, dataset: digits, network: vit, backbone-weights: random, device: cpu}
"""
IMAGES = 37 + 12 + 10 + 8 + 8 + 8  # of six centres: 3 of 1,000, and at least 8


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a simulation file with tiny experiments."""
    path = tmp_path / "simulation.yaml"
    path.write_text(EXPERIMENTS)
    return path


@pytest.fixture
def pretrained(file: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs the command: experiment, further options."""
    # Of so small a network a second thread makes nothing faster, on a busy machine all slower
    monkeypatch.setattr(pretrain, "cores", lambda: 1)

    def run(experiment: str = "skin", *more: str) -> int:
        out = ["--out", str(file.parent / "runs")]
        return main(["pretrain", experiment, "--file", str(file), *out, *more])

    return run


def settings_of(file: Path, **changes: Any) -> RunSettings:
    return resolve(dict(find_experiment(file, "skin").values) | changes)


def test_the_weights_go_where_the_experiment_looks_for_them_and_its_run_begins_with_them(
    pretrained: Callable[..., int],
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = f"cache-dir={tmp_path / 'cache'}"
    assert pretrained("skin", "--set", cache) == 0
    weights = tmp_path / "cache" / "backbones" / "tiny.safetensors"
    said = capsys.readouterr().out
    assert f"weights: {weights}" in said
    assert "epoch 1: loss " in said
    assert "epoch 2: loss " in said
    arrays, facts = load_state(weights)
    assert facts["pretraining"]["epochs"] == 2
    assert facts["image-size"] == 32
    assert facts["data"][:2] == ["dermoscopy-phantom", 0.3]
    assert 0 <= facts["held out"]["accuracy"] <= 1
    assert not [name for name in arrays if name.startswith("head")], "the classifier is thrown away"
    changes = {
        "data.cache-dir": str(tmp_path / "cache"),
        "run.out": str(tmp_path),
        "run.name": "run",
    }
    directory = run_inline(settings_of(file, **changes), 6)
    # Who reads a run has a cache of their own, whatever its settings name
    monkeypatch.setenv("FEDSILO_CACHE", str(tmp_path / "cache"))
    network = cast(Any, FinishedRun.open(directory.path).lab("bcn").open())
    state = network.vit.state_dict()
    assert state.keys() == arrays.keys()
    for name, array in arrays.items():
        assert torch.equal(state[name], torch.from_numpy(array)), name
    digests = {site["backbone"] for site in directory.read_json("silos.json").values()}
    (digest,) = digests
    assert len(digest) == 64


def test_an_absolute_path_names_the_file_itself_and_an_option_goes_before_it(
    pretrained: Callable[..., int], tmp_path: Path
) -> None:
    named, given = tmp_path / "deep" / "named", tmp_path / "given"
    setting = ("--set", f"vit.backbone-weights={named}")
    assert pretrained("skin", *setting) == 0
    assert [path.name for path in named.parent.iterdir()] == ["named"]
    before = named.read_bytes()
    assert pretrained("skin", *setting, "--save-as", str(given)) == 0
    assert given.read_bytes() == before == named.read_bytes()


def test_equal_recipes_give_equal_bytes_and_another_seed_gives_other_weights(
    pretrained: Callable[..., int], file: Path
) -> None:
    first, again, other = (file.parent / name for name in ("first", "again", "other"))
    assert pretrained("skin", "--save-as", str(first)) == 0
    torch.rand(3)  # whatever else the process drew in between
    assert pretrained("skin", "--save-as", str(again), "--set", "seed=5") == 0
    assert first.read_bytes() == again.read_bytes(), "the run's seed is not that of pre-training"
    file.write_text(EXPERIMENTS.replace("warmup-epochs: 1", "warmup-epochs: 1, seed: 1"))
    assert pretrained("skin", "--save-as", str(other)) == 0
    changed, arrays = load_state(other)[0], load_state(first)[0]
    assert (changed["pos_embed"] != arrays["pos_embed"]).any()


def test_no_public_image_is_in_any_silo_and_together_they_are_all_images(
    pretrained: Callable[..., int],
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = settings_of(file).common
    public = cast(Any, data_set("dermoscopy-phantom")).public(common, find_places("", ""))

    def pixels(images: Tensor) -> set[bytes]:
        assert images.dtype == torch.uint8
        return {image.numpy().tobytes() for image in images}

    seen = pixels(public.inputs)
    assert len(seen) == len(public) > 10
    total = len(public)
    for site in silo_names(common):
        for split in load_silo(site, common).splits().values():
            assert not seen & pixels(split.inputs)
            total += len(split)
    assert total == IMAGES
    assert pretrained("skin", "--save-as", str(tmp_path / "w")) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{len(public)} public images, classes [")
    counts = said.partition("[")[2].partition("]")[0].split(", ")
    assert len(counts) == 8, "by diagnosis, whatever the experiment's own target"
    assert sum(map(int, counts)) == len(public)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a step use an operation that has no deterministic form, as some do on a GPU alone."""
    chosen, plain = compute.choose_compute, augment

    def choose(*arguments: Any) -> compute.Compute:
        torch.use_deterministic_algorithms(True, warn_only=arguments[3] == "warn")
        return chosen(*arguments)

    def unlike(*arguments: Any) -> Tensor:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return plain(*arguments)

    monkeypatch.setattr(compute, "choose_compute", choose)
    monkeypatch.setattr(pretrain, "augment", unlike)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_operation_without_a_deterministic_form_is_refused_or_named_at_the_end(
    pretrained: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = ("--save-as", str(tmp_path / "w"))
    assert pretrained("skin", *weights, "--set", "machine.deterministic=true") == 1
    assert "'put_' has no deterministic form on this device, but 'mach" in capsys.readouterr().err
    assert not (tmp_path / "w").exists()
    with warnings.catch_warnings(record=True) as passed:
        assert pretrained("skin", *weights) == 0
    assert "no deterministic form on this device: put_" in capsys.readouterr().out
    assert not any("deterministic" in str(warning.message) for warning in passed)


def test_in_fp16_the_loss_is_scaled_and_the_gradients_are_not(
    pretrained: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = list[float]()

    def half(settings: CommonSettings) -> compute.Compute:
        return compute.Compute(torch.device("cpu"), bf16=False, fp16=True)

    def clipped(parameters: Iterable[Tensor], limit: float) -> None:
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        scales.append(norm.item())

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", clipped)
    assert pretrained("skin", "--save-as", str(tmp_path / "plain")) == 0
    monkeypatch.setattr(pretrain, "compute_of", half)
    scaled = torch.amp.GradScaler.scale
    monkeypatch.setattr(
        torch.amp.GradScaler,
        "scale",
        lambda self, loss: (scales.append(self.get_scale()), scaled(self, loss))[1],
    )
    first = scales[0]
    scales.clear()
    assert pretrained("skin", "--save-as", str(tmp_path / "half")) == 0
    assert scales[0] == 2.0**10
    assert scales[1] == pytest.approx(first, rel=0.05)


@pytest.mark.parametrize(
    ("experiment", "more", "said"),
    [
        ("digits", ["--save-as", "w"], "'digits' has network 'auto' on data set 'digits', but"),
        ("digits-vit", ["--save-as", "w"], "has network 'vit' on data set 'digits', but"),
        ("all-private", [], "'split.public-share' must be above 0"),
        (
            "skin",
            ["--set", "vit.backbone-weights=random"],
            "is 'random', which is not a file: set it",
        ),
        ("skin", ["--set", "vit.backbone-weights=timm"], "is 'timm', which is not a file"),
        (
            "skin",
            ["--set", "vit.backbone-weights="],
            "is '', which is not a file: set it, or give --s",
        ),
        ("nowhere", [], "nowhere"),
    ],
)
def test_what_cannot_be_pretrained_is_told_in_one_line_and_nothing_is_written(
    experiment: str,
    more: list[str],
    said: str,
    pretrained: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert pretrained(experiment, *more, "--set", f"data.cache-dir={tmp_path / 'cache'}") == 1
    error = capsys.readouterr().err
    assert error.startswith("fedsilo: error")
    assert said in error
    assert error.count("\n") == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [
        tmp_path / "simulation.yaml"
    ]


def test_weights_that_are_there_already_are_not_trained_over(
    pretrained: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "w"
    weights.write_text("hours of training")
    assert pretrained("skin", "--save-as", str(weights)) == 1
    assert f"{weights} already exists: remove it, or give --save-as" in capsys.readouterr().err
    assert weights.read_text() == "hours of training"


def test_a_run_whose_silos_hold_images_that_the_weights_have_seen_is_refused(
    pretrained: Callable[..., int], file: Path
) -> None:
    weights = file.parent / "w.safetensors"
    assert pretrained("skin", "--save-as", str(weights)) == 0
    changes = {"vit.backbone-weights": str(weights), "run.out": str(file.parent), "run.name": "run"}
    for share in (0.0, 0.29):
        with pytest.raises(
            FedsiloError, match=r"trained on a public part of 0\.3 of 'dermoscopy-ph"
        ):
            run_inline(settings_of(file, **changes | {"split.public-share": share}), 6)
    assert not (file.parent / "run").exists()


def test_the_recipe_of_simulation_yaml_is_valid() -> None:
    recipe = read_section(ROOT / "simulation.yaml", "pretraining", Pretraining)
    assert (recipe.epochs, recipe.warmup_epochs) == (120, 5)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("{epoch: 2}", "unknown setting 'pretraining: epoch'; did you mean 'pretraining: epochs'"),
        ("{epochs: 0}", "'epochs' must be at least 1, but is 0"),
        ("{smoothing: 1.0}", "'smoothing' must be at least 0 and below 1"),
        ("{target: colour}", "'target' must be one of nevus, diagnosis"),
        ("[2]", "'pretraining' must be a mapping"),
    ],
)
def test_a_wrong_recipe_is_told(
    section: str,
    said: str,
    pretrained: Callable[..., int],
    file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [line for line in EXPERIMENTS.splitlines() if not line.startswith("pretraining")]
    file.write_text("\n".join([f"pretraining: {section}", *lines]))
    assert pretrained("skin", "--save-as", str(file.parent / "w")) == 1
    assert said in capsys.readouterr().err
    assert not (file.parent / "w").exists()


def test_training_that_diverges_writes_no_file(
    pretrained: Callable[..., int], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(EXPERIMENTS.replace("warmup-epochs: 1", "learning-rate: 1.0e+30"))
    assert pretrained("skin", "--save-as", str(file.parent / "w")) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "fedsilo: error[setting]: pre-training diverged in epoch 1: lower 'learning-ra"
    )
    assert error.count("\n") == 1
    assert not (file.parent / "w").exists()


def test_the_last_step_may_not_diverge_unseen_either(
    pretrained: Callable[..., int], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_step = "epochs: 1, batch-size: 64, warmup-epochs: 0, learning-rate: 1.0e+38"
    file.write_text(EXPERIMENTS.replace("epochs: 2, batch-size: 8, warmup-epochs: 1", one_step))
    assert pretrained("skin", "--save-as", str(file.parent / "w")) == 1
    assert "pre-training diverged in epoch 1" in capsys.readouterr().err
    assert not (file.parent / "w").exists()


def test_a_rise_of_a_single_step_is_no_division_by_zero(
    pretrained: Callable[..., int], file: Path
) -> None:
    one_step = "epochs: 2, batch-size: 64, warmup-epochs: 1"
    file.write_text(EXPERIMENTS.replace("epochs: 2, batch-size: 8, warmup-epochs: 1", one_step))
    assert pretrained("skin", "--save-as", str(file.parent / "w")) == 0


def test_a_public_part_of_a_few_images_is_refused(
    pretrained: Callable[..., int], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(file.parent / "w")
    assert pretrained("skin", "--save-as", out, "--set", "split.public-share=0.05") == 1
    error = capsys.readouterr().err
    assert "images, but at least 20 are needed: raise 'split.public-share'" in error
    assert not (file.parent / "w").exists()


def test_the_file_does_not_tell_where_it_lay(pretrained: Callable[..., int], file: Path) -> None:
    paths = [file.parent / name for name in ("a.safetensors", "b.safetensors")]
    for path in paths:
        assert pretrained("skin", "--set", f"vit.backbone-weights={path}") == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_class_weighs_by_the_inverse_root_of_its_frequency() -> None:
    # 1 / 1 and 1 / 2, whose mean is 3/4
    found = class_weights(torch.tensor([0, 1, 1, 1, 1]), 2)
    assert found.tolist() == pytest.approx([4 / 3, 2 / 3])


def test_a_class_without_images_weighs_nothing_and_the_others_have_mean_one() -> None:
    found = class_weights(torch.tensor([3, 1, 1, 1, 1]), 4)
    assert found.tolist() == pytest.approx([0, 2 / 3, 0, 4 / 3])


def images_of(count: int, side: int = 16) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (count, 3, side, side), generator=draw, dtype=torch.uint8)


def draw(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_augmented_images_keep_shape_and_type_and_follow_the_generator() -> None:
    images = images_of(4)
    kept = images.clone()
    first, again, other = (augment(images, draw(seed)) for seed in (1, 1, 2))
    assert first.shape == images.shape
    assert first.dtype == torch.uint8
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(images, kept), "the stored images are left as they are"
    twice = draw()
    assert not torch.equal(augment(images, twice), augment(images, twice))


def test_an_image_of_one_grey_stays_so_within_a_fifth_of_its_light() -> None:
    grey = torch.full((30, 3, 16, 16), 100, dtype=torch.uint8)
    found = augment(grey, draw())
    flat = found.flatten(1)
    assert (flat.amin(dim=1) == flat.amax(dim=1)).all()
    lights = flat[:, 0].tolist()
    assert min(lights) >= 79
    assert max(lights) <= 120
    assert max(lights) - min(lights) > 20
    rest = float_inputs(found)
    assert rest.min() >= -1


def forced(monkeypatch: pytest.MonkeyPatch, *numbers: float) -> None:
    """Let every image draw these: turn, mirror, area, top, left, light, contrast."""
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.tensor(numbers))


@pytest.mark.parametrize(
    ("turn", "quarters"), [(0.0, 0), (0.25, 1), (0.5, 2), (0.75, 3), (0.999, 3)]
)
@pytest.mark.parametrize("mirror", [0.25, 0.5])
def test_without_crop_and_light_an_image_is_turned_and_mirrored_and_nothing_else(
    turn: float, quarters: int, mirror: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = images_of(2)
    forced(monkeypatch, turn, mirror, 1.0, 0.0, 0.0, 0.5, 0.5)
    found = augment(images, draw())
    expected = torch.rot90(images, quarters, (2, 3))
    assert torch.equal(found, expected.flip(3) if mirror < 0.5 else expected)


def test_a_crop_keeps_at_least_three_fifths_of_the_area_and_the_corner_that_was_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The root of 0.6 of 16 pixels is 12: of a step in the middle row, 4 dark and 8 light rows
    # are left at the bottom, of which the resizing makes a third
    images = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    images[:, :, 8:] = 200
    forced(monkeypatch, 0.0, 0.5, 0.0, 1.0, 0.0, 0.5, 0.5)
    (found,) = augment(images, draw())
    light = (found[0, :, 0] > 100).sum().item()
    assert light == pytest.approx(16 * 8 / 12, abs=1)
    assert (found[:, :, :1] == found).all(), "every column is the same"
