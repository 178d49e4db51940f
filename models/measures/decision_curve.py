"""Net benefit of acting on a model (Vickers and Elkin, Medical Decision Making 26:565, 2006)."""


def net_benefit(true: int, false: int, samples: int, threshold: float) -> float:
    """Return TP / n - FP / n times p / (1 - p), in true positives a patient.

    Args:
        true: patients with the condition whose probability is at least the threshold.
        false: patients without it whose probability is.
        samples: all patients n.
        threshold: p, above 0 and below 1: who acts at p holds a miss for (1 - p) / p times as bad
            as a false alarm.
    """
    return true / samples - false / samples * threshold / (1 - threshold)
