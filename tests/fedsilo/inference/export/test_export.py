"""``fedsilo export``: programs that answer as fedsilo does, where there is no fedsilo."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedsilo import export, predict
from fedsilo.cli.main import main
from fedsilo.core.errors import ExportError
from fedsilo.core.settings_schema import Value
from fedsilo.inference.export.export import FORMATS, VECTORS, open_program, write_pt2
from fedsilo.runs.finished_run import FinishedRun
from tests.fedsilo.inference.predict.test_data_sets import SHIFTED, run_of
from tests.support.soak import in_soak
from tests.support.tiny import TINY_METHOD, VIT

Written = Callable[[str], Path]

PHANTOM: dict[str, Value] = {"split.sample-share": 0.002, "data.image-size": 32}
# What is exported: data set, and the settings that make its network
NETWORKS: dict[str, tuple[str, dict[str, Value]]] = {
    "conv": ("digits", SHIFTED),
    "vgg16-bn": ("dermoscopy-phantom", PHANTOM | {"network": "vgg16-bn"}),
    "vit": (
        "dermoscopy-phantom",
        PHANTOM
        | VIT
        | {"method": "fedevprompt", "split.sample-share": 0.005, "privacy.sums-min-count": 1},
    ),
    "resnet22": ("mammography-phantom", {"split.sample-share": 0.01, "network.name": "resnet22"}),
    "mlp": ("heart-synthetic", {"network": "mlp"}),
    "picsr": ("heart-synthetic", {"method": "picsr", "picsr.expert-rounds": 1, "rounds": 2}),
    "picsr-images": ("digits", SHIFTED | {"method": "picsr", "rounds": 2} | TINY_METHOD["picsr"]),
    "uefl": ("digits", SHIFTED | {"method": "uefl", "rounds": 2} | TINY_METHOD["uefl"]),
    "distrans": ("digits", SHIFTED | {"method": "distrans"}),
    "number": ("heart-synthetic-pulse", {}),
    "risk": ("survival-synthetic", {}),
    "findings": ("chest-phantom", {}),
    "masks": ("vessels-synthetic", {}),
}
# Images and a table, the one with experts that are mixed; the others are in `make test-soak`
SOME = ("mlp", "picsr-images")
OTHERS = ("vgg16-bn", "vit", "resnet22", "uefl", "conv", "picsr")
ELSEWHERE = """\
import json, sys
for room in ("fedsilo", "flwr", "timm"):
    sys.modules[room] = None  # importing it fails
import torch
from safetensors.torch import load_file
most = {}
for folder in sys.argv[1:]:
    vectors = load_file(f"{folder}/test-vectors.safetensors")
    program = torch.export.load(f"{folder}/model.pt2").module()
    for size in (8, 1, 5):
        (name,) = vectors.keys() - {"inputs"}
        answers = program(vectors["inputs"][:size])
        apart = (answers - vectors[name][:size]).abs().max().item()
        most[folder] = max(apart, most.get(folder, 0.0))
print(json.dumps(most))
"""


class _Runs(dict[str, Path]):
    """Runs of networks, each made when it is asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> Path:
        dataset, values = NETWORKS[name]
        named = {**values, "run.name": name, "network.dropout": 0.2}
        self[name] = run_of(dataset, self._folder, "", **named).path
        return self[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return the run directory of each network."""
    return _Runs(tmp_path_factory.mktemp("networks"))


@pytest.fixture(scope="module")
def written(runs: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return where a network's exported program lies."""
    folder = tmp_path_factory.mktemp("written")

    @functools.cache
    def export_of(name: str) -> Path:
        site = next(iter(json.loads((runs[name] / "silos.json").read_text())))
        export(runs[name], "pt2", site=site, out=folder / name)
        return folder / name

    return export_of


@pytest.mark.parametrize("names", in_soak([list(SOME), list(NETWORKS)], but=[list(SOME)]))
def test_each_program_answers_as_fedsilo_where_there_is_none(
    names: Sequence[str], written: Written, tmp_path: Path
) -> None:
    folders = [str(written(name)) for name in names]
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", ELSEWHERE, *folders],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    most = json.loads(done.stdout)
    assert most.keys() == set(folders)
    assert max(most.values()) <= 1e-4
    told = [json.loads((Path(folder) / "program.json").read_text()) for folder in folders]
    assert all(one["test vectors"]["largest difference"] <= 1e-4 for one in told)


@pytest.mark.parametrize("name", in_soak(NETWORKS, but=SOME))
def test_the_vectors_answers_are_predictions_without_dropout(
    name: str, runs: Mapping[str, Path], written: Written
) -> None:
    """The program on the site's own test rows, as they are read: what predict says of them."""
    run, about = runs[name], json.loads((written(name) / "program.json").read_text())
    site = next(iter(json.loads((run / "silos.json").read_text())))
    model = FinishedRun.open(run).model(site)
    assert about["weights"] == model.weights_digest()
    vectors = load_file(written(name) / "test-vectors.safetensors")
    assert vectors["inputs"].shape == (VECTORS, *model.silo.shape.input_shape)
    module = model.module()
    with torch.no_grad():
        own = vectors[about["outputs"]["name"]]
        assert torch.allclose(module(vectors["inputs"]), own, rtol=1e-6, atol=1e-6)
    assert about["inputs"]["shape"][1:] == list(model.silo.shape.input_shape)
    assert about["outputs"]["classes"] == list(model.classes)


def test_a_program_takes_rows_as_they_are_read(runs: Mapping[str, Path], written: Written) -> None:
    """Unstandardised features in, and out comes what predict says; dropout of no pass."""
    from fedsilo.datasets.registry import load_silo

    model = FinishedRun.open(runs["mlp"]).model("va")
    raw = load_silo("va", model.common).test.inputs
    program = torch.export.load(written("mlp") / "model.pt2").module()
    with torch.no_grad():
        answers = program(raw)
        own = torch.softmax(model.network.eval()(model.silo.test.inputs), dim=1)
    assert torch.allclose(answers, own, atol=1e-6)
    assert len(answers) == len(predict(runs["mlp"], site="va", split="test").own)


@pytest.mark.parametrize("name", in_soak([*OTHERS, *SOME], but=["picsr-images"]))
def test_an_onnx_program_answers_the_same(
    name: str, runs: Mapping[str, Path], tmp_path: Path
) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason="the extra 'onnx' is not installed")
    runtime: ModuleType = pytest.importorskip("onnxruntime", reason="nor is 'onnxruntime'")
    site = next(iter(json.loads((runs[name] / "silos.json").read_text())))
    found = export(runs[name], "onnx", site=site, out=tmp_path / "out")
    assert found.difference <= 1e-4
    session = runtime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    vectors = load_file(tmp_path / "out" / "test-vectors.safetensors")
    for size in (8, 1, 5):
        (answers,) = session.run(None, {"inputs": vectors["inputs"][:size].numpy()})
        (output,) = vectors.keys() - {"inputs"}
        assert np.allclose(answers, vectors[output][:size], atol=1e-4)


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_what_cannot_be_exported_is_told_in_a_line_and_leaves_nothing(
    runs: Mapping[str, Path],
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = ["--out", str(tmp_path / "out")]
    words = ["export", str(finished / "local"), *out]
    assert "name one by --site" in refusal(words, capsys)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        words = ["export", str(runs["mlp"]), *out, "--format", "onnx"]
        assert "pip install 'fedsilo[onnx]'" in refusal(words, capsys)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    assert "already exists" in refusal(["export", str(runs["mlp"]), *out], capsys)


def test_a_program_that_answers_otherwise_is_refused(
    runs: Mapping[str, Path], tmp_path: Path
) -> None:
    program = open_program(FinishedRun.open(runs["mlp"]).model("va"))
    with torch.no_grad():
        program.module.mean += 0.3
    with pytest.raises(ExportError, match=r"differ by .* from fedsilo's, but only 0\.0001"):
        write_pt2(program, tmp_path / "model.pt2")


def test_the_command_says_what_it_takes_and_answers(
    runs: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["export", str(runs["mlp"]), "--out", out]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("takes float32 (batch, 13): a table's features in this order")
    assert lines[1].startswith("answers (batch, 2)")
    assert lines[-1] == out
    names = {path.name for path in Path(out).iterdir()}
    assert names == {"model.pt2", "program.json", "test-vectors.safetensors", "model-card.md"}
    assert FORMATS == ("pt2", "onnx")
