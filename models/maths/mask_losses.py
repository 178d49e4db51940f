"""Losses of predicted masks: cross-entropy of the pixels, and soft Dice (Milletari et al. 2016)."""

from torch import Tensor, nn


class PixelLoss:
    """The mean cross-entropy of the pixels, plus a weight times the soft Dice loss."""

    def __init__(self, dice_weight: float) -> None:
        self.dice_weight = dice_weight

    def __call__(self, logits: Tensor, masks: Tensor) -> Tensor:
        """Compute the loss of a batch, a scalar: cross-entropy plus the weighted soft Dice loss.

        The cross-entropy is a mean over all pixels. If the weight is 0, only the cross-entropy
        remains.

        Args:
            logits: (batch, classes, h, w).
            masks: each pixel's class, (batch, h, w).
        """
        entropy = nn.functional.cross_entropy(logits.float(), masks.long())
        if not self.dice_weight:
            return entropy
        return entropy + self.dice_weight * soft_dice_loss(logits, masks)


def soft_dice_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Compute the soft Dice loss of a batch of masks, a scalar.

    Dice measures the overlap of two masks. Here p is the softmax of the logits, and t is 1 for a
    class's true pixels and 0 elsewhere. The loss of a class is 1 - (2 sum p t + 1) / (sum p + sum t
    + 1), with sums over all pixels of the batch. The result is the mean over all classes but the
    background.

    Args:
        logits: (batch, classes, h, w), with at least two classes.
        masks: the class of each pixel, (batch, h, w). 0 is the background.
    """
    # A catheter covers a few per cent of the pixels, so cross-entropy alone is near its
    # minimum if all pixels are called background. Dice is summed over the batch, because for one
    # image without a catheter the ratio would be 0 / 0
    shares = logits.float().softmax(dim=1)[:, 1:]
    wanted = nn.functional.one_hot(masks.long(), logits.shape[1]).permute(0, 3, 1, 2)[:, 1:]
    both = (shares * wanted).sum(dim=(0, 2, 3))
    sizes = shares.sum(dim=(0, 2, 3)) + wanted.sum(dim=(0, 2, 3))
    return (1 - (2 * both + 1) / (sizes + 1)).mean()
