"""Which images are tested, and weights that have been trained on them."""

from pathlib import Path

import pytest

from fedsilo.cli.main import main
from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.weights.provenance import provenance_of, refuse_other_provenance, run_beside
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from tests.support.errors import refuses

PHANTOM: dict[str, Value] = {
    "method": "fedavg",
    "dataset": "angiogram-phantom",
    "split.sample-share": 0.03,
    "data.image-size": 32,
    "rounds": 1,
    "train.local-epochs": 1,
    "train.batch-size": 8,
    "network.width": 4,
    "train.mc-passes": 0,
    "machine.device": "cpu",
}


def angio(**more: object) -> CommonSettings:
    return CommonSettings(dataset="angiogram-phantom", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "same", [{"val_folds": 5}, {"image_size": 32}, {"data_dir": "/x"}, {"partition": "unseen"}]
)
def test_what_leaves_the_test_images_as_they_are_is_free(same: dict[str, object]) -> None:
    refuse_other_provenance(angio(), angio(**same), "a run")


@pytest.mark.parametrize("other", [{"fold_seed": 1}, {"test_folds": 7}, {"sample_share": 0.5}])
def test_another_cut_of_the_same_data_is_refused(other: dict[str, object]) -> None:
    with pytest.raises(SettingError, match="images that it has trained on might be tested"):
        refuse_other_provenance(angio(), angio(**other), "a run")
    refuse_other_provenance(CommonSettings(dataset="digits"), angio(**other), "a run of other data")


def test_of_images_cut_by_number_the_number_of_silos_belongs_to_the_cut() -> None:
    digits = CommonSettings(dataset="digits", silos=9)
    assert {"split.silos", "split.partition", "split.unseen"} <= provenance_of(digits).keys()
    with refuses(SettingError, "silos", "9", "3"):
        refuse_other_provenance(digits, CommonSettings(dataset="digits", silos=3), "a run")


def test_a_file_of_no_run_says_nothing(tmp_path: Path) -> None:
    assert run_beside(tmp_path / "model.safetensors") is None
    (tmp_path / "config.toml").write_text("[broken")
    assert run_beside(tmp_path / "model.safetensors") is None
    (tmp_path / "config.toml").write_text(
        'dataset = "digits"\nfold-seed = 3\n[versions]\na = "b"\n'
    )
    found = run_beside(tmp_path / "model.safetensors")
    assert found
    assert (found.dataset, found.fold_seed) == ("digits", 3)


def _run(out: Path, name: str, **more: Value) -> Path:
    named = {key.replace("_", "-"): value for key, value in more.items()}
    values = {**PHANTOM, **named, "run.name": name, "run.out": str(out)}
    return run_inline(resolve(values), 4).path


def test_weights_of_another_cut_start_neither_a_run_nor_a_fine_tuning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _run(tmp_path, "first")
    weights = str(first / "model.safetensors")
    with refuses(SettingError, "split.fold-seed", "9"):
        _run(tmp_path, "second", fold_seed=9, initial_weights=weights)
    finetune = ["finetune", "--task", "classification", "--seeds", "1", "--epochs", "1"]
    same = [*finetune, "--weights", weights, "--device", "cpu"]
    assert main([*same, "--out", str(tmp_path / "a"), "--set", "split.fold-seed=9"]) == 1
    assert "'split.fold-seed' is 9, but first was trained with" in capsys.readouterr().err
    assert main([*same, "--out", str(tmp_path / "b"), "--set", "split.val-folds=2"]) == 0
    # What the run started from itself counts too, though its own data were others
    third = _run(tmp_path, "third", initial_weights=weights)
    config = third / "config.toml"
    config.write_text(config.read_text().replace('"angiogram-phantom"', '"isic2019"'))
    told = [
        "--dataset",
        "angiogram-phantom",
        "--set",
        "split.fold-seed=9",
        "--set",
        "split.sample-share=0.03",
    ]
    more = ["--set", "data.image-size=32", "--set", "split.val-folds=2"]
    assert main([*finetune, "--weights", str(third), "--out", str(tmp_path / "c"), *told, *more])
    assert "images that it has trained on might be tested" in capsys.readouterr().err


@pytest.mark.soak
def test_masks_are_found_by_a_run_whose_silos_were_cut_by_label(tmp_path: Path) -> None:
    sizes: dict[str, Value] = {
        "split.silo-train-size": 12,
        "split.silo-test-size": 12,
        "split.sample-share": 0.2,
    }
    unseen = _run(tmp_path, "unseen", partition="unseen", silos=4, **sizes)
    told = ["--seeds", "1", "--epochs", "1", "--device", "cpu", "--set", "split.val-folds=2"]
    command = ["finetune", "--task", "segmentation", "--weights", str(unseen), *told]
    assert main([*command, "--out", str(tmp_path / "masks")]) == 0
    assert (tmp_path / "masks" / "overlays.png").is_file()
    labels = ["finetune", "--task", "classification", "--weights", str(unseen), *told[:-2]]
    assert main([*labels, "--out", str(tmp_path / "labels")]) == 0
    settings = (tmp_path / "labels" / "finetune.json").read_text()
    assert '"split.silo-test-size": 12' in settings, "the run's own test images"


def test_two_runs_of_one_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twins = [str(_run(tmp_path / folder, "run")) for folder in ("a", "b")]
    named = [part for run in twins for part in ("--weights", run)]
    command = ["finetune", "--task", "segmentation", *named, "--out", str(tmp_path / "out")]
    assert main(command) == 1
    assert "two of --weights are named 'run'" in capsys.readouterr().err
