"""Class means that sites share, and the loss that pulls towards them (FedProto, FedDistill)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedsilo.core.errors import SiteError


class ClassTargets(nn.Module):
    """Target vectors by class, as constants of a loss; a class may lack a target.

    Attributes:
        values: (classes, d) float32, 0 for a class without a target.
        known: (classes,) bool, whether a class has a target.
    """

    values: Tensor
    known: Tensor

    # A module, because sites that train as one need the targets of all sites in its place
    def __init__(self, values: Tensor, known: Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values)
        self.register_buffer("known", known)

    def forward(self, labels: Tensor) -> Tensor:
        """Look up each sample's target vector of length d, for ``matching_loss``.

        ``labels`` (batch,) are the samples' classes. The result, (batch, d + 1), has the vector
        first. The last column is 1 if the class has a target, and otherwise 0.
        """
        known = self.known.to(self.values.dtype)
        return torch.cat([self.values, known[:, None]], dim=1)[labels]


def large_classes(counts: Sequence[int], min_samples: int) -> dict[int, int]:
    """Select the classes with enough samples for their mean to leave a site.

    A mean over few samples nearly reveals one of them. Server and site both apply this rule, so the
    server knows which means to expect.

    Args:
        counts: the number of training samples of each class, from class 0.
        min_samples: the fewest samples of a class, at least 1.

    Returns:
        Class -> number of samples, for each selected class.
    """
    large: dict[int, int] = {}
    for label, count in enumerate(counts):
        if count >= min_samples:
            large[label] = count
    return large


def class_targets(
    arrays: Mapping[str, Tensor], prefix: str, classes: int, size: int
) -> ClassTargets | None:
    """Read the target vector of each class from arrays that the server sent.

    Args:
        arrays: vectors (size,) by name, ``<prefix><class>``. Classes may be missing.
        prefix: the start of each name.
        classes: the number of classes, which are numbered from 0.
        size: the length of a vector.

    Returns:
        The targets. A class without an array gets zeros and is marked as unknown. The result is
        None if ``arrays`` is empty.

    Raises:
        SiteError: a name is not ``<prefix><class>`` for one of the classes, an array's shape is not
            (size,), or an array has a value that is not finite.
    """
    values, known = torch.zeros(classes, size), torch.zeros(classes, dtype=torch.bool)
    names = {f"{prefix}{label}": label for label in range(classes)}
    # Another version of fedsilo may run at the server, so nothing about the arrays is certain
    for name, array in arrays.items():
        if name not in names:
            fault = f"there are {classes} classes, from 0"
        elif array.shape != (size,):
            fault = f"it is {tuple(array.shape)}, not ({size},)"
        elif not array.isfinite().all():
            fault = "it contains non-finite values"
        else:
            values[names[name]], known[names[name]] = array, True
            continue
        raise SiteError(
            f"array '{name}' from the server cannot be used: {fault}; compare the versions of "
            "fedsilo and the settings at server and site"
        )
    if not known.any():
        return None
    return ClassTargets(values, known)


def class_sums(rows: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Sum the rows of each class.

    Args:
        rows: the rows to sum, (n, d), on the CPU.
        labels: the class of each row, (n,) int64, on the CPU.
        classes: the number of classes.

    Returns:
        The sums, (classes, d). They are int64 for int64 rows, and otherwise float64. A class
        without rows gets a row of zeros.
    """
    kind = torch.float64
    if rows.dtype == torch.int64:
        kind = torch.int64
    sums = torch.zeros(classes, rows.shape[1], dtype=kind)
    return sums.index_add_(0, labels, rows.to(kind))


def matching_loss(
    values: Tensor,
    labels: Tensor,
    targets: ClassTargets,
    mean: Callable[[Tensor], Tensor] = torch.mean,
) -> Tensor:
    """Compute a loss that pulls samples' vectors towards the target vectors of their classes.

    A sample's error is the mean squared difference over the coordinates of its vector, computed in
    float32. If the sample's class has no target, the error is 0 and is still passed to ``mean``.

    Args:
        values: the samples' vectors, (batch, d), which get gradients.
        labels: the class of each sample, (batch,) int64.
        targets: the target vectors, (classes, d), and which classes have one.
        mean: maps the samples' errors, (batch,), to the result. By default this is their mean, a
            scalar.
    """
    # Such a sample still counts in the mean. Otherwise the remaining samples of its batch would
    # weigh more than in torch's mse_loss
    found = targets(labels)
    squares = (values.float() - found[:, :-1]).square().mean(dim=1)
    return mean(squares * found[:, -1])
