"""RMS norm, computed in float32 for every input dtype."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Divides x by its root mean square over the last axis and multiplies by the weight (Gemma 2: by 1 + weight)."""
    weight = weight.float() if weight is not None else None
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
