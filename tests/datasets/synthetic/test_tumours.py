"""The synthetic tumours: the same images for both tasks, and labels that images can tell."""

import numpy as np

from fedsilo.datasets.synthetic.tumours import TUMOUR_SIZES, TUMOURS
from fedsilo.models.measures.survival_metrics import concordance


def test_both_sets_have_the_same_images_and_large_tumours_grow_again_earlier() -> None:
    images, labels = TUMOURS.draw("isle")
    same, diameters = TUMOUR_SIZES.draw("isle")
    assert np.array_equal(images, same)
    times, events = labels.astype(float).T
    assert 0.3 < events.mean() < 0.8
    index = concordance(times, events, diameters.astype(float))
    assert index is not None
    assert index > 0.65
    # A larger tumour covers more bright pixels
    assert np.corrcoef(images.mean(axis=(1, 2, 3)), diameters)[0, 1] > 0.8
