import numpy as np
import pytest

from fedsilo.datasets.registry import DATA_SETS, data_set
from fedsilo.datasets.synthetic.phantom import PhantomDataSet, even_sequence
from fedsilo.datasets.synthetic.phantoms import ANGIOGRAM_PHANTOM, DERMOSCOPY_PHANTOM


@pytest.mark.parametrize("counts", [(6, 3), (3, 6)])
def test_even_sequence_holds_the_counts_and_every_beginning_nearly_their_proportions(
    counts: tuple[int, int],
) -> None:
    kinds = np.array(even_sequence(counts, 0.3, np.random.default_rng(1))[0])
    assert np.bincount(kinds).tolist() == list(counts)
    for length in range(1, 10):
        assert abs((kinds[:length] == 0).sum() - counts[0] / 9 * length) <= 1.5


def test_even_sequence_without_repeats_shows_another_subject_each_time() -> None:
    assert even_sequence((2, 2), 0.0, np.random.default_rng(0))[1] == (0, 1, 2, 3)


def test_sequence_is_the_same_each_time_and_a_sites_own() -> None:
    assert ANGIOGRAM_PHANTOM.sequence("human") == ANGIOGRAM_PHANTOM.sequence("human")
    assert DERMOSCOPY_PHANTOM.sequence("msk4") != DERMOSCOPY_PHANTOM.sequence("vienna_dias")


def test_every_phantom_is_named_as_in_the_registry() -> None:
    phantoms = [data for data in map(data_set, DATA_SETS) if isinstance(data, PhantomDataSet)]
    named = {name for name in DATA_SETS if name.endswith("-phantom")}
    # Vessels are drawn as phantoms are; chests have findings instead of a class, so they are not
    assert {data.name for data in phantoms} == named - {"chest-phantom"} | {"vessels-synthetic"}
    assert all(data.key == data.name for data in phantoms)
