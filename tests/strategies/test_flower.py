"""Methods as Flower strategies, in a ServerApp that knows nothing else of fedsilo."""

from collections.abc import Callable

import pytest
from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy

import fedsilo.strategies
from fedsilo.client_app import app as client_app
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.run.inline_engine import InlineGrid, flower_identity, partition_configs
from fedsilo.strategies import UEFL, FedAvg
from fedsilo.strategies.flower import FlowerStrategy

Tiny = Callable[..., dict[str, Value]]


def run_anywhere(strategy_class: type[FlowerStrategy], values: dict[str, Value]) -> Result:
    """Run a strategy in a ServerApp of a few lines, over three sites with our ClientApp."""
    results: list[Result] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = strategy_class(context.run_config)
        results.append(strategy.start(grid, ArrayRecord(), num_rounds=strategy.rounds))

    settings = resolve(values | {"run-name": "run"}).as_mapping()
    with flower_identity():
        grid = InlineGrid(client_app, settings, partition_configs(3))
        server_app(grid, Context(1, 1, {}, RecordDict(), dict(settings)))
    return results[0]


@pytest.mark.parametrize("method", ["fedavg", "uefl"])
def test_strategy_in_anybodys_serverapp_gives_the_model_of_fedsilos_own_run(
    method: str, tiny: Tiny, inline_run: Callable[..., object]
) -> None:
    from fedsilo.datasets.io.state_files import load_state

    values = tiny(method, rounds=3)
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


def test_every_method_is_a_flower_strategy() -> None:
    for name in ("CDL", "FedEFM", "FedEvPrompt", "FedAlignCL", "PICSR", "Local"):
        assert issubclass(getattr(fedsilo.strategies, name), Strategy)


def test_unknown_method_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'FedNothing'"):
        fedsilo.strategies.FedNothing  # noqa: B018
