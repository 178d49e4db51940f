"""``model-card.md``: what it is filled with, and what it leaves to a person."""

import html
import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from fedsilo.cli.main import main
from fedsilo.core.settings_schema import Value
from fedsilo.inference.export.card import card_text
from fedsilo.models.measures.intervals import wilson
from fedsilo.runs.finished_run import FinishedRun
from tests.fedsilo.inference.predict.test_data_sets import run_of


def card(run: Path, site: str | None = None) -> str:
    return card_text(FinishedRun.open(run), site)


def test_a_card_is_filled_from_the_run(finished: Path) -> None:
    run = finished / "table"
    text = card(run)
    summary = json.loads((run / "summary.json").read_text())
    parsed = ModelCard(text)
    results = parsed.data.eval_results
    assert results is not None
    told = {(one.dataset_config, one.metric_type): one.metric_value for one in results}
    assert told["va", "accuracy"] == summary["sites"]["va"]["accuracy"]
    assert {site for site, _ in told} == set(summary["sites"])
    assert parsed.data.pipeline_tag == "tabular-classification"
    assert parsed.data.license is None, "which is a person's to choose"
    assert "## Intended use\n\n**To be written by a person.**" in text
    assert "made up by fedsilo, without any patient" in text
    assert "ε: **none** (no differential-privacy guarantee)" in text
    silos = json.loads((run / "silos.json").read_text())
    tests, right = silos["va"]["sizes"]["test"], summary["sites"]["va"]["accuracy"]
    interval = wilson(round(right * tests), tests)
    assert f"| va | {tests} | {right:.3f} ({interval.low:.3f} to {interval.high:.3f}) |" in text
    assert "Fewer than 100 test rows: " in text
    assert "| `train.local-steps` | `2` |" in text
    assert str(finished) not in text


def test_what_sites_name_is_text_and_no_markup(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished / "table", run)
    names = ["<img src=x onerror=alert(1)>", "![a](https://e.org/a) **b** `c` a_b"]
    silos = json.loads((run / "silos.json").read_text())
    for silo in silos.values():
        silo |= {"classes": names, "distribution": "<b>|</b>"}
    (run / "silos.json").write_text(json.dumps(silos))
    text = card(run)
    assert r"Classes: \<img src=x onerror=alert(1)>, !\[a\](https\://e.org/a) " in text
    assert r"\*\*b\*\* \`c\` a\_b." in text
    assert r"| va | \<b>\|\</b> |" in text
    shown = MarkdownIt("commonmark").render(text.partition("Classes: ")[2].partition("\n")[0])
    assert shown == f"<p>{html.escape(', '.join(names), quote=False)}.</p>\n"


def test_sites_stand_by_size(finished: Path) -> None:
    text = card(finished / "table")
    places = [text.index(f"| {site} | {site} |") for site in ("cleveland", "hungary", "va")]
    assert places == sorted(places)


def test_the_card_of_a_sites_own_model_has_its_metrics_alone(finished: Path) -> None:
    results = ModelCard(card(finished / "local", "s2a")).data.eval_results
    assert results is not None
    assert {one.dataset_config for one in results} == {"s2a"}


def test_the_card_of_a_sites_own_model_says_how_often_that_one_is_right(hearts: Path) -> None:
    run = hearts / "local-seed0"
    text = card(run, "va")
    accuracy = json.loads((run / "summary.json").read_text())["sites"]["va"]["accuracy"]
    assert f"are right for {round(45 * accuracy)} of 45 test patients of 1 hospital" in text
    assert "Fewer than 100 test rows: va." in text


def test_the_card_of_a_private_run_gives_epsilon_with_its_delta(private: Path) -> None:
    assert re.search(r"ε: \*\*\d+\.\d\d\*\* at δ 1e-05 \(each patient", card(private))


def test_the_command_writes_a_card_and_leaves_one_that_is_there(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["card", str(finished / "vit"), "--out", str(tmp_path / "card.md")]
    assert main(words) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'card.md'}\n"
    assert (tmp_path / "card.md").read_text().startswith("---\nlibrary_name: fedsilo\n")
    assert main(words) == 1
    assert "already exists" in capsys.readouterr().err
    assert main(["card", str(finished / "vit"), "--site", "nobody"]) == 1
    assert "has no site 'nobody'" in capsys.readouterr().err
    assert not (finished / "vit" / "model-card.md").exists()


def test_a_card_has_the_numbers_that_pages_show_and_no_others(hearts: Path) -> None:
    """Switzerland has one healthy test patient, so that its AUC may not be shown."""
    run = FinishedRun.open(hearts / "fedavg-seed0")
    shown, text = run.shown().summary["sites"], card(run.path)
    (head,) = [line for line in text.splitlines() if line.startswith("| site | test rows |")]
    metrics = [cell.strip() for cell in head.strip("|").split("|")][2:]
    assert {"accuracy", "auc"} <= set(metrics)
    hidden = 0
    for site in run.silos:
        # Rows by class have a class's name in the place of the number of test rows
        form = rf"^\| {site} \| [<\d]\S* \|((?: [^|]+ \|){{{len(metrics)}}})$"
        (row,) = re.findall(form, text, re.M)
        for metric, cell in zip(metrics, row.strip("|").split("|"), strict=False):
            value = shown[site].get(metric)
            hidden += value is None
            wanted = "n/a" if value is None else f"{value:.3f}"
            assert cell.strip().partition(" ")[0] == wanted, (site, metric)
    assert hidden > 0
    results = ModelCard(text).data.eval_results or []
    for one in results:
        assert one.metric_value == shown[one.dataset_config][one.metric_type]


def test_card_has_the_sections_of_mitchell_et_al_and_the_runs_numbers(hearts: Path) -> None:
    run = hearts / "fedavg-seed0"
    text = card(run)
    sections = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert sections[:9] == [
        "Model details",
        "Intended use",
        "Factors",
        "Metrics",
        "Evaluation data",
        "Training data",
        "Quantitative analyses",
        "Ethical considerations",
        "Caveats and recommendations",
    ]
    metrics = json.loads((run / "summary.json").read_text())["sites"]
    assert f"{metrics['cleveland']['balanced-accuracy']:.3f}" in text
    assert f"{metrics['switzerland'].get('auc', -1):.3f}" not in text, "it rests on one patient"
    assert "| switzerland | switzerland | 30 | < 10 | 16 |" in text
    assert "| cleveland | disease | 48 |" in text


def test_card_at_trust_sums_says_that_no_count_is_known(tmp_path: Path) -> None:
    sums: dict[str, Value] = {"trust": "sums", "secure-aggregation": "secagg"}
    sums |= {"standardise": "declared", "clip-norm": 1.0}
    text = card(run_of("heart-synthetic", tmp_path, "", **sums).path)
    assert "| va | va | n/a | n/a | n/a | n/a |" in text
    assert "Fewer than 100 test rows" not in text, "how many there are is not known"
    assert "By site and class" not in text


def test_card_without_counts_and_names_says_that_classes_have_none(
    finished: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished / "fedavg", tmp_path / "run")
    silos = json.loads((run / "silos.json").read_text())
    for silo in silos.values():
        silo |= {"classes": [], "label_counts": {}, "sizes": {}, "fingerprints": {}}
    (run / "silos.json").write_text(json.dumps(silos))
    text = card(run)
    assert "predicts: which of: classes without names\n" in text
    assert "Classes: without names." in text
