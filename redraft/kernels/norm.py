"""Root-mean-square norm, computed in float32 whatever the input is."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x over its root mean square along the last axis, times the weight where there is one (no "+1" as in Gemma 2)."""
    weight = weight.float() if weight is not None else None
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
