"""Differential privacy from settings to privacy.json, with every method of the registry."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsilo.client_app.app import app
from fedsilo.client_app.privacy.protection import LEDGER
from fedsilo.models.contract.errors import SettingError, SiteError
from fedsilo.models.contract.methods import METHODS
from fedsilo.models.contract.settings_schema import Value
from fedsilo.models.privacy.accountant import epsilon, epsilon_of_a_change
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.run.inline_engine import InlineGrid, flower_identity
from fedsilo.server_app.run.runner import run
from fedsilo.strategies.methods.registry import strategy_class
from tests.support.soak import in_soak

Z = 0.5
PRIVATE: dict[str, Value] = {"clip-norm": 1.0, "noise-multiplier": Z}
# Only what its own settings add on top of clipping and noise is in the way
OWN: dict[str, dict[str, Value]] = {"fedaligncl": {"fedaligncl.noise-variance": 0.0}}
TAKES = {name: strategy_class(name).capabilities for name in METHODS}
TAKING = sorted(name for name, takes in TAKES.items() if not takes.no_privacy)
# Averages, exchanges with neighbours, experts, codebooks: the others are in `make test-soak`
EACH_WAY = ("cross", "fedaligncl", "fedavg", "fedavg-ft", "fedefm", "picsr", "ring", "uefl")
HEART: dict[str, Value] = {
    "dataset": "heart-synthetic",
    "rounds": 2,
    "local-steps": 2,
    "batch-size": 16,
    "device": "cpu",
    "seed": 7,
}
# UEFL reads its uncertainty off validation rows, and codes need hidden units
TABLES: dict[str, dict[str, Value]] = {
    "fedavg-ft": {"fedavg-ft.finetune-rounds": 1},
    "fedbabu": {"fedavg-ft.finetune-rounds": 1, "network": "mlp", "width": 8},
    "fedper": {"network": "mlp", "width": 8},
    "fedrep": {"network": "mlp", "width": 8},
    "fedswa": {"fedswa.averaged-rounds": 1},
    "picsr": {"picsr.expert-rounds": 1, "standardise": "declared"},
    "uefl": {
        "network": "mlp",
        "width": 8,
        "val-folds": 2,
        "uefl.codes": 4,
        "uefl.gamma": 0.0,
        "uefl.iteration-rounds": 1,
        "uefl.extension-rounds": 1,
        "uefl.centroid-min-count": 1,
        "uefl.stop-when-certain": False,
    },
}
ONCE = {"ensemble", "cross", "fedavg-ft", "fedbabu"}  # of two rounds one brings arrays
Tiny = Callable[..., dict[str, Value]]
InlineRun = Callable[..., RunDirectory]


def between(releases: int) -> float:
    """Return a 'max-epsilon' that allows so many messages and no more."""
    return (epsilon(Z, releases, 1e-5) + epsilon(Z, releases + 1, 1e-5)) / 2


def told(directory: RunDirectory) -> dict[str, int]:
    """Return each site's messages by privacy.json, which must be those of the sites' ledgers."""
    sites = directory.read_json("privacy.json")["guarantee"]["sites"]
    for site, spent in sites.items():
        path = directory.path / "sites" / site / LEDGER
        ledger = json.loads(path.read_text())["releases"] if path.is_file() else 0
        assert ledger == spent["releases"]
    return {site: spent["releases"] for site, spent in sites.items()}


@pytest.mark.parametrize("method", in_soak(TAKING, but=EACH_WAY))
def test_every_method_runs_with_clipping_and_noise(
    method: str, tiny: Tiny, inline_run: InlineRun
) -> None:
    directory = inline_run(tiny(method) | OWN.get(method, {}) | PRIVATE)
    summary = directory.read_json("summary.json")
    assert (summary["rounds"], summary["stopped"], summary["failures"]) == (2, None, [])
    found = summary["privacy"]["guarantee"]
    releases = found["releases"]
    spent = told(directory)
    assert max(spent.values()) == releases
    if method == "uefl":
        assert releases == 3, "two rounds, and the centroids of uncertain sites"
    elif method == "fedefm":
        assert set(spent.values()) == {3}, "two rounds, and the visitors of the second"
    else:
        assert set(spent.values()) == {0 if method == "local" else 1 if method in ONCE else 2}
    assert found["epsilon"] == summary["privacy"]["epsilon"] == epsilon(Z, releases, 1e-5)
    assert found["epsilon-of-a-change"] == epsilon_of_a_change(Z, releases, 1e-5)


@pytest.mark.parametrize("standardise", in_soak(["declared", "site"], but=["declared"]))
@pytest.mark.parametrize(
    "method", in_soak([m for m in TAKING if TAKES[m].tables], but=("fedavg", "picsr", "uefl"))
)
def test_every_method_of_tables_runs_with_clipping_and_noise(
    method: str, standardise: str, inline_run: InlineRun
) -> None:
    if standardise == "site" and method == "picsr":
        pytest.skip("picsr refuses figures of one site: its router would be blind")
    values = HEART | {"method": method, "standardise": standardise} | TABLES.get(method, {})
    summary = inline_run(values | PRIVATE, 4).read_json("summary.json")
    assert summary["failures"] == []
    assert len(summary["privacy"]["guarantee"]["sites"]) == 4


def test_the_noise_is_in_the_model_and_follows_the_seed(
    tiny: Tiny, inline_run: InlineRun, tmp_path: Path
) -> None:
    def model(name: str, **changes: Value) -> dict[str, bytes]:
        path = inline_run(tiny("fedavg") | PRIVATE | changes, out=tmp_path / name).path
        return {f: (path / f).read_bytes() for f in ("model.safetensors", "metrics.csv")}

    first, again = model("first"), model("again")
    assert first == again
    assert model("other", seed=8) != first
    assert model("louder", **{"noise-multiplier": 0.6}) != first


def test_a_run_ends_before_a_site_spends_more_than_max_epsilon(
    tiny: Tiny, inline_run: InlineRun, capsys: pytest.CaptureFixture[str]
) -> None:
    values = tiny("fedavg", rounds=5) | PRIVATE | {"max-epsilon": between(2)}
    directory = inline_run(values, draw=True)
    summary = directory.read_json("summary.json")
    assert summary["rounds"] == 2
    assert summary["stopped"].startswith("the run ends after round 2 of 5: site s1a has spent")
    assert summary["stopped"] in capsys.readouterr().out
    assert told(directory) == {"s1a": 2, "s2a": 2, "s3a": 2}
    assert list(summary["sites"]) == ["s1a", "s2a", "s3a"], "it was evaluated"
    rounds = {row["round"] for row in directory.read_csv("metrics.csv")}
    assert rounds == {"0", "1", "2"}
    assert summary["privacy"]["guarantee"]["epsilon"] <= between(2)


def test_a_resumed_run_that_has_spent_everything_only_finishes(
    tiny: Tiny, inline_run: InlineRun
) -> None:
    values = tiny("fedavg", rounds=5) | PRIVATE | {"max-epsilon": between(2)}
    directory = inline_run(values)
    before, model = directory.read_json("summary.json"), directory.path / "model.safetensors"
    kept = model.read_bytes()
    (directory.path / "summary.json").unlink()
    model.unlink()
    after = inline_run(values | {"resume": True}).read_json("summary.json")
    assert after["stopped"] == before["stopped"]
    assert after["rounds"] == 2
    assert model.read_bytes() == kept
    assert told(directory) == {"s1a": 2, "s2a": 2, "s3a": 2}


def test_a_resumed_run_takes_a_sites_word_that_it_has_spent_more_than_the_server_knows(
    tiny: Tiny, inline_run: InlineRun
) -> None:
    values = tiny("fedavg", rounds=5) | PRIVATE | {"max-epsilon": between(3)}
    directory = inline_run(values)
    (directory.path / "summary.json").unlink()
    for newest in sorted((directory.path / "checkpoints").glob("*"))[-1:]:
        newest.unlink()  # the server died before it wrote round 3, whose messages had left
    summary = inline_run(values | {"resume": True}).read_json("summary.json")
    assert summary["rounds"] == 2
    said = "the run ends after round 2 of 5: site s1a, site s2a, site s3a, round 3, phase train: "
    assert summary["stopped"].startswith(f"{said}epsilon is spent: 3 noisy messages")
    assert told(directory) == {"s1a": 3, "s2a": 3, "s3a": 3}


def test_real_hospitals_draw_secret_noise_and_end_the_run_by_their_own_cap(
    tiny: Tiny, tmp_path: Path
) -> None:
    def deployed(name: str) -> RunDirectory:
        nodes: list[dict[str, Value]] = [
            {"site": site, "state-dir": str(tmp_path / name / site), "trust": "server"}
            for site in ("s1a", "s2a")
        ]
        nodes[1]["max-epsilon"] = between(2)
        settings = resolve(
            tiny("fedavg", rounds=4) | PRIVATE | {"run-name": name, "out": str(tmp_path / "runs")}
        )
        with flower_identity():
            return run(InlineGrid(app, settings.as_mapping(), nodes), settings)

    first, second = deployed("first"), deployed("second")
    models = [(one.path / "model.safetensors").read_bytes() for one in (first, second)]
    assert models[0] != models[1], "the same seed gives other noise"
    summary = first.read_json("summary.json")
    said = "the run ends after round 2 of 4: site s2a, round 3, phase train: epsilon is spent: "
    assert summary["stopped"].startswith(said)
    (left_out,) = summary["failures"]
    assert left_out["site"] == "s2a"
    assert left_out["reason"].startswith("epsilon is spent: 2 noisy messages")
    sites = summary["privacy"]["guarantee"]["sites"]
    assert {site: spent["releases"] for site, spent in sites.items()} == {"s1a": 3, "s2a": 2}
    assert "simulation" not in summary["privacy"]["guarantee"]["of"]
    ledger = tmp_path / "first" / "s1a" / "first" / "s1a" / LEDGER
    assert json.loads(ledger.read_text())["releases"] == 3, "what the lost round cost is counted"


def test_a_run_whose_first_round_is_too_much_trains_nothing(
    tiny: Tiny, inline_run: InlineRun, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=r"epsilon of one round is .* raise 'noise-multiplier'"):
        inline_run(tiny("fedavg") | PRIVATE | {"max-epsilon": 1.0})
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_method_stopped_before_it_has_what_its_documents_tell_finishes(
    tiny: Tiny, inline_run: InlineRun
) -> None:
    stages = {"picsr.experts": "finetuned", "picsr.warmup-rounds": 2, "rounds": 4}
    values = tiny("picsr") | stages | PRIVATE | {"max-epsilon": between(1)}
    directory = inline_run(values, draw=True)
    assert directory.read_json("summary.json")["rounds"] == 1
    assert (directory.path / "curves.png").is_file()


def test_a_ledger_of_other_noise_stops_the_run(tiny: Tiny, inline_run: InlineRun) -> None:
    directory = inline_run(tiny("fedavg") | PRIVATE)
    (directory.path / "summary.json").unlink()
    for newest in (directory.path / "checkpoints").glob("*2.safetensors"):
        newest.unlink()
    path = directory.path / "sites" / "s2a" / LEDGER
    path.write_text(path.read_text().replace("0.5", "9.0"))
    with pytest.raises(SiteError, match=r"site s2a, round 2, .* counts messages of"):
        inline_run(tiny("fedavg") | PRIVATE | {"resume": True})
