"""More classes for attacks that need them: columns that can never win."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.core.validation import check_integer

# exp(-104) is below half the smallest float32: a column this far below has no part in a softmax.
_BELOW = 110.0


class PaddedClasses(nn.Module):
    """A classifier with columns added that can never win, for attacks that compare more classes than there are.

    Losses on the third largest logit (DLR) and attacks that pick among other classes (SignOPT, Threshold) need at least
    three classes, and a binarized classifier has two. The added columns are the lowest real logit minus a constant: at
    least 110, and a thousandth of the largest logit more, which float32 keeps apart. So decisions stay as they are; the
    softmax of a float32 has exact zeros in the added columns, and cross-entropy has the same value and gradient; and
    the DLR of two classes is the margin over the margin plus that constant, which rises with the margin alone.
    ``classes`` is the number of columns in the end.

    Example:
        >>> PaddedClasses(nn.Identity(), classes=3)(torch.tensor([[1.0, 2.0]]))
        tensor([[   1.0000,    2.0000, -109.0020]])
    """

    def __init__(self, module: nn.Module, *, classes: int) -> None:
        super().__init__()
        self.module = module
        self.classes = check_integer("classes", classes, minimum=2)
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(N, classes)``."""
        logits: Tensor = self.module(x)
        missing = self.classes - logits.shape[1]
        if missing <= 0:
            return logits
        below = logits.amin(1, keepdim=True) - (_BELOW + logits.detach().abs().amax(1, keepdim=True) / 1000)
        return torch.cat([logits, below.expand(-1, missing)], 1)
