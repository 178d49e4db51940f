"""The way in from Python: what the command does, with the same results and the same errors."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedsilo import Run, compare, crossvalidate, load_run, predict, report, resume, simulate
from fedsilo.cli.main import main
from fedsilo.core.errors import DataError, RunDirectoryError, SettingError
from fedsilo.core.methods import METHODS
from fedsilo.core.settings_schema import Value
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.soak import in_soak

Tiny = Callable[..., dict[str, Value]]


def test_simulate_is_the_command_and_gives_its_run(tiny: Tiny, tmp_path: Path) -> None:
    settings = {key: value for key, value in tiny("fedavg").items() if key != "seed"}
    run = simulate("fedavg-digits", settings=settings, seed=3, name="a", out=tmp_path / "api")
    sets = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    named = ["--engine", "inline", "--seed", "3", "--name", "a", "--out", str(tmp_path / "cli")]
    assert main(["simulate", "fedavg-digits", *named, *sets]) == 0
    assert run.path == tmp_path / "api" / "a"
    for file in ("metrics.csv", "model.safetensors"):
        assert (run.path / file).read_bytes() == (tmp_path / "cli" / "a" / file).read_bytes()
    assert run.settings["seed"] == 3
    assert resume(run.path).summary == run.summary, "nothing is left to do"


def test_a_run_without_pictures_has_all_but_them(tiny: Tiny, tmp_path: Path) -> None:
    settings = {key: value for key, value in tiny("fedavg").items() if key != "method"}
    drawn, bare = (
        simulate("fedavg-digits", settings=settings, name=name, out=tmp_path, no_pictures=no)
        for name, no in (("drawn", False), ("bare", True))
    )
    files = [{path.name for path in run.path.iterdir()} for run in (drawn, bare)]
    assert {Path(name).suffix for name in files[0] - files[1]} == {".png", ".pdf"}
    assert files[1] < files[0]
    assert not bare.paper.numbers, "no paper is in this setting"


def test_a_run_is_read_as_frames(hearts: Path) -> None:
    run = load_run(str(hearts / "fedavg-seed0"))
    metrics, traffic = run.metrics, run.traffic
    assert list(metrics.columns) == ["round", "site", "split", "metric", "value"]
    final = metrics.query("round == 2 and split == 'test' and metric == 'accuracy'")
    assert final.set_index("site")["value"].to_dict() == {
        site: metrics["accuracy"] for site, metrics in run.summary["sites"].items()
    }
    assert traffic["bytes_up"].sum() == run.summary["bytes"]["up"]
    assert list(run.sites["site"]) == ["cleveland", "hungary", "switzerland", "va"]
    assert (run.sites[["train", "val", "test"]].sum(axis=1) > 0).all()


# Of every method predictions are held against metrics.csv in test_end_to_end
@pytest.mark.parametrize("method", in_soak(METHODS, but=("fedefm", "local", "picsr", "uefl")))
def test_predictions_are_those_that_the_runs_metrics_were_computed_from(
    method: str, tiny: Tiny, inline_run: Callable[..., RunDirectory]
) -> None:
    run = load_run(inline_run(tiny(method)).path)
    for site in run.sites["site"]:
        answers, metrics = run.predictions(site), run.summary["sites"][site]
        assert (answers["truth"] == answers["predicted"]).mean() == metrics["accuracy"]
        assert answers["entropy"].mean() == pytest.approx(metrics["entropy"], rel=1e-12)
        shares = answers.filter(like="p.").sum(axis=1)
        assert shares.to_numpy() == pytest.approx([1.0] * len(answers))


def test_a_model_is_a_module_that_takes_the_sites_samples(hearts: Path) -> None:
    model = load_run(hearts / "fedavg-seed0").model("va")
    inputs = model.inputs("train")
    with torch.no_grad():
        logits = model.network(inputs)
    assert isinstance(model.network, torch.nn.Module)
    assert not model.network.training
    assert logits.shape == (len(inputs), len(model.classes))


def test_what_is_not_there_is_told_in_a_line(hearts: Path, tmp_path: Path) -> None:
    run = load_run(hearts / "fedavg-seed0")
    with pytest.raises(RunDirectoryError, match="has not ended"):
        load_run(tmp_path)
    with pytest.raises(SettingError, match="has no site 'vaa'"):
        run.predictions("vaa")
    with pytest.raises(
        SettingError, match="'split' must be one of train, val, test, None, but is 'tests'"
    ):
        run.predictions("va", "tests")
    with pytest.raises(DataError, match="site va has no val rows"):
        run.predictions("va", "val")
    with pytest.raises(SettingError, match="unknown experiment 'nothing'"):
        simulate("nothing", out=tmp_path)
    with pytest.raises(SettingError, match="unknown experiment 'nothing'"):  # a name, no letters
        crossvalidate("nothing", out=tmp_path)
    with pytest.raises(
        SettingError, match="expected a path, but got a DataFrame: write it to a file"
    ):
        predict(run, table=run.metrics)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="no-such-key"):
        compare(["local-digits"], settings={"no-such-key": 1}, out=tmp_path)


def test_a_report_takes_runs_and_folders(hearts: Path, tmp_path: Path) -> None:
    run = load_run(hearts / "local-seed0")
    assert isinstance(run, Run)
    (out,) = report([run, str(hearts / "local-seed1")], tmp_path / "page.html")
    assert "local-seed1" in out.read_text()
    with pytest.raises(SettingError, match="exists"):
        report([run], out)


def test_compare_uses_the_runs_that_are_there(tiny: Tiny, tmp_path: Path) -> None:
    settings = {key: value for key, value in tiny("local").items() if key != "method"}
    named = settings | {"rounds": 1, "train.mc-passes": 0}
    del named["seed"]
    simulate("local-digits", settings=named, seed=0, name="local-digits-seed0", out=tmp_path)
    found = compare(["local-digits"], seeds=1, settings=named, out=tmp_path, metrics=["acc*"])
    ours = found.results.query("experiment == 'local-digits' and group == 'all'")
    recorded = load_run(tmp_path / "local-digits-seed0").shown().summary["mean"]["accuracy"]
    assert ours["value"].tolist() == [recorded]
    html = found._repr_html_()
    assert "<td>local-digits</td>" in html
    assert f"<td>{recorded:.3f}</td>" in html
