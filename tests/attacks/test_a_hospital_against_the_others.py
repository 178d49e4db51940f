"""One hospital lies to the others, each time in another way; the app of all is the unaltered one.

The liar is the third of three, or the second of four with tables. Each time the run goes on without
it ('run.min-sites' allows that), it is named, and what the honest ones get is finite.
"""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsilo.core.errors import RunDirectoryError, SiteError
from fedsilo.core.files.state_files import load_state
from fedsilo.core.messages import ARRAYS, CONFIG, DP_EPSILON, METRICS, NUM_EXAMPLES
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import InlineGrid, flower_identity, partition_configs
from fedsilo.server_app.config.operator_files import REGISTRY
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.run.runner import run
from fedsilo.strategies.meeting.participants import meet_sites
from tests.support.errors import refuses

APP = importlib.import_module(
    "fedsilo.client_app.app"
)  # the package has its app by the module's name
LIAR = "s3a"
HEART: dict[str, Value] = {
    "dataset": "heart-synthetic",
    "method": "fedavg",
    "rounds": 1,
    "train.local-steps": 2,
    "train.batch-size": 16,
    "machine.device": "cpu",
    "run.min-sites": 1,
}
Alter = Callable[[RecordDict], None]
Tiny = Callable[..., dict[str, Value]]
InlineRun = Callable[..., RunDirectory]
Lying = Callable[..., None]


def in_hello(**changes: Any) -> Alter:
    """Return what says something else at the hello; a function is given what is true."""

    def alter(content: RecordDict) -> None:
        said = content.config_records.get(CONFIG)
        if said is not None:
            for name, change in changes.items():
                key = name.replace("_", "-")
                said[key] = change(said[key]) if callable(change) else change

    return alter


def in_metrics(**changes: float) -> Alter:
    def alter(content: RecordDict) -> None:
        for key, value in changes.items():
            if METRICS in content.metric_records and key in content.metric_records[METRICS]:
                content.metric_records[METRICS][key] = value

    return alter


def in_arrays(ending: str, value: float) -> Alter:
    def alter(content: RecordDict) -> None:
        record = content.array_records.get(ARRAYS, {})
        for name in [name for name in record if name.endswith(ending)]:
            record[name] = Array(np.full_like(record[name].numpy(), value))

    return alter


def went_on_without(directory: RunDirectory, liar: str, said: str) -> None:
    """Check that the run has a finite result without the liar, and says which lie it was."""
    summary = directory.read_json("summary.json")
    reasons = [f"{failure['site']}: {failure['reason']}" for failure in summary["failures"]]
    assert any(said in reason and liar in reason for reason in reasons), reasons
    assert all(len(reason) < 400 and reason.isprintable() for reason in reasons)
    honest = {site: row for site, row in summary["sites"].items() if site != liar}
    assert len(honest) >= 1
    assert all(np.isfinite(value) for row in honest.values() for value in row.values())
    assert 0 <= summary["mean"]["accuracy"] <= 1
    arrays, _ = load_state(directory.path / "model.safetensors")
    assert arrays
    assert all(np.isfinite(a).all() and np.abs(a).max() < 1e6 for a in arrays.values())


def thousandfold(content: RecordDict) -> None:
    """Claim a thousand times the samples, at the hello and in every reply."""
    in_hello(label_counts=lambda true: json.dumps(_times(json.loads(true), 1000)))(content)
    if METRICS in content.metric_records:
        metrics = content.metric_records[METRICS]
        metrics[NUM_EXAMPLES] = int(str(metrics[NUM_EXAMPLES])) * 1000


def _times(counts: dict[str, list[int]], factor: int) -> dict[str, list[int]]:
    return {split: [count * factor for count in each] for split, each in counts.items()}


def test_a_claim_above_the_agreed_count_is_refused_with_both_numbers(
    tiny: Tiny, inline_run: InlineRun, lying: Lying, tmp_path: Path
) -> None:
    agreed = tmp_path / "agreed.json"
    agreed.write_text(json.dumps({"s1a": 36, "s2a": 36, LIAR: 40}))
    lying(thousandfold)
    values = tiny("fedavg", rounds=1, min_sites=2) | {"run.site-weights": str(agreed)}
    directory = inline_run(values)
    went_on_without(directory, LIAR, "says that it has 36000 training samples, but")
    assert list(directory.read_json("silos.json")) == ["s1a", "s2a"]
    assert directory.read_json("silos.json")["s1a"]["agreed"] == 36


def test_without_agreed_counts_who_weighs_nearly_everything_is_named(
    tiny: Tiny, inline_run: InlineRun, lying: Lying, capsys: pytest.CaptureFixture[str]
) -> None:
    lying(thousandfold)
    inline_run(tiny("fedavg", rounds=1, min_sites=2))
    told = " ".join(capsys.readouterr().out.split())
    assert "site s3a states that it has 36000 of all 36072 training samples" in told
    assert "('run.site-weights')" in told


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        # Sums of values a million times as large: metrics that leave the others' rows at zero
        (
            {
                "sums_total": lambda true: [x * 1e6 for x in true],
                "sums_squares": lambda true: [x * 1e12 for x in true],
            },
            "more than 1000 times that of the median site",
        ),
        ({"sums_squares": lambda true: [x / 1e6 for x in true]}, "too small for 'sums-total'"),
        ({"sums_count": lambda true: [x * 1000 for x in true]}, "of at most its"),
    ],
)
def test_lies_in_pooled_sums_leave_their_site_out(
    changes: dict[str, Any], said: str, inline_run: InlineRun, lying: Lying
) -> None:
    lying(in_hello(**changes), 1)
    directory = inline_run(HEART, 4)
    assert len(_sites(directory)) == 3
    went_on_without(directory, "hungary", said)
    assert "hungary" not in _sites(directory)


def _sites(directory: RunDirectory) -> set[str]:
    return set(directory.read_json("silos.json"))


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (in_arrays("running_var", -1.0), "has a number below 0, but a variance cannot be negative"),
        (in_arrays("weight", 1e30), "has a number beyond 1e+06"),
        (in_arrays("running_mean", -1e30), "has a number beyond 1e+12"),
        (in_arrays("bias", float("nan")), "contains non-finite values"),
        (in_metrics(**{"incoming.test.accuracy": 1e308}), "is 1e+308, not 0 to 1"),
        (in_metrics(**{"incoming.val.entropy": 99.0}), "is 99, not 0 to 2.302"),
        (in_metrics(**{"trained.train.loss": 1e300}), "is 1e+300, not -1e+30 to 1e+30"),
        (in_metrics(seconds=-1.0), "metric 'seconds' is -1, not 0 to"),
        (in_metrics(**{"peak-memory-bytes": 2**60}), "metric 'peak-memory-bytes' is"),
        (in_metrics(**{"kept-state": 7}), "metric 'kept-state' is 7, not a whole number"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_their_sites_name(
    alter: Alter, said: str, tiny: Tiny, inline_run: InlineRun, lying: Lying
) -> None:
    lying(alter)
    directory = inline_run(tiny("fedavg", rounds=1, min_sites=2))
    went_on_without(directory, LIAR, said)
    (first, *_) = directory.read_json("summary.json")["failures"]
    assert (first["round"], first["site"]) == (1, LIAR), "at once, and not at the end"


def test_an_epsilon_of_a_million_does_not_end_a_private_run(
    tiny: Tiny, inline_run: InlineRun, lying: Lying
) -> None:
    lying(in_metrics(**{DP_EPSILON: 10**6}))
    private: dict[str, Value] = {"privacy.sample-clip-norm": 1.0, "privacy.noise-multiplier": 2.0}
    private["max-epsilon"] = 20.0
    directory = inline_run(tiny("fedavg", rounds=2, min_sites=2) | private)
    summary = directory.read_json("summary.json")
    assert (summary["rounds"], summary["stopped"]) == (2, None)
    went_on_without(
        directory, LIAR, "metric 'dp-epsilon' is 1e+06, above the run's 'privacy.max-epsilon'"
    )
    sites = summary["privacy"]["guarantee"]["sites"]
    assert sites[LIAR] == 0
    assert 0 < sites["s1a"] == sites["s2a"] < 20


@pytest.mark.parametrize("name", ["s1a/x", "../s1a", "a" * 65, "all", "s1a\n", "[red]s1a", ""])
def test_a_name_that_would_mix_arrays_or_folders_is_refused(
    name: str, tiny: Tiny, inline_run: InlineRun, lying: Lying
) -> None:
    lying(in_hello(site=name))
    directory = inline_run(tiny("local", rounds=1, min_sites=2))
    assert _sites(directory) == {"s1a", "s2a"}
    (failure,) = directory.read_json("summary.json")["failures"]
    reason = failure["reason"]
    if name == "all":
        assert reason.startswith("node 1003: site 'all'")
    else:
        assert reason.startswith("node 1003: '")
        assert "cannot be a site's name" in reason
    assert reason.isprintable()


def test_of_two_who_say_one_name_neither_takes_part_without_a_registry(
    tiny: Tiny, inline_run: InlineRun, lying: Lying
) -> None:
    lying(in_hello(site="s1a"))
    directory = inline_run(tiny("fedavg", rounds=1, min_sites=1))
    assert _sites(directory) == {"s2a"}
    went_on_without(directory, "s1a", "two SuperNodes say that they are site 's1a'")


@pytest.fixture
def real_run(tmp_path: Path, tiny: Tiny) -> Iterator[Callable[..., RunDirectory]]:
    """Return a function that runs real sites, by name, with a registry of theirs."""

    def start(*names: str, **registered: int) -> RunDirectory:
        entries = {
            site: {"node-id": str(n), "key": f"SHA256:{n}"} for site, n in registered.items()
        }
        (tmp_path / "registry.json").write_text(json.dumps(entries))
        nodes: list[dict[str, Value]] = [
            {
                "site": name,
                "state-dir": str(tmp_path / f"node-{index}"),
                "trust": "server",
                "minimum-measured": 1,
            }
            for index, name in enumerate(names)
        ]
        values = tiny("fedavg", rounds=1, min_sites=1, silos=9)
        values |= {"run.out": str(tmp_path), "run.name": "run"}
        settings = resolve(values)
        app = APP.app
        return run(InlineGrid(app, settings.as_mapping(), nodes), settings)

    with flower_identity():
        yield start


def test_a_key_cannot_claim_anothers_name(
    real_run: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(REGISTRY, str(tmp_path / "registry.json"))
    directory = real_run("s1a", "s2a", "s1a", "s3a", s1a=1001, s2a=1002, s3b=1003)
    assert _sites(directory) == {"s1a", "s2a"}, "the registry tells which is right"
    went_on_without(directory, "s1a", "node 1003 is registered as 's3b', but says that it is 's1a'")
    went_on_without(directory, "s3a", "node 1004 says that it is 's3a': its key is registered")


def test_who_says_that_it_is_simulated_is_looked_up_all_the_same(
    real_run: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(REGISTRY, str(tmp_path / "registry.json"))
    honest: ClientApp = APP.app

    def app(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if context.node_id == 1002 and CONFIG in reply.content.config_records:
            reply.content.config_records[CONFIG]["simulated"] = True
        return reply

    monkeypatch.setattr(APP, "app", app)
    directory = real_run("s1a", "s2a", s1a=1001)
    assert _sites(directory) == {"s1a"}


DEEP = "[" * 100_000
ODD: dict[str, dict[str, Any]] = {
    "no site": {"site": []},
    "a list as text": {"distribution": ["a", "b"]},
    "a formula": {"distribution": "$\\frac$"},
    "control characters": {"distribution": "D\x1b[31m\n\x00"},
    "thousands of letters": {"distribution": "D" * 100_000},
    "deep JSON": {"features": DEEP},
    "deep counts": {"label_counts": DEEP},
    "a huge number": {"classes": 2**62},
    "no classes": {"classes": 0},
    "a number as long as a book": {"label_counts": f'{{"train": [{"9" * 10_000}]}}'},
    "infinite": {"classes": float("inf")},
    "not a number": {"floor": float("nan")},
    "no dimension": {"input_shape": []},
    "five dimensions": {"input_shape": [1, 1, 1, 1, 1]},
    "a negative length": {"input_shape": [1, -16, 16]},
    "huge inputs": {"input_shape": [2**20, 2**20]},
    "lists of labels": {"label_counts": json.dumps({"train": [1] * 500_000})},
    "other splits": {"label_counts": json.dumps({"train": [4] * 10, "secret": [1] * 10})},
    "fingerprints that are a list": {"fingerprints": "[1, 2]"},
    "a fingerprint that is a number": {"fingerprints": '{"train": 5}'},
    "fewer than no samples dropped": {"dropped": -1},
    "no floor": {"floor": 0},
    "no splits": {"measured": '"train"'},
    "bytes": {"schema": b"\xff\xfe"},
    "markup": {"backbone": "[/]" * 100},
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_odd_hello_leaves_its_node_out_and_nobody_else(
    odd: dict[str, Any], tiny: Tiny, lying: Lying
) -> None:
    lying(in_hello(**odd))
    settings = resolve(tiny("fedavg", min_sites=2))
    with flower_identity():
        grid = InlineGrid(APP.app, settings.as_mapping(), partition_configs(3))
        participants = meet_sites(grid, settings.common)
    assert participants.sites() == ["s1a", "s2a"]
    (refused,) = participants.refused
    assert len(refused) <= 400
    assert refused.isprintable()


def test_a_run_goes_on_beside_a_node_that_answers_nothing_like_a_hello(
    tiny: Tiny, inline_run: InlineRun, lying: Lying
) -> None:
    def alter(content: RecordDict) -> None:
        if CONFIG in content.config_records:
            content[CONFIG] = ConfigRecord({"site": 5, "classes": [1, 2]})

    lying(alter)
    directory = inline_run(tiny("fedavg", rounds=1, min_sites=2))
    went_on_without(directory, "unknown", "node 1003: its hello cannot be read")
    lying(alter)
    with refuses(SiteError, 1003, 2, 3):
        inline_run(tiny("fedavg", rounds=1, run_name="all"))


def test_agreed_counts_are_what_averages_weigh_by_and_a_resumed_run_keeps_them(
    tiny: Tiny, inline_run: InlineRun, tmp_path: Path
) -> None:
    agreed = tmp_path / "agreed.yaml"
    agreed.write_text("{s1a: 1000000, s2a: 36, s3a: 36}")
    values = tiny("fedavg", rounds=1) | {"run.site-weights": str(agreed)}
    weighed = inline_run(values)
    plain = inline_run(tiny("fedavg", rounds=1), out=tmp_path / "plain")
    models = [load_state(one.path / "model.safetensors")[0] for one in (weighed, plain)]
    assert any(not np.array_equal(models[0][name], models[1][name]) for name in models[0])
    (weighed.path / "summary.json").unlink()
    agreed.write_text("{s1a: 999999, s2a: 36, s3a: 36}")
    said = r"'run.site-weights' agrees on 999999 for site s1a, but .*silos\.json has 1000000"
    with pytest.raises(RunDirectoryError, match=said):
        inline_run(values | {"resume": True})
    agreed.write_text("{s1a: 1000000, s2a: 36, s3a: 36}")
    assert inline_run(values | {"resume": True}).read_json("summary.json")["rounds"] == 1


@pytest.mark.parametrize(
    ("measured", "told", "everyone"),
    [
        ([], "train, val, test", True),
        (["train"], "val, test", False),
        pytest.param([], "train, val, test", False, marks=pytest.mark.soak),
        pytest.param(["train"], "val, test", True, marks=pytest.mark.soak),
    ],
)
def test_a_run_goes_on_with_sites_that_withhold_measurements(
    measured: list[str],
    told: str,
    everyone: bool,
    tiny: Tiny,
    inline_run: InlineRun,
    lying: Lying,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def withhold(content: RecordDict) -> None:
        in_hello(measured=json.dumps(measured))(content)
        metrics = content.metric_records.get(METRICS, {})
        for key in [key for key in metrics if key.count(".") and key.split(".")[1] not in measured]:
            del metrics[key]

    lying(withhold, *(range(3) if everyone else [2]))
    directory = inline_run(tiny("fedavg"), draw=True)
    summary = directory.read_json("summary.json")
    assert summary["failures"] == []
    assert list(summary["sites"]) == ([] if everyone else ["s1a", "s2a"])
    said = capsys.readouterr().out
    assert f"site s3a: it withholds its metrics on {told}" in said
    assert ("train loss" in said) == (not everyone or "train" in measured)
    assert "nan" not in said


def test_a_method_that_judges_by_what_a_site_withholds_leaves_it_out(
    tiny: Tiny, inline_run: InlineRun, lying: Lying
) -> None:
    lying(in_hello(measured='["train", "test"]'))
    directory = inline_run(tiny("uefl", min_sites=2))
    assert _sites(directory) == {"s1a", "s2a"}
    went_on_without(directory, LIAR, "withholds its measurements on validation samples")
