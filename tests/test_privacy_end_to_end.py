"""Differential privacy per patient from settings to privacy.json, with every method that has it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsilo.client_app.app import app
from fedsilo.client_app.privacy.ledger import LEDGER
from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.methods import METHODS, why_not_private
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import InlineGrid, flower_identity
from fedsilo.models.privacy.accountant import epsilon
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.run.runner import run
from fedsilo.strategies.methods.registry import strategy_class
from tests.support.soak import in_soak

Z = 2.0
PRIVATE: dict[str, Value] = {
    "privacy.sample-clip-norm": 1.0,
    "privacy.noise-multiplier": Z,
    "privacy.trust": "nobody",
}
TAKING = sorted(name for name in METHODS if not why_not_private(name))
# Averages, experts and prototypes, codebooks, class means: the others are in `make test-soak`
EACH_WAY = ("fedavg", "fedproto", "picsr", "ring", "scaffold", "uefl")
# No centroids of features leave
OWN: dict[str, dict[str, Value]] = {
    "uefl": {"uefl.codeword-start": "gaussian", "uefl.refresh": "none"},
}
HEART: dict[str, Value] = {
    "dataset": "heart-synthetic",
    "data.standardise": "declared",
    "rounds": 2,
    "train.local-steps": 2,
    "train.batch-size": 16,
    "machine.device": "cpu",
    "seed": 7,
}
# UEFL reads its uncertainty off validation rows, and codes need hidden units
TABLES: dict[str, dict[str, Value]] = {
    "fedavg-ft": {"fedavg-ft.finetune-rounds": 1},
    "fedbabu": {"fedavg-ft.finetune-rounds": 1, "network.name": "mlp", "network.width": 8},
    "fedper": {"network": "mlp", "width": 8},
    "fedrep": {"network": "mlp", "width": 8},
    "fedswa": {"fedswa.averaged-rounds": 1},
    "picsr": {"picsr.expert-rounds": 1},
    "uefl": {
        **OWN["uefl"],
        "network.name": "mlp",
        "network.width": 8,
        "split.val-folds": 2,
        "uefl.codes": 4,
        "uefl.gamma": 0.0,
        "uefl.iteration-rounds": 1,
        "uefl.extension-rounds": 1,
        "uefl.centroid-min-count": 1,
        "uefl.stop-when-certain": False,
    },
}
Tiny = Callable[..., dict[str, Value]]
InlineRun = Callable[..., RunDirectory]


def spent(directory: RunDirectory) -> dict[str, float]:
    """Return each site's epsilon by privacy.json, which must be that of the site's ledger."""
    sites: dict[str, float] = directory.read_json("privacy.json")["guarantee"]["sites"]
    for site, found in sites.items():
        path = directory.path / "sites" / site / LEDGER
        entries = json.loads(path.read_text())["releases"] if path.is_file() else []
        releases = {(noise, rate): count for noise, rate, count in entries}
        assert found == pytest.approx(epsilon(releases, 1e-5))
    return sites


def steps(directory: RunDirectory, site: str) -> dict[tuple[float, float], int]:
    entries = json.loads((directory.path / "sites" / site / LEDGER).read_text())["releases"]
    return {(noise, rate): count for noise, rate, count in entries}


@pytest.mark.parametrize("method", in_soak(TAKING, but=EACH_WAY))
def test_every_method_that_can_is_private(method: str, tiny: Tiny, inline_run: InlineRun) -> None:
    values = tiny(method) | OWN.get(method, {}) | PRIVATE
    directory = inline_run(values)
    summary = directory.read_json("summary.json")
    assert (summary["stopped"], summary["failures"]) == (None, [])
    found = spent(directory)
    assert summary["privacy"]["epsilon"] == max(found.values())
    assert (min(found.values()) > 0) is (method != "local"), "what stays costs nothing"


@pytest.mark.parametrize("method", sorted(name for name in METHODS if why_not_private(name)))
def test_a_method_without_bounds_is_refused_with_the_reason(method: str, tiny: Tiny) -> None:
    with pytest.raises(SettingError) as caught:
        resolve(tiny(method) | PRIVATE)
    assert f"method '{method}' {why_not_private(method)}" in str(caught.value)


@pytest.mark.parametrize(
    "method",
    in_soak(
        [m for m in TAKING if strategy_class(m).capabilities.tables],
        but=("fedavg", "picsr", "uefl"),
    ),
)
def test_every_method_of_tables_that_can_is_private(method: str, inline_run: InlineRun) -> None:
    values = HEART | {"method": method} | TABLES.get(method, {}) | PRIVATE
    directory = inline_run(values, 4)
    assert directory.read_json("summary.json")["failures"] == []
    assert len(spent(directory)) == 4


def test_the_ledger_has_a_step_for_each_optimiser_step(inline_run: InlineRun) -> None:
    values = HEART | {"method": "fedavg", "train.batch-size": 10_000} | PRIVATE
    directory = inline_run(values, 4)
    assert steps(directory, "cleveland") == {(Z, 1.0): 4}, "two rounds of two"
    assert spent(directory)["cleveland"] == pytest.approx(epsilon({(Z, 1.0): 4}, 1e-5))


def test_centroids_of_features_are_refused_in_a_private_run(tiny: Tiny) -> None:
    with pytest.raises(SettingError, match=r"set 'uefl\.codeword-start' to 'gaussian'"):
        resolve(tiny("uefl") | PRIVATE)


def test_the_noise_is_in_the_model_and_follows_the_seed(
    tiny: Tiny, inline_run: InlineRun, tmp_path: Path
) -> None:
    def model(name: str, **changes: Value) -> dict[str, bytes]:
        path = inline_run(tiny("fedavg") | PRIVATE | changes, out=tmp_path / name).path
        return {f: (path / f).read_bytes() for f in ("model.safetensors", "metrics.csv")}

    first, again = model("first"), model("again")
    assert first == again
    assert model("other", seed=8) != first
    assert model("louder", **{"privacy.noise-multiplier": 2.1}) != first


def of_rounds(inline_run: InlineRun, tiny: Tiny, rounds: int, out: Path) -> float:
    """Return what the site that spends most has spent after so many rounds."""
    return max(spent(inline_run(tiny("fedavg", rounds=rounds) | PRIVATE, out=out)).values())


def test_a_run_ends_well_before_a_site_spends_more_than_max_epsilon(
    tiny: Tiny, inline_run: InlineRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cap = of_rounds(inline_run, tiny, 2, tmp_path / "measured") * 1.001
    values = tiny("fedavg", rounds=5) | PRIVATE | {"max-epsilon": cap}
    directory = inline_run(values, draw=True)
    summary = directory.read_json("summary.json")
    assert summary["rounds"] == 2
    assert summary["stopped"].startswith("the run ends after round 2 of 5: site s1a")
    assert "epsilon is spent: this run has spent" in summary["stopped"]
    assert summary["stopped"] in capsys.readouterr().out
    assert list(summary["sites"]) == ["s1a", "s2a", "s3a"], "it was evaluated"
    assert max(spent(directory).values()) <= cap
    (directory.path / "summary.json").unlink()
    after = inline_run(values | {"resume": True}).read_json("summary.json")
    assert (after["stopped"], after["rounds"]) == (summary["stopped"], 2), "it only finishes"


def test_real_hospitals_draw_secret_noise_and_end_the_run_by_their_own_cap(
    tiny: Tiny, inline_run: InlineRun, tmp_path: Path
) -> None:
    def deployed(name: str, **changes: Value) -> RunDirectory:
        nodes: list[dict[str, Value]] = [
            {
                "site": site,
                "state-dir": str(tmp_path / name / site),
                "trust": "nobody",
                "max-epsilon": 1000.0,
                "minimum-measured": 1,
            }
            for site in ("s1a", "s2a")
        ]
        values = tiny("fedavg", rounds=3) | PRIVATE | changes
        settings = resolve(values | {"run.name": name, "run.out": str(tmp_path / "runs")})
        with flower_identity():
            return run(InlineGrid(app, settings.as_mapping(), nodes), settings)

    first, second = deployed("first"), deployed("second")
    models = [(one.path / "model.safetensors").read_bytes() for one in (first, second)]
    assert models[0] != models[1], "the same seed gives other noise"
    privacy = first.read_json("privacy.json")
    assert "simulation" not in privacy["guarantee"]["of"]
    silos = json.loads((first.path / "silos.json").read_text())
    assert "fingerprints" not in json.dumps(silos) or not silos["s1a"].get("fingerprints")
    cap = privacy["epsilon"] * 1.5
    with pytest.raises(SiteError, match=r"epsilon is spent: this run has spent 0 "):
        deployed("third", **{"max-epsilon": cap / 100})


def test_a_first_round_that_is_too_much_trains_nothing(tiny: Tiny, inline_run: InlineRun) -> None:
    with pytest.raises(SiteError, match="epsilon is spent: this run has spent 0 at delta 1e-05"):
        inline_run(tiny("fedavg") | PRIVATE | {"max-epsilon": 0.01})


def test_a_prototype_is_paid_once_when_it_leaves(inline_run: InlineRun) -> None:
    stages: dict[str, Value] = {"picsr.expert-rounds": 3, "rounds": 4, "train.local-steps": 1}
    values = HEART | {"method": "picsr", "train.batch-size": 10_000} | stages | PRIVATE
    directory = inline_run(values | {"privacy.statistics-noise": 7.0}, 4)
    assert steps(directory, "va") == {(Z, 1.0): 4, (7.0, 1.0): 1}
