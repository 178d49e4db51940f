"""Every method on tables, from settings to run directory: the four made-up hospitals, odd sites."""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

import fedsilo.engines.inline_engine
from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.methods import METHODS
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import run_inline
from fedsilo.pictures.learning_curves import draw_run
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.strategies.methods.registry import strategy_class
from tests.support.dying_grid import DyingGrid
from tests.support.soak import in_soak

SITES = ["cleveland", "hungary", "switzerland", "va"]
HEART: dict[str, Value] = {
    "dataset": "heart-synthetic",
    "rounds": 2,
    "train.local-steps": 2,
    "network.dropout": 0.0,
    "train.mc-passes": 0,
    "train.batch-size": 16,
    "machine.device": "cpu",
    "seed": 7,
}
# UEFL reads its uncertainty off validation rows with dropout, and codes need hidden units
UEFL: dict[str, Value] = {
    "method": "uefl",
    "network.name": "mlp",
    "network.width": 8,
    "network.dropout": 0.1,
    "train.mc-passes": 3,
    "split.val-folds": 2,
    "uefl.codes": 4,
    "uefl.gamma": 0.0,
    "uefl.iteration-rounds": 1,
    "uefl.extension-rounds": 1,
    "uefl.centroid-min-count": 1,
    "uefl.stop-when-certain": False,
}
OWN: dict[str, dict[str, Value]] = {
    "fedavg-ft": {"fedavg-ft.finetune-rounds": 1},
    "fedbabu": {"fedavg-ft.finetune-rounds": 1, "network.name": "mlp", "network.width": 8},
    "fedpac": {"network": "mlp", "width": 8},
    "fedper": {"network": "mlp", "width": 8},
    "fedrep": {"network": "mlp", "width": 8},
    "fedswa": {"fedswa.averaged-rounds": 1},
    "picsr": {"picsr.expert-rounds": 1},
    "uefl": UEFL,
}
VARIANTS: dict[str, dict[str, Value]] = {
    method: {"method": method} | OWN.get(method, {})
    for method in sorted(METHODS)
    if strategy_class(method).capabilities.tables
} | {
    "picsr-finetuned": {
        "method": "picsr",
        "picsr.experts": "finetuned",
        "rounds": 3,
        "picsr.warmup-rounds": 1,
        "picsr.expert-rounds": 1,
    },
    "local-own-figures": {"method": "local", "standardise": "site"},
}
# A run of each of these is started again and must give the same
TWICE = ("fedavg", "fedefm", "picsr-finetuned", "local-own-figures", "uefl")
InlineRun = Callable[..., RunDirectory]
Finished = Callable[[str, int], RunDirectory]


def _bytes(directory: RunDirectory) -> dict[str, bytes]:
    """Return every file whose bytes the seed decides, by its path in the run directory."""
    wanted = [directory.path / "metrics.csv", directory.path / "model.safetensors"]
    wanted += sorted(directory.path.glob("sites/*/*"))
    return {str(p.relative_to(directory.path)): p.read_bytes() for p in wanted if p.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Return a variant's run at so many sites, run once for all tests that only read it."""

    @functools.cache
    def run(variant: str, nodes: int) -> RunDirectory:
        out = str(tmp_path_factory.mktemp(variant))
        values = HEART | VARIANTS[variant] | {"run.name": "run", "run.out": out}
        return run_inline(resolve(values), nodes)

    return run


def test_a_method_of_images_is_refused_on_a_table() -> None:
    of_images = [name for name in METHODS if not strategy_class(name).capabilities.tables]
    assert set(of_images) == {"distrans", "fedaligncl", "fedbn", "fedevprompt"}
    needed: dict[str, dict[str, Value]] = {"distrans": {}, "fedevprompt": {"network": "vit"}}
    for name, network in needed.items():
        said = f"method '{name}' is of images, and data set 'heart-synthetic' is a table"
        with pytest.raises(SettingError, match=said):
            resolve(HEART | {"method": name} | network)


@pytest.mark.parametrize("nodes", in_soak([4, 2], but=[4]))
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_on_tables_writes_statistics_that_can_be(
    variant: str, nodes: int, finished: Finished
) -> None:
    directory = finished(variant, nodes)
    summary = directory.read_json("summary.json")
    assert list(summary["sites"]) == SITES[:nodes]
    for site, values in summary["sites"].items():
        assert 0 <= values["accuracy"] <= 1
        assert 0 <= values["calibration-error"] <= 1
        assert 0 <= values["entropy"] <= math.log(2) + 1e-6
        assert values["loss"] > 0
        ranks = {"auc", "balanced-accuracy"} & values.keys()
        assert len(ranks) == (0 if site == "switzerland" else 2), "its test rows are of one class"
        assert all(0 <= values[metric] <= 1 for metric in ranks)
    accuracies = [values["accuracy"] for values in summary["sites"].values()]
    assert summary["mean"]["accuracy"] == pytest.approx(sum(accuracies) / nodes)
    of_both = [values for site, values in summary["sites"].items() if site != "switzerland"]
    for metric in ("auc", "balanced-accuracy"):
        mean = sum(values[metric] for values in of_both) / len(of_both)
        assert summary["mean"][metric] == pytest.approx(mean)
    assert summary["distributions"].keys() == summary["sites"].keys()
    folded = "split.val-folds" in VARIANTS[variant]
    assert list(summary["validation"]["distributions"]) == (SITES[:nodes] if folded else [])
    assert not FinishedRun(directory.path).paper.numbers, "the paper's patients are not these"
    names = {path.name for path in directory.path.iterdir()}
    assert {"config.toml", "silos.json", "metrics.csv", "traffic.csv", "privacy.json"} <= names
    assert ("model.safetensors" in names) == (summary["method"] != "local")
    assert ("routing.json" in names) == (summary["method"] == "picsr")
    sizes = {site: facts["sizes"] for site, facts in directory.read_json("silos.json").items()}
    train, val = (99, 100) if folded else (199, 0)
    assert sizes["cleveland"] == {"train": train, "val": val, "test": 104}


@pytest.mark.parametrize("nodes", in_soak([4, 2], but=[4]))
@pytest.mark.parametrize("variant", in_soak(VARIANTS, but=TWICE))
def test_the_same_seed_gives_the_same_bytes_on_tables(
    variant: str, nodes: int, inline_run: InlineRun, finished: Finished
) -> None:
    again = inline_run(HEART | VARIANTS[variant], nodes)
    assert _bytes(finished(variant, nodes)) == _bytes(again)


@pytest.mark.parametrize("variant", in_soak(VARIANTS, but=("fedavg", "picsr")))
def test_another_seed_gives_other_bytes_on_tables(
    variant: str, inline_run: InlineRun, finished: Finished
) -> None:
    other = _bytes(inline_run(HEART | VARIANTS[variant] | {"seed": 8}, 4))
    assert _bytes(finished(variant, 4))["metrics.csv"] != other["metrics.csv"]


# Four messages to get acquainted, then four a round: in a round, and where two meet
_DEATHS = [
    (variant, lives) for variant in ("picsr", "picsr-finetuned") for lives in (8, 9, 12, 13, 16, 20)
]


@pytest.mark.parametrize(
    ("variant", "lives"), in_soak(_DEATHS, but=[("picsr", 13), ("picsr-finetuned", 12)])
)
def test_picsr_that_dies_in_or_between_its_stages_resumes_to_the_same_bytes(
    variant: str,
    lives: int,
    inline_run: InlineRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds: dict[str, Value] = {"rounds": 4, "picsr.expert-rounds": 2}
    values = HEART | VARIANTS[variant] | rounds
    whole = _bytes(inline_run(values, 4, tmp_path / "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(fedsilo.engines.inline_engine, "InlineGrid", DyingGrid)
        DyingGrid.lives = lives
        with pytest.raises(KeyboardInterrupt):
            inline_run(values, 4)
    assert _bytes(inline_run({**values, "resume": True}, 4)) == whole


def test_picsr_tells_who_listens_to_whom_and_draws_it(finished: Finished) -> None:
    directory = finished("picsr", 4)
    assert list(draw_run(directory))
    routing = directory.read_json("routing.json")
    assert routing["experts"] == SITES
    assert list(routing["sites"]) == SITES
    for found in routing["sites"].values():
        assert sum(found[expert]["mean"] for expert in SITES) == pytest.approx(1, abs=1e-5)
        quantiles = [[found[e][q] for q in ("q05", "q25", "q50", "q75", "q95")] for e in SITES]
        assert all(one == sorted(one) for one in quantiles)
    for distances in routing["prototype distances"].values():
        assert all(distances[i][i] == 0 for i in range(4))
        assert distances[0][2] == pytest.approx(distances[2][0])
        assert distances[0][2] > 0
    for name in ("routing.png", "routing-matrix.png", "prototype-distances.png", "curves.png"):
        assert (directory.path / name).read_bytes().startswith(b"\x89PNG"), name


def test_what_leaves_the_sites_names_sums_and_prototypes(
    inline_run: InlineRun, tmp_path: Path
) -> None:
    def leaves(out: str, changes: Mapping[str, Value]) -> str:
        directory = inline_run(HEART | VARIANTS["picsr"] | changes, 2, tmp_path / out)
        return "\n".join(directory.read_json("privacy.json")["leaves each site"])

    pooled = leaves("pooled", {})
    assert "the sum of their squares over the site's training rows" in pooled
    assert "the site's prototype, the mean of its standardised training samples" in pooled
    assert "(without noise; never over fewer than 10 samples)" in pooled
    declared = leaves("declared", {"standardise": "declared"})
    assert "squares" not in declared


TablesWriter = Callable[..., dict[str, Value]]


@pytest.fixture
def tables(tmp_path: Path) -> TablesWriter:
    """Return a writer of a ``table`` data set: per site the labels of its rows."""

    def write(test_share: float = 0.25, **labels: Sequence[int]) -> dict[str, Value]:
        folder = tmp_path / "tables"
        folder.mkdir()
        for site, found in labels.items():
            rows = [f"{40 + index},{index % 2},{label}" for index, label in enumerate(found)]
            (folder / f"{site}.csv").write_text("\n".join(["age,sex,sick", *rows]) + "\n")
        files = "".join(f"  {site}: {site}.csv\n" for site in labels)
        (folder / "schema.yaml").write_text(
            "columns:\n  - {name: age, mean: 50, std: 10}\n  - {name: sex, mean: 0.5, std: 0.5}\n"
            "label: {column: sick, classes: {'no': [0], 'yes': [1]}}\n"
            f"test-share: {test_share}\nsites:\n{files}"
        )
        return HEART | {"dataset": "table", "data.dir": str(folder)}

    return write


@pytest.mark.parametrize("variant", ["fedavg", "local", "picsr"])
def test_a_site_of_one_class_is_told_and_takes_part(
    variant: str, tables: TablesWriter, inline_run: InlineRun, capsys: pytest.CaptureFixture[str]
) -> None:
    values = tables(mixed=[0, 1] * 12, sick=[1] * 16)
    directory = inline_run(values | VARIANTS[variant], 2)
    said = capsys.readouterr().out
    assert "site sick: all training samples are of one class" in said
    assert "site mixed: all training samples" not in said
    summary = directory.read_json("summary.json")
    for metric in ("auc", "balanced-accuracy"):
        assert metric in summary["sites"]["mixed"]
        assert metric not in summary["sites"]["sick"]
        assert summary["mean"][metric] == summary["sites"]["mixed"][metric]
    counts = directory.read_json("silos.json")["sick"]["label_counts"]
    assert counts == {"train": [0, 12], "val": [0, 0], "test": [0, 4]}


@pytest.mark.parametrize("variant", ["fedavg", "local", "picsr"])
def test_sites_without_test_rows_are_measured_on_validation_rows_only(
    variant: str, tables: TablesWriter, inline_run: InlineRun, capsys: pytest.CaptureFixture[str]
) -> None:
    values = tables(0.0, one=[0, 1] * 12, two=[1, 0, 0] * 10)
    directory = inline_run(values | VARIANTS[variant] | {"split.val-folds": 2}, 2, draw=True)
    summary = directory.read_json("summary.json")
    assert (summary["sites"], summary["mean"]) == ({}, {})
    assert list(summary["validation"]["distributions"]) == ["one", "two"]
    splits = {row["split"] for row in directory.read_csv("metrics.csv")}
    assert splits - {"update"} == {"train", "val"}
    assert (directory.path / "curves.png").is_file(), "of the validation figures"
    said = capsys.readouterr().out
    assert said.count("no site has test samples: there will be no test results") == 1
    assert "it has no test samples" not in said, "said once, not of every site"
    assert "on table, round" not in said, "there is no table without figures"


def test_sites_with_neither_test_nor_validation_rows_are_trained_and_never_measured(
    tables: TablesWriter, inline_run: InlineRun
) -> None:
    values = tables(0.0, one=[0, 1] * 12, two=[1, 0, 0] * 10)
    directory = inline_run(values | {"method": "fedavg"}, 2, draw=True)
    rows = directory.read_csv("metrics.csv")
    measured = {(row["split"], row["metric"]) for row in rows if row["split"] != "update"}
    assert measured == {("train", "trained-loss")}
    assert directory.read_json("summary.json")["mean"] == {}
    assert not (directory.path / "curves.png").exists(), "there is nothing to draw"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"method": "fedavg"},
            r"site few sends no sums: it has 9 training rows, but at least 10 are needed "
            r"\('privacy.sums-min-count'\)",
        ),
        (
            VARIANTS["picsr"] | {"standardise": "declared"},
            "site few sends no prototype: it has fewer than 10 training samples",
        ),
    ],
)
def test_a_site_of_too_few_rows_is_refused_by_name_or_the_run_goes_on_without_it(
    changes: dict[str, Value],
    told: str,
    tables: TablesWriter,
    inline_run: InlineRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = tables(few=[0, 1] * 6, many=[0, 1] * 12)  # a quarter of 12 rows tests, 9 train
    with pytest.raises(SiteError, match=rf"{told}.* 1 of 2 can, but 2 are needed"):
        inline_run(values | changes, 2)
    assert not (tmp_path / "run").exists()
    alone: dict[str, Value] = {"run.min-sites": 1}
    directory = inline_run(values | changes | alone, 2)
    said = capsys.readouterr().out
    assert re.search(
        f"continuing without a SuperNode, because it cannot take part: few: {told}", said
    )
    assert list(directory.read_json("silos.json")) == ["many"]
    summary = directory.read_json("summary.json")
    assert list(summary["sites"]) == ["many"]
    (left_out,) = summary["failures"]
    assert (left_out["phase"], left_out["round"]) == ("hello", 0)
    assert re.search(told, left_out["reason"])
    assert {row["site"] for row in directory.read_csv("traffic.csv")} == {"many"}


def test_uefl_without_validation_rows_says_what_to_set(
    inline_run: InlineRun, tmp_path: Path
) -> None:
    values = HEART | UEFL | {"split.val-folds": 0}
    with pytest.raises(SettingError, match=r"no validation samples.*set 'split.val-folds'"):
        inline_run(values, 2)
    assert not (tmp_path / "run").exists()
    never_judged: dict[str, Value] = {"uefl.max-iterations": 1}
    directory = inline_run(values | never_judged, 2)
    assert list(directory.read_json("summary.json")["sites"]) == SITES[:2]


def test_switzerlands_patients_are_routed_to_switzerlands_expert(
    inline_run: InlineRun, real_data: Path
) -> None:
    values: dict[str, Value] = HEART | {
        "dataset": "heart",
        "data.dir": str(real_data),
        "method": "picsr",
        "rounds": 12,
        "picsr.expert-rounds": 6,
        "train.local-steps": 10,
        "train.learning-rate": 0.01,
        "picsr.router-average": "equal",
        "server.evaluate-every": 0,
    }
    directory = inline_run(values, 4)
    weights = directory.read_json("routing.json")["sites"]["switzerland"]
    assert max(SITES, key=lambda expert: weights[expert]["mean"]) == "switzerland"
    published = FinishedRun(directory.path).paper.numbers
    assert published["switzerland"] == {"accuracy": 0.9, "accuracy-sd": 0.0306}
