"""Methods whose sites keep their networks: all start from the weights that the user names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsilo.core.errors import SettingError
from fedsilo.core.messages import ARRAYS, START
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.errors import refuses
from tests.support.methods import InlineRun, Tiny


def _first(run: RunDirectory) -> dict[str, str]:
    """Return each site's validation loss before round 1, and its loss once it has trained."""
    return {
        f"{row['site']}/{row['metric']}": row["value"]
        for row in run.read_csv("metrics.csv")
        if (row["round"], row["split"], row["metric"])
        in (("0", "val", "loss"), ("1", "train", "trained-loss"))
    }


@pytest.fixture(scope="module")
def start(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the file of a model that a run has trained."""
    named = {"run.name": "before", "run.out": str(tmp_path_factory.mktemp("before"))}
    run = run_inline(resolve(tiny("fedavg", rounds=1) | named), 3)
    return str(run.path / "model.safetensors")


@pytest.fixture(scope="module")
def federated(tiny: Tiny, start: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the first losses of FedAvg from that model."""
    named = {"run.name": "federated", "run.out": str(tmp_path_factory.mktemp("federated"))}
    values = tiny("fedavg", rounds=1) | named | {"train.initial-weights": start}
    return _first(run_inline(resolve(values), 3))


@pytest.mark.parametrize("method", ["local", "cross", "ensemble", "fedproto", "feddistill"])
def test_sites_that_keep_their_networks_start_where_fedavg_does(
    method: str, start: str, federated: dict[str, str], tiny: Tiny, inline_run: InlineRun
) -> None:
    named = {"train.initial-weights": start, "rounds": 1}
    alone = inline_run(tiny(method) | named | {"run.name": "alone"})
    seeded = inline_run(tiny(method) | {"rounds": 1, "run.name": "seeded"})
    assert len(_first(alone)) == 6
    assert _first(alone) == federated
    assert not set(_first(alone).items()) & set(_first(seeded).items())


@pytest.mark.parametrize("experts", ["local", "finetuned"])
def test_experts_of_the_mixture_start_there_too(
    experts: str, start: str, federated: dict[str, str], tiny: Tiny, inline_run: InlineRun
) -> None:
    named = {"train.initial-weights": start}
    mixed = {"picsr.warmup-rounds": 1} if experts == "finetuned" else {}
    mixture = inline_run(tiny("picsr") | named | mixed | {"picsr.experts": experts, "rounds": 4})
    assert len(_first(mixture)) == 6
    assert _first(mixture) == federated


def test_prompts_and_heads_start_there_too(tiny: Tiny, inline_run: InlineRun) -> None:
    prompts = tiny("fedevprompt", rounds=1)
    shared = {k: v for k, v in prompts.items() if not k.startswith("fedevprompt.")}
    shared["method"] = "fedavg"
    before = inline_run(shared | {"run.name": "before"})
    named = {"train.initial-weights": str(before.path / "model.safetensors")}
    federated = inline_run(shared | named | {"run.name": "federated"})
    alone = inline_run(prompts | named | {"run.name": "alone"})
    losses = [
        {k: v for k, v in _first(run).items() if k.endswith("/loss")} for run in (federated, alone)
    ]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


def test_the_start_travels_once(start: str, spied_run: Callable[..., Any], tiny: Tiny) -> None:
    grid, _ = spied_run(tiny("local") | {"train.initial-weights": start})
    brought = [list(message.content.array_records.get(ARRAYS, {})) for message in grid.sent]
    with_start = [names for names in brought if names]
    assert len(with_start) == 3, "one for each site, in round 1"
    assert all(name.startswith(START) for names in with_start for name in names)
    assert not any(message.content.array_records for message in grid.replies)


def test_a_start_that_is_gone_is_told_before_anything_is_trained(
    tmp_path: Path, tiny: Tiny, inline_run: InlineRun
) -> None:
    start = str(tmp_path / "model.safetensors")
    with refuses(SettingError, "model.safetensors"):
        inline_run(tiny("local") | {"train.initial-weights": start, "run.name": "gone"})
