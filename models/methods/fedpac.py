"""FedPAC (Xu, Tong and Huang 2023): features are aligned, and each site gets a mix of classifiers.

A site trains the classifier first, then the rest near global prototypes, as FedProto does. The
server averages all but the classifier. Of the sites' classifiers each site gets a mix of its own,
whose weights minimise variance plus distance of the class-wise features.

Equations (arXiv:2306.11867):
  (4) distance to the prototypes -> models.maths.class_means.matching_loss
  (6) prototypes by counts -> strategies.methods.class_means.FedProto.merge_prototypes
  (8) variance and distance -> models.methods.fedpac.mixing_weights
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsilo.core.settings_schema import setting
from fedsilo.core.tasks import CLASSIFICATION
from fedsilo.models.methods.fedrep import FedRepSettings

# The means before training, and with them their mean squared length: <kind><class>, (d + 1,)
RECEIVED = "received/"
# A site's classifier in the state is <kind><site>/<array>
HEAD = "head/"
# Added to the diagonal, in traces of the matrix, so that equal sites leave a Cholesky root too
_RIDGE = 1e-12


@dataclass(frozen=True)
class FedPACSettings(FedRepSettings):
    """Settings of FedPAC; the paper trains the classifier for one epoch and the rest for five."""

    title = "FedPAC"
    tasks = (CLASSIFICATION,)
    why_tasks = "sends class means"
    server = "fedsilo.strategies.methods.fedpac:FedPAC"
    site = "fedsilo.client_app.methods.fedpac:FedPACSite"
    sums_suffice = False
    why_not_private = "sends the spread of its features, which has no noise"

    head_share: float = setting(
        0.1667, "share of a round's steps that train the classifier alone", gt=0.0, lt=1.0
    )
    alignment_weight: float = setting(
        1.0, "weight lambda of the distance to the prototypes", gt=0.0
    )
    class_min_count: int = setting(
        10, "a class mean over fewer training samples does not leave its site", ge=1
    )


def variance_of(shares: Any, means: Any, squares: Any, samples: int) -> float:
    """Compute the variance of a site's class-wise mean feature, V / n in FedPAC's eq. 8.

    V is the sum over the classes y of p(y) E[|f|^2 | y] - |p(y) E[f | y]|^2, for features f. A
    negative V counts as 0.

    Args:
        shares: the share p(y) of each class in the site's training samples, (classes,).
        means: the mean feature E[f | y] of each class, (classes, d).
        squares: the mean squared length E[|f|^2 | y] of the features of each class, (classes,).
        samples: n, the number of the site's training samples, at least 1.
    """
    # E|f|^2 by class, less the squared length of what eq. 8 calls the class-wise feature
    spread = shares @ squares - np.square(shares[:, None] * means).sum()
    return max(0.0, float(spread)) / samples


def mixing_weights(place: int, features: Any, variances: Any) -> Any:
    """Compute the weights for mixing all sites' classifiers for one site (FedPAC, eq. 8).

    The weights a_j of the sites j are at least 0 and sum to 1. They minimise sum_j a_j^2 v_j +
    |sum_j a_j (h_i - h_j)|^2 for the site i. This favours sites with similar features and a small
    variance. If all sites are equal and have no variance, the weights are equal.

    Args:
        place: i, the index of the site that gets the mix.
        features: h_j of each site, (sites, classes * d) float64. It joins, over all classes y, the
            mean feature of y times the share of y.
        variances: v_j of each site, (sites,).

    Returns:
        The weights a_j, (sites,).
    """
    # Every command reads the settings of this module, and scipy takes half a second to import
    from scipy.linalg import cholesky, solve_triangular
    from scipy.optimize import nnls

    # The distance is a square, so its matrix is that of the inner products of the differences
    far = features[place] - features
    matrix = far @ far.T + np.diag(variances)
    # Sites that are alike and without variance leave a matrix of zeros: any mix is as good
    matrix += _RIDGE * (np.trace(matrix) or 1.0) * np.eye(len(matrix))
    # The minimiser of a'Pa on the simplex is that of x'Px / 2 - sum x over x >= 0, divided by its
    # sum: both have the same conditions of optimality. The second is a problem of least squares,
    # because x'Px / 2 - sum x is |L'x - inv(L) 1|^2 / 2 plus a constant where P = L L'
    root = cholesky(matrix, lower=True)
    ones = np.ones(len(matrix))
    found, _ = nnls(root.T, solve_triangular(root, ones, lower=True))
    return found / found.sum()
