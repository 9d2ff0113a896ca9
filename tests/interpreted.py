"""Triton's interpreter, so that kernels are tested where no GPU is. Import this first.

Its products are float32 or float16 here: those of bf16 come out wrong in it.
"""

import pytest
import torch

interpreter = pytest.importorskip("triton.runtime.interpreter")
GPU = torch.cuda.is_available()  # else conftest.py has asked for the interpreter
DEVICE = "cuda" if GPU else "cpu"
_patch = interpreter._patch_lang_tensor


def _patched(tensor, scope) -> None:
    """Bounds of loops are arrays of one number to it, which numpy 2.4 no longer takes for numbers."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched
