"""Methods as Flower strategies, in a ServerApp that knows nothing else of fedsilo."""

from collections.abc import Callable

import pytest
from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy

import fedsilo.strategies
from fedsilo.client_app import app as client_app
from fedsilo.core.errors import SettingError
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import InlineGrid, flower_identity, partition_configs
from fedsilo.strategies import UEFL, FedAvg
from fedsilo.strategies.flower import FlowerStrategy, _MeanMetrics
from fedsilo.strategies.wire.reply import Reply
from tests.support.errors import refuses

Tiny = Callable[..., dict[str, Value]]


def run_anywhere(strategy_class: type[FlowerStrategy], values: dict[str, Value]) -> Result:
    """Run a strategy in a ServerApp of a few lines, over three sites with our ClientApp."""
    results: list[Result] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = strategy_class(context.run_config)
        results.append(strategy.start(grid, ArrayRecord(), num_rounds=strategy.rounds))

    with flower_identity():  # the run config has no 'run.name', as on the page
        grid = InlineGrid(client_app, values, partition_configs(3))
        server_app(grid, Context(1, 1, {}, RecordDict(), dict(values)))
    return results[0]


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("fedavg", {}),
        ("uefl", {}),
        ("uefl", {"uefl.stop-when-certain": True, "uefl.gamma": 1.0}),  # ends after round 1
    ],
)
def test_strategy_in_anybodys_serverapp_gives_the_model_of_fedsilos_own_run(
    method: str, own: dict[str, Value], tiny: Tiny, inline_run: Callable[..., object]
) -> None:
    from fedsilo.core.files.state_files import load_state

    values = tiny(method, rounds=3) | own
    found = run_anywhere({"fedavg": FedAvg, "uefl": UEFL}[method], values)
    expected, _ = load_state(inline_run(values).path / "model.safetensors")  # type: ignore[attr-defined]
    assert set(found.arrays) == set(expected)
    assert all((found.arrays[name].numpy() == expected[name]).all() for name in expected)


def test_strategy_reports_training_each_round_and_the_final_measurement(tiny: Tiny) -> None:
    found = run_anywhere(FedAvg, tiny("fedavg", rounds=2))
    assert sorted(found.train_metrics_clientapp) == [1, 2]
    assert "trained.train.loss" in found.train_metrics_clientapp[1]
    (final,) = found.evaluate_metrics_clientapp.values()
    assert isinstance(final, MetricRecord)
    assert 0 <= float(str(final["incoming.test.accuracy"])) <= 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"secure-aggregation": "secagg"}, "method 'uefl' needs more than the sum of"),
        ({"rounds": 1}, "'rounds' is 1, not more than 'uefl.iteration-rounds' .20.: no codebook"),
    ],
)
def test_strategy_refuses_what_its_method_refuses_in_a_run(
    changes: dict[str, Value], told: str
) -> None:
    with pytest.raises(SettingError, match=told):
        UEFL(changes)


def test_strategy_refuses_an_unknown_key_with_the_nearest_one() -> None:
    with refuses(SettingError, "train.learning-rat", "train.learning-rate"):
        UEFL({"train.learning-rat": 0.1})


def test_every_method_is_a_flower_strategy() -> None:
    for name in ("CDL", "FedEFM", "FedEvPrompt", "FedAlignCL", "PICSR", "Local"):
        assert issubclass(getattr(fedsilo.strategies, name), Strategy)


def test_unknown_method_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'FedNothing'"):
        fedsilo.strategies.FedNothing  # noqa: B018


def test_a_metric_of_sites_without_samples_has_no_mean() -> None:
    means = _MeanMetrics()
    replies = {}
    for site, examples in {"empty": 0, "full": 4}.items():
        metrics = {"incoming.test.accuracy": 0.5 * examples, f"incoming.test.{site}": 1.0}
        replies[site] = Reply(site, {}, metrics=metrics, examples=examples)
    means.phase_ended(1, "train", replies)
    assert dict(means.record()) == {"incoming.test.accuracy": 2.0, "incoming.test.full": 1.0}
