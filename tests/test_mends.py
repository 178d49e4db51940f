"""No dead ends: an error that names a setting to change is produced, and each mend that it names is
tried. Settings that an error told to use must lead past that error, whatever it is that comes next.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from datasets.registry import data_set, load_silo, silo_names
from models.contract.errors import FedsiloError
from models.contract.settings_schema import Value
from server_app.cli.main import main
from server_app.config.settings import resolve
from server_app.run.inline_engine import run_inline
from tests.support.data_folders import write_images, write_tables
from tests.support.tiny import TINY, TINY_METHOD, VIT

_ROOT = Path(__file__).resolve().parents[1]
_ROOMS = ("models", "datasets", "strategies", "client_app", "server_app")
_NAMES_A_SETTING = re.compile(
    r"\b(?:set|lower|raise|remove|leave|choose|take)\b[^:;]{0,40}?'\{?[a-z][a-z0-9.{}-]*\}?'"
)
GONE = None  # the setting is taken away

Values = Mapping[str, Value]
Changes = Mapping[str, Value | None]

HEART: Values = {"dataset": "heart-synthetic", "network": "logistic", "mc-passes": 0}
PHANTOM: Values = {"dataset": "angiogram-phantom", "image-size": 32, "sample-share": 0.02}


@dataclass(frozen=True)
class Case:
    """An error, and the mends in its words.

    Attributes:
        told: a part of the error, as it stands in the source, or of what it fills in.
        values: settings that lead to it.
        mends: a part of the error that names a mend -> what to change by it.
    """

    told: str
    values: Values
    mends: Mapping[str, Changes]

    def __str__(self) -> str:
        return re.sub(r"[^a-z0-9-]+", "-", self.told.lower())[:50]


def tiny(method: str, **more: Value) -> Values:
    named = {key.replace("__", ".").replace("_", "-"): value for key, value in more.items()}
    return TINY | {"method": method} | TINY_METHOD.get(method, {}) | named


PLANNED = [
    Case(
        "setting 'gradient-checkpointing' means nothing to network",
        tiny("fedavg", gradient_checkpointing=True),
        {
            "remove it": {"gradient-checkpointing": GONE},
            "set 'network' to 'resnet22'": {"network": "resnet22"},
        },
    ),
    Case(
        "setting 'leading-norm' means nothing to network",
        tiny("fedavg", leading_norm=False, network="resnet22"),
        {"remove it": {"leading-norm": GONE}, "set 'network' to 'conv'": {"network": "conv"}},
    ),
    Case(
        "setting 'prompt-length' means nothing to network",
        tiny("fedavg", prompt_length=3),
        {"remove it": {"prompt-length": GONE}, "set 'network' to 'vit'": {"network": "vit"}},
    ),
    Case(
        "setting 'evidence' means nothing to cross-entropy",
        tiny("fedavg", evidence="relu"),
        {"remove it": {"evidence": GONE}, "set 'loss' to 'evidential'": {"loss": "evidential"}},
    ),
    Case(
        "without clipping there is no epsilon; set",
        tiny("fedavg", max_epsilon=4.0),
        {
            "set 'clip-norm' and 'noise-multiplier'": {"clip-norm": 1.0, "noise-multiplier": 2.0},
            "remove it": {"max-epsilon": GONE},
        },
    ),
    Case(
        "without clipping there is no (epsilon, delta)",
        tiny("fedavg", delta=1e-3),
        {
            "set 'clip-norm' and 'noise-multiplier'": {"clip-norm": 1.0, "noise-multiplier": 2.0},
            "remove it": {"delta": GONE},
        },
    ),
    Case(
        "the sums that a site sends to be pooled leave without noise",
        HEART | {"method": "fedavg", "clip-norm": 1.0, "noise-multiplier": 1.0},
        {
            "set 'standardise' to 'declared'": {"standardise": "declared"},
            "or 'site'": {"standardise": "site"},
        },
    ),
    Case(
        "means nothing to data set 'digits'",
        tiny("fedavg", image_size=32),
        {"remove it": {"image-size": GONE}},
    ),
    Case(
        "means nothing without partition 'unseen'",
        PHANTOM | {"method": "fedavg", "unseen": 0.5},
        {
            "remove it": {"unseen": GONE},
            "set 'partition' to 'unseen'": {"partition": "unseen"},
        },
    ),
    Case(
        "is a table, and partition 'unseen' cuts images by label",
        HEART | {"method": "fedavg", "partition": "unseen"},
        {
            "choose another data set": {"dataset": "digits", "network": "auto"},
            "set 'partition' to 'own'": {"partition": "own"},
        },
    ),
    Case(
        "does not take 'epoch-steps', epochs that span rounds",
        tiny("uefl", local_epochs=2, batch_size=32, epoch_steps=4, pace=2),
        {"set it to 0": {"epoch-steps": 0, "pace": GONE}},
    ),
    Case(
        "mixes probabilities, which are no evidence",
        tiny("picsr", rounds=14, loss="evidential"),
        {"leave 'loss' at 'auto'": {"loss": "auto"}},
    ),
    Case(
        "is of images, and data set 'heart-synthetic' is a table",
        HEART | {"method": "distrans"},
        {"choose another": {"method": "fedavg"}},
    ),
    Case(
        "pools the data of all sites, whose parts clipping does not bound",
        tiny("mix", clip_norm=1.0, noise_multiplier=1.0),
        {
            "set 'clip-norm' and 'noise-multiplier' to 0": {"clip-norm": 0, "noise-multiplier": 0},
            "choose another method": {"method": "fedavg"},
        },
    ),
    Case(
        "counts its epochs in steps",
        TINY | {"method": "fedaligncl", "rounds": 40, "local-epochs": 2, "batch-size": 32},
        {"set 'epoch-steps' (120": {"epoch-steps": 120, "pace": 40}},
    ),
    Case(
        "alignment and curriculum would never begin",
        tiny("fedaligncl", fedaligncl__warmup_epochs=5),
        {
            "lower it": {"fedaligncl.warmup-epochs": 0},
            "raise 'rounds'": {"rounds": 20},
        },
    ),
    Case(
        "both add noise",
        tiny("fedaligncl", clip_norm=1.0, noise_multiplier=1.0),
        {
            "set 'fedaligncl.noise-variance' to 0": {"fedaligncl.noise-variance": 0.0},
            "'clip-norm' to 0": {"clip-norm": 0.0, "noise-multiplier": 0.0},
        },
    ),
    Case(
        "no round of FedAvg is left",
        tiny("fedavg-ft", fedavg_ft__finetune_rounds=2) | {"fedavg-ft.finetune-rounds": 2},
        {
            "raise 'rounds'": {"rounds": 4},
            "choose 'local'": {"method": "local", "fedavg-ft.finetune-rounds": GONE},
        },
    ),
    Case(
        "prompts a frozen ViT",
        tiny("fedevprompt", train_backbone=True),
        {"'train-backbone' to false": {"train-backbone": False}},
    ),
    Case(
        "which has no b-prompts",
        tiny("fedevprompt") | {"fedevprompt.shared-prompts": "b", "prompt-sets": "g"},
        {
            "set 'prompt-sets' to 'b-t'": {"prompt-sets": "b-t"},
            "'fedevprompt.shared-prompts' to 'all'": {"fedevprompt.shared-prompts": "all"},
        },
    ),
    Case(
        "all prototypes coincide and the router is blind",
        HEART | {"method": "picsr", "standardise": "site"},
        {
            "set it to 'pooled'": {"standardise": "pooled"},
            "or 'declared'": {"standardise": "declared"},
        },
    ),
    Case(
        "noise on the prototype hides nothing",
        HEART | {"method": "picsr", "picsr.prototype-noise": 0.1},
        {"set 'standardise' to 'declared'": {"standardise": "declared"}},
    ),
    Case(
        "a site that is too small for a prototype would send its sums",
        HEART | {"method": "picsr", "picsr.prototype-min-count": 20},
        {"raise 'sums-min-count'": {"sums-min-count": 20}},
    ),
    Case(
        "none is left for the router",
        tiny("picsr", rounds=2) | {"picsr.expert-rounds": 10},
        {
            "setting 'rounds' is 2": {"rounds": 40},
            "'picsr.expert-rounds'": {"picsr.expert-rounds": 1},
        },
    ),
    Case(
        "no codebook would ever be extended",
        tiny("uefl") | {"uefl.iteration-rounds": 5},
        {
            "raise 'rounds'": {"rounds": 12},
            "lower 'uefl.iteration-rounds'": {"uefl.iteration-rounds": 1},
            "set 'uefl.max-iterations' to 1": {"uefl.max-iterations": 1},
        },
    ),
    Case(
        "are one setting under its old and its new key",
        {"method": "uefl", "gamma": 0.2, "uefl.gamma": 0.3},
        {"remove 'gamma'": {"gamma": GONE}},
    ),
    Case(
        "is not one of method 'fedavg'",
        {"method": "fedavg", "uefl.gamma": 0.2},
        {"remove it": {"uefl.gamma": GONE}},
    ),
]

LOADED = [
    Case(
        "no image is in it: raise 'public-share'",
        PHANTOM | {"public-share": 1e-6, "sample-share": 0.05},
        {"raise 'public-share'": {"public-share": 0.3}},
    ),
    Case(
        "images cannot be used",
        {"dataset": "images"},
        {"set 'broken-images' to 'skip'": {"broken-images": "skip"}},
    ),
    Case(
        "gives val images itself: set 'val-folds' to 0",
        {"dataset": "endovascular", "val-folds": 2},
        {"set 'val-folds' to 0": {"val-folds": 0}},
    ),
    Case(
        "gives test images itself: set 'test-folds' to 0",
        {"dataset": "endovascular", "test-folds": 2},
        {"set 'test-folds' to 0": {"test-folds": 0}},
    ),
    Case(
        "train images has no validation part",
        {"dataset": "digits", "silos": 3, "silo-train-size": 5, "silo-test-size": 5},
        {"raise 'silo-train-size' to at least 10": {"silo-train-size": 10}},
    ),
    Case(
        "and 'digits' has",
        {"dataset": "digits", "silos": 9, "silo-train-size": 1000, "silo-test-size": 10},
        {
            "'silo-train-size' 159 for 9 silos": {"silo-train-size": 159},
            "'silos' 1 of that size": {"silos": 1},
        },
    ),
]

RUN = [
    Case(
        "does not take data set 'heart-synthetic', which is a table",
        HEART | {"method": "fedavg", "network": "conv"},
        {"'network' to logistic": {"network": "logistic"}, "or mlp": {"network": "mlp"}},
    ),
    Case(
        "which is images",
        tiny("fedavg", network="mlp"),
        {"'network' to conv": {"network": "conv"}, "resnet22": {"network": "resnet22"}},
    ),
    Case(
        "has no validation samples, on which UEFL judges uncertainty",
        HEART | {"method": "uefl", "mc-passes": 2, "rounds": 2} | TINY_METHOD["uefl"],
        {
            "set 'val-folds'": {"val-folds": 4},
            "set 'uefl.max-iterations' to 1": {"uefl.max-iterations": 1},
        },
    ),
    Case(
        "codewords by: lower 'uefl.codes'",
        tiny("uefl") | {"uefl.codes": 5000},
        {
            "lower 'uefl.codes'": {"uefl.codes": 8},
            "set 'uefl.refresh' to 'none'": {"uefl.refresh": "none"},
        },
    ),
    Case(
        "training diverged, its loss is",
        tiny("fedavg", learning_rate=1e30, optimiser="sgd"),
        {"lower 'learning-rate'": {"learning-rate": 0.001}},
    ),
    Case(
        "epsilon of one round is",
        tiny("fedavg", clip_norm=1.0, noise_multiplier=0.5, max_epsilon=3.0),
        {
            "raise 'noise-multiplier'": {"noise-multiplier": 4.0},
            "or 'max-epsilon'": {"max-epsilon": 500.0},
        },
    ),
    Case(
        "network 'vit' needs weights for its backbone",
        tiny("fedavg", network="vit"),
        {"to 'random'": VIT},
    ),
    Case(
        "t-prompts would have none",
        tiny("fedevprompt", basic_layers=2),
        {"lower it": {"basic-layers": 1}, "set 'prompt-sets' to 'g'": {"prompt-sets": "g"}},
    ),
]
CASES = [*PLANNED, *LOADED, *RUN]


def changed(values: Values, changes: Changes) -> dict[str, Value]:
    """Return settings with some changed, and those that are ``GONE`` away."""
    merged = {**values, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def refused(attempt: Any) -> str:
    """Return the error of an attempt, empty where there is none."""
    try:
        attempt()
    except FedsiloError as error:
        return str(error)
    return ""


def _check(case: Case, attempt: Any) -> None:
    """Make the error, then apply each mend that it names; the same error must not come again."""
    error = refused(lambda: attempt(changed(case.values, {})))
    assert case.told in error
    for words, changes in case.mends.items():
        assert words in error
        again = refused(lambda own=changes: attempt(changed(case.values, own)))
        assert case.told not in again, f"'{words}' leads to the same error"
        if not _leads_on(case, words):
            assert not again, f"'{words}' leads to: {again}"


def _leads_on(case: Case, words: str) -> bool:
    """Tell whether a mend asks for more: a ViT needs weights, which the next error says."""
    return "'vit'" in words


@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_settings_that_are_refused_pass_once_mended(case: Case) -> None:
    _check(case, resolve)


@pytest.mark.parametrize("case", LOADED, ids=str)
def test_data_that_are_refused_load_once_mended(case: Case, tmp_path: Path) -> None:
    write_images(tmp_path, "images.yaml")
    (tmp_path / "north" / "3.png").write_bytes(b"no image")
    write_images(tmp_path / "split", "endovascular.yaml")
    parts = ["train"] * 10 + ["val"] * 3 + ["test"] * 3
    for site in ("north", "south"):
        lines = [f"{n}.png,{'ab'[n % 2]},{part}" for n, part in enumerate(parts)]
        path = tmp_path / "split" / site / "list.csv"
        path.write_text("\n".join(["path,label,split", *lines]) + "\n")

    def attempt(values: Values) -> None:
        folder = tmp_path / "split" if values["dataset"] == "endovascular" else tmp_path
        settings = resolve({"method": "fedavg", "data-dir": str(folder), **values}).common
        if settings.public_share:
            from datasets.images.dataset import ImageDataSet
            from datasets.io.locations import find_places

            data = data_set(settings.dataset)
            assert isinstance(data, ImageDataSet)
            data.public(settings, find_places(settings.data_dir, settings.cache_dir))
        load_silo(silo_names(settings)[0], settings)

    _check(case, attempt)


@pytest.mark.parametrize("case", RUN, ids=str)
def test_a_run_that_is_refused_ends_once_mended(case: Case, tmp_path: Path) -> None:
    names = iter(range(100))

    def attempt(values: Values) -> None:
        named = {"out": str(tmp_path), "run-name": f"run{next(names)}"}
        settings = resolve(changed(values, named))
        run_inline(settings, len(silo_names(settings.common)), draw=False)

    _check(case, attempt)


def test_a_table_with_too_few_rows_is_read_once_missing_values_are_imputed(tmp_path: Path) -> None:
    write_tables(tmp_path)
    schema = tmp_path / "schema.yaml"
    schema.write_text(schema.read_text().replace("policy: impute", "policy: drop"))
    path = tmp_path / "north.csv"
    lines = path.read_text().splitlines()
    lines[4:] = [re.sub(r",\d+\.\d,", ",NA,", line) for line in lines[4:]]
    path.write_text("\n".join(lines) + "\n")
    settings = resolve({"method": "fedavg", "dataset": "table", "data-dir": str(tmp_path)}).common
    assert "set the schema's 'policy' to 'impute'" in refused(lambda: load_silo("north", settings))
    schema.write_text(schema.read_text().replace("policy: drop", "policy: impute"))
    assert not refused(lambda: load_silo("north", settings))


def test_a_table_without_declared_figures_runs_by_those_that_are_pooled(tmp_path: Path) -> None:
    write_tables(tmp_path)
    values: Values = {"method": "fedavg", "dataset": "table", "network": "logistic", "rounds": 1}
    values = {**values, "mc-passes": 0, "data-dir": str(tmp_path), "out": str(tmp_path / "runs")}

    def attempt(**more: Value) -> None:
        named = {"run-name": f"run{next(names)}"}
        run_inline(resolve({**values, **named, **more}), 2, draw=False)

    names = iter(range(10))
    told = refused(lambda: attempt(standardise="declared"))
    assert "gives no mean and std for every numeric column: add them, or set it to 'po" in told
    assert not refused(lambda: attempt(standardise="pooled"))
    schema = tmp_path / "schema.yaml"
    schema.write_text(schema.read_text().replace("{name: age}", "{name: age, mean: 50, std: 9}"))
    assert not refused(lambda: attempt(standardise="declared"))


@pytest.mark.parametrize(
    ("nodes", "wrong", "told", "mend"),
    [
        (2, {"min-sites": 3}, "start more, or lower 'min-sites'", {"min-sites": 2}),
        (4, {"silos": 3}, "start fewer SuperNodes, or raise 'silos'", {"silos": 4}),
    ],
)
def test_too_few_or_too_many_nodes_run_once_the_setting_is_mended(
    nodes: int, wrong: Values, told: str, mend: Values, tmp_path: Path
) -> None:
    values = {**tiny("fedavg", rounds=1, join_timeout=0.1), "out": str(tmp_path)}

    def attempt(more: Values) -> None:
        run_inline(resolve({**values, **more}), nodes, draw=False)

    assert told in refused(lambda: attempt(wrong))
    assert not refused(lambda: attempt({**wrong, **mend}))


def test_a_run_directory_that_is_there_can_be_gone_on_with_or_left_alone(tmp_path: Path) -> None:
    values = {**tiny("fedavg", rounds=1), "out": str(tmp_path), "run-name": "run"}

    def attempt(**more: Value) -> str:
        named = {key.replace("_", "-"): value for key, value in more.items()}
        return refused(lambda: run_inline(resolve({**values, **named}), 3, draw=False))

    assert not attempt()
    assert "choose another 'run-name', set 'resume' to true to go on with it" in attempt()
    assert not attempt(resume=True)
    assert not attempt(run_name="other")
    said = attempt(resume=True, learning_rate=0.5)
    assert "holds a run of another config" in said
    assert not attempt(run_name="another", learning_rate=0.5)


@pytest.mark.parametrize("lacking", ["val", "test", "none"])
def test_a_manifest_that_gives_a_split_can_be_fine_tuned_whatever_part_it_lacks(
    lacking: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path, "images.yaml")
    parts = ["train"] * 10 + ["val"] * 3 + ["test"] * 3
    for site in ("north", "south"):
        given = ["train" if part == lacking else part for part in parts]
        lines = [f"{n}.png,{'ab'[n % 2]},{part},p{n}" for n, part in enumerate(given)]
        table = "\n".join(["path,label,split,patient", *lines]) + "\n"
        (tmp_path / site / "list.csv").write_text(table)
    words = ["finetune", "--task", "classification", "--weights", "scratch", "--dataset", "images"]
    words += ["--data-dir", str(tmp_path), "--seeds", "1", "--epochs", "1", "--device", "cpu"]
    words += ["--set", "width=4"]

    def said(*more: str) -> str:
        out = tmp_path / f"out{'-'.join(more).replace('=', '')}"
        main([*words, "--out", str(out), *more])
        return capsys.readouterr().err

    if lacking == "test":
        assert "no test images: set 'test-folds'" in said()
        assert not said("--set", "test-folds=3")
    else:
        assert not said()


def sentences() -> set[str]:
    """Return every text of the source that tells to change a setting, its gaps as ``{}``."""
    found = set()
    for room in _ROOMS:
        for path in sorted((_ROOT / room).rglob("*.py")):
            tree = ast.parse(path.read_text())
            parts = {
                id(part)
                for node in ast.walk(tree)
                if isinstance(node, ast.JoinedStr)
                for part in ast.walk(node)
                if part is not node
            }
            texts = [_text(node) for node in ast.walk(tree) if id(node) not in parts]
            found |= {text for text in texts if "\n" not in text and _NAMES_A_SETTING.search(text)}
    return found


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "{x}" for v in node.values)
    return ""


# Parts of the errors that the tests above try beside those of ``CASES``
ALSO = (
    "training rows are left",
    "gives no mean and std for every numeric column",
    "start more, or lower",
    "start fewer SuperNodes",
    "exists: choose another",
    "holds a run of another config",
    "no test images: set",
    "no validation images, by which the epoch is chosen",
    # tests/test_secure_end_to_end.py
    "a sum has room for numbers of a known size",
    "it must be from",
    "of a sum only the mean is known",
    "there is no noise to spread",
    "to bits moves a site's update by",
    "needs at least three sites",
    "needs more of the sites' arrays than a sum",
)


def test_a_third_of_all_mends_at_least_is_tried() -> None:
    """How many of how many: a new error that names a setting lowers the share."""
    told = [re.sub(r"'[a-z0-9-]+'|\d+", "", case.told) for case in CASES]
    told += [re.sub(r"'[a-z0-9-]+'|\d+", "", part) for part in ALSO]
    patterns = [re.escape(part).replace(r"\ \ ", ".*") for part in told]
    tried = {
        s for s in sentences() if any(re.search(p, re.sub(r"'[^']*'|\d+", "", s)) for p in patterns)
    }
    print(f"{len(tried)} of {len(sentences())} texts that name a setting to change are tried")
    assert len(tried) / len(sentences()) > 1 / 3
