"""The small network of the benchmark's images: its shapes, and the methods that it suits."""

import pytest
import torch

from benchmarks.ranking import small_cnn
from benchmarks.ranking.config import RANKING_FILE, read_benchmark
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import SettingError
from fedsilo.core.methods import METHODS
from fedsilo.engines.planning import planned_settings
from fedsilo.server_app.config.settings import resolve

SHAPES = {"grey, 28 pixels": (1, 28, 28), "colour, 30 pixels": (3, 30, 30)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_its_map_is_a_quarter_of_the_image_rounded_up(shape: tuple[int, int, int]) -> None:
    network = small_cnn.build(shape, 43)
    images = torch.zeros(2, *shape)
    side = {28: 7, 30: 8}[shape[1]]
    assert network.encode(images).shape == (2, side * side, 32)
    assert network(images).shape == (2, 43)


@pytest.mark.parametrize("experiment", ["benchmark-mnist", "benchmark-fmnist", "benchmark-gtsrb"])
def test_every_method_but_one_accepts_it(experiment: str) -> None:
    base = planned_settings(experiment, RunSources(file=RANKING_FILE)).as_mapping()
    benchmark = read_benchmark(RANKING_FILE, "benchmark")
    refused = []
    for method in METHODS:
        own = benchmark.contender(method).settings_on(experiment)
        try:
            resolve({**base, **own, "method": method, "run.name": ""})
        except SettingError:
            refused.append(method)
    assert refused == ["fedevprompt"]
