"""Triton's interpreter, which tests kernels without a GPU. Import this module first.

Tests multiply in float32 or float16: the interpreter computes bf16 products wrongly.
"""

import pytest
import torch

interpreter = pytest.importorskip("triton.runtime.interpreter")
GPU = torch.cuda.is_available()  # without one, conftest.py turns the interpreter on
DEVICE = "cuda" if GPU else "cpu"
_patch = interpreter._patch_lang_tensor


def _patched(tensor, scope) -> None:
    """The interpreter holds loop bounds as arrays of one number, which numpy 2.4 no longer converts to int."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched
_patch_lang = interpreter._patch_lang
_patched_modules = set()  # by the identity of their globals


def _patch_once(fn):
    """Replaces the functions of Triton's language once per process. The interpreter does it at every call of a function.

    Replacing them takes longer than running a small function, and in this process all kernels are interpreted.
    """
    if id(fn.__globals__) not in _patched_modules:
        _patch_lang(fn)
        _patched_modules.add(id(fn.__globals__))
    return interpreter._LangPatchScope()  # nothing to restore


interpreter._patch_lang = _patch_once
