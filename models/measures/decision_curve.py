"""Net benefit of acting on a model (Vickers and Elkin, Medical Decision Making 26:565, 2006)."""


def net_benefit(true: int, false: int, samples: int, threshold: float) -> float:
    """Compute the net benefit of acting on predictions, in true positives per patient.

    It is TP / n - FP / n * p / (1 - p).

    Args:
        true: TP, patients with the condition whose probability is at least the threshold.
        false: FP, patients without the condition whose probability is at least the threshold.
        samples: n, the number of all patients, at least 1.
        threshold: p, above 0 and below 1. Choosing p means that a missed case counts as (1 - p) / p
            times as bad as a false alarm.
    """
    return true / samples - false / samples * threshold / (1 - threshold)
