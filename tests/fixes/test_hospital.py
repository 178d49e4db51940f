"""What a hospital refuses or cannot do, and the fixes that it names to the server."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from fedsilo.client_app.training import compute, loop
from fedsilo.core.messages import TRAIN
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from tests.support.data_folders import write_tables
from tests.support.federation import SITES, Federation
from tests.support.fixes import Case, Values, check, refused, tiny
from tests.support.hospital import Hospital
from tests.support.identity import flower_names  # noqa: F401

FEW = ("cleveland", "va")
LEFT_OUT = "left out"  # the hospital, with which the run does without
PRIVATE: Values = {
    "privacy.sample-clip-norm": 1.0,
    "privacy.noise-multiplier": 4.0,
    "data.standardise": "declared",
}
SECURE: Values = {"clip-norm": 1.0, "secure-aggregation": "secagg"}
LEAVE_OUT: dict[str, Values] = {"leave the site out": {LEFT_OUT: True}}
# Parts of the errors that the functions below try
TRIED = (
    "but the run is made for 'privacy.trust' '{x}': set that to",
    "could be in one ('minimum-batch'): set",
    "the site file demands secure aggregation",
    "which the method sends: nothing left the site",
    "was kept under other settings",
    "rounds only go up; resume it from its newest checkpoint",
    "go on, or choose another",
    "nothing of it was kept",
    "the training data changed during the run",
    "has no deterministic form on this device",
)
CASES = [
    Case(
        "are needed ('privacy.sums-min-count'), by the run or, if that is more, by the hospital",
        {"standardise": "pooled"},
        {**LEAVE_OUT, "set 'data.standardise' to 'declared'": {"standardise": "declared"}},
    ),
    Case(
        "no epsilon can be computed, neither for arrays nor for measurements",
        {},
        {**LEAVE_OUT, "set 'privacy.sample-clip-norm' and 'privacy.noise-multiplier'": PRIVATE},
    ),
    Case(
        "optimiser step(s), but at least",
        {"train.local-steps": 0, "train.local-epochs": 1, "train.batch-size": 256},
        {
            **LEAVE_OUT,
            "raise 'train.local-epochs'": {"train.local-epochs": 3},
            "or 'train.local-steps'": {"train.local-steps": 3},
        },
    ),
]
# What the hospital that refuses says in its node config, or in its site file
NODES: list[dict[str, Value]] = [
    {"sums-min-count": 1000},
    {"max-epsilon": 50.0},
    {"minimum-steps-per-reply": 3},
]
ANYTHING: dict[str, Any] = {"methods": ["*"], "datasets": ["*"], "records": ["*"]}


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    others: dict[str, dict[str, Value]] = {site: {"minimum-steps-per-reply": 1} for site in SITES}
    return Federation(tmp_path, others)


@pytest.fixture
def hospital(tmp_path: Path) -> Callable[..., Hospital]:
    return lambda run, node=None, **more: Hospital(tmp_path / "own", run, node=node or {}, **more)


def with_site_file(federation: Federation, **rules: Any) -> None:
    path = federation.home / "site.yaml"
    path.write_text(yaml.safe_dump({**ANYTHING, **rules}))
    federation.nodes["cleveland"]["site-file"] = str(path)


@pytest.mark.parametrize(
    ("case", "node"),
    [pytest.param(*both, id=str(both[0])) for both in zip(CASES, NODES, strict=True)],
)
def test_run_that_hospital_refuses_with_fix_ends(
    case: Case, node: dict[str, Value], federation: Federation
) -> None:
    federation.nodes["cleveland"] |= node

    def attempt(values: dict[str, Value]) -> None:
        left_out = values.pop(LEFT_OUT, False)
        federation.run(values, FEW[1:] if left_out else FEW)

    check(case, attempt)


def test_hospital_with_trust_sums_and_run_for_sums_takes_part(
    federation: Federation,
) -> None:
    for site in SITES:
        federation.nodes[site]["trust"] = "sums"
    assert "'server': set that to 'sums'" in refused(lambda: federation.run({}))
    assert not refused(lambda: federation.run({**SECURE, "trust": "sums", "clip-norm": 5.0}))


def test_hospital_that_demands_secure_aggregation_takes_part_in_it(
    federation: Federation,
) -> None:
    with_site_file(federation, **{"secure-aggregation": "required"})

    def attempt(**more: Value) -> str:
        named = {key.replace("_", "-"): value for key, value in more.items()}
        return refused(lambda: federation.run(named))

    assert "set its 'secure.aggregation' to 'secagg'" in attempt()
    said = attempt(secure_aggregation="secagg")
    assert "demands" not in said
    assert "set 'secure.clip-norm'" in said, "a sum needs numbers of a known size"
    assert not attempt(secure_aggregation="secagg", clip_norm=1.0)


@pytest.mark.parametrize(
    ("rules", "fixed"),
    [
        (
            {"records": ["config/*", "metrics/*"]},
            {"records": ["config/*", "metrics/*", "arrays/*"]},
        ),
        ({"refused-records": ["arrays/*"]}, {"refused-records": []}),
    ],
    ids=["records", "refused-records"],
)
def test_refused_records_with_hospital_consent_leave(
    rules: dict[str, Any], fixed: dict[str, Any], federation: Federation
) -> None:
    with_site_file(federation, **rules)
    said = refused(lambda: federation.run({}, FEW))
    assert f"leave ('{next(iter(rules))}'), which the method sends" in said
    with_site_file(federation, **fixed)
    assert not refused(lambda: federation.run({}, FEW))


def test_small_private_batches_with_larger_size_or_cap_are_answered(
    hospital: Callable[..., Hospital],
) -> None:
    model = {"head.1.weight": np.zeros((2, 13)), "head.1.bias": np.zeros(2)}
    site = hospital({**PRIVATE, "train.batch-size": 16})
    assert site.send(TRAIN, model) is None
    assert (
        "could be in one ('minimum-batch'): set 'train.batch-size' to at least 32"
        in site.refusals[0]
    )
    assert "or 'max-epsilon' in the site file" in site.refusals[0]
    site.node["max-epsilon"] = 50.0
    assert site.send(TRAIN, model) is not None, site.refusals
    del site.node["max-epsilon"]
    site.run["train.batch-size"] = 32
    assert site.send(TRAIN, model, run_name="another") is not None, site.refusals


def test_site_under_cap_with_private_training_sends_arrays(
    hospital: Callable[..., Hospital],
) -> None:
    """By a cap of the run's; no server of this version asks so: the hospital looks for itself."""
    site = hospital({}, unchecked={"max-epsilon": 30.0})
    model = {"head.1.weight": np.zeros((2, 13)), "head.1.bias": np.zeros(2)}
    assert site.send(TRAIN, model) is None
    assert "set both, or remove 'privacy.max-epsilon'" in site.refusals[0]
    site.run |= PRIVATE
    assert site.send(TRAIN, model) is not None, site.refusals


def test_hospital_with_state_of_other_settings_answers_another_run_name(
    hospital: Callable[..., Hospital],
) -> None:
    site = hospital({"method": "local", "seed": 1})
    assert site.send(TRAIN, round=1) is not None
    site.run["seed"] = 2
    assert site.send(TRAIN, round=2) is None
    assert "choose another 'run.name'" in site.refusals[0]
    assert "was kept under other settings" in site.refusals[0]
    assert site.send(TRAIN, round=1, run_name="another") is not None
    assert site.send(TRAIN, round=2, run_name="another") is not None


def test_run_behind_site_state_continues_from_newest_checkpoint_or_new_name(
    federation: Federation,
) -> None:
    values: Values = {"rounds": 4, "run.name": "run"}

    def attempt(out: str, **more: Value) -> str:
        named = {key.replace("_", "-"): value for key, value in more.items()}
        return refused(lambda: federation.run({**values, **named}, FEW, out))

    assert not attempt("first")
    (federation.home / "first" / "run" / "summary.json").unlink()  # as if it had died before
    said = attempt("second")
    assert "rounds only go up; resume it from its newest checkpoint" in said
    assert "or choose another 'run.name'" in said
    assert not attempt("first", resume=True)
    assert not attempt("second", run_name="another")


def test_repeated_run_with_resume_or_new_name_is_answered(
    hospital: Callable[..., Hospital],
) -> None:
    site = hospital({"method": "local"})
    answered = [site.send(TRAIN, round=1) is not None for _ in range(4)]
    assert answered == [True, True, True, False]
    assert "('max-repeats'): go on, or choose another 'run.name'" in site.refusals[0]
    assert site.send(TRAIN, round=2) is not None
    assert site.send(TRAIN, round=1, run_name="another") is not None


def test_own_model_at_lower_rate_does_not_diverge(tmp_path: Path) -> None:
    values = tiny("local", rounds=1, optimiser="sgd", local_steps=2, out=str(tmp_path))

    def attempt(rate: float) -> str:
        named: Values = {"train.learning-rate": rate, "run.name": f"run{rate}"}
        return refused(lambda: run_inline(resolve({**values, **named}), 3))

    said = attempt(1e12)
    assert "lower 'train.learning-rate'; nothing of it was kept" in said
    assert not attempt(0.01)


def test_changed_training_data_restored_or_in_new_run_are_accepted(
    hospital: Callable[..., Hospital], tmp_path: Path
) -> None:
    write_tables(tmp_path)
    run = {"dataset": "table", "method": "local", "train.epoch-steps": 2, "train.pace": 1}
    low = {"data-dir": str(tmp_path), "minimum-batch": 1, "minimum-steps-per-reply": 1}
    site = hospital(run, low, site="north", unchecked={"standardise": "site"})
    assert site.send(TRAIN, round=1) is not None
    path = tmp_path / "north.csv"
    whole = path.read_text()
    path.write_text("\n".join(whole.splitlines()[:-6]) + "\n")
    assert site.send(TRAIN, round=2) is None
    assert "bring them back, or choose another 'run.name'" in site.refusals[0]
    assert site.send(TRAIN, round=1, run_name="another") is not None
    assert site.send(TRAIN, round=2, run_name="another") is not None
    path.write_text(whole)
    assert site.send(TRAIN, round=2) is not None


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let training use an operation that has no deterministic form, as some do on a GPU alone."""
    chosen, plain = compute.choose_compute, loop.add_gradients

    def choose(
        device: str, precision: str, threads: int, deterministic: str, memory_format: str
    ) -> compute.Compute:
        torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
        return chosen(device, precision, threads, deterministic, memory_format)

    def unlike(*args: Any, **more: Any) -> torch.Tensor:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return plain(*args, **more)

    monkeypatch.setattr(compute, "choose_compute", choose)
    monkeypatch.setattr(loop, "add_gradients", unlike)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_refused_nondeterministic_operation_with_fix_is_in_summary(
    federation: Federation,
) -> None:
    said = refused(lambda: federation.run({"deterministic": "true"}, FEW))
    assert "'put_' has no deterministic form on this device" in said
    assert "set it to 'warn', which names such operations" in said
    directory = federation.run({"deterministic": "warn"}, FEW)
    assert directory.read_json("summary.json")["unrepeatable-operations"] == ["put_"]
