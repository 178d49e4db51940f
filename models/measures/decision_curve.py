"""Net benefit of acting on a model (Vickers and Elkin, Medical Decision Making 26:565, 2006)."""


def net_benefit(true: int, false: int, samples: int, threshold: float) -> float:
    """Compute the net benefit of acting on predictions, in true positives per patient.

    It is TP / n - FP / n * p / (1 - p).

    Args:
        true: TP, patients with the condition whose probability is at least p.
        false: FP, such patients without the condition.
        samples: n, all patients.
        threshold: p, between 0 and 1.
    """
    return true / samples - false / samples * threshold / (1 - threshold)
