import pytest

from fedsilo.models.contract.messages import INCOMING, measurement, measurements
from fedsilo.models.methods.cross import metric_from


@pytest.mark.parametrize("site", ["ge", "s.1", "a/b", "x-y", "auc-from-ge", ".", "a.b.c"])
def test_a_figure_of_a_foreign_model_comes_through_the_wire_under_its_name(site: str) -> None:
    name = metric_from("auc", site)
    key = measurement(INCOMING, "test", name)
    assert list(measurements({key: 0.5, "seconds": 1.0})) == [("incoming", "test", name, 0.5)]


def test_metric_from_gives_every_pair_its_own_name() -> None:
    sites = ["b", "from-b", "a-from-b", "auc-from-b"]
    names = [metric_from(m, s) for m in ("accuracy", "balanced-accuracy", "auc") for s in sites]
    assert len(set(names)) == len(names)
