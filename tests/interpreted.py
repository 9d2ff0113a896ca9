"""Triton's interpreter, which tests kernels without a GPU. Import this module first.

Tests multiply in float32 or float16: the interpreter computes bf16 products wrongly.
"""

import functools
import importlib

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


# The interpreter makes types and shapes anew for every value: they take more time than the numbers. Here each is made once.
_core = importlib.import_module("triton.language.core")
_get_np_dtype = interpreter._get_np_dtype
_np_dtypes = {}  # by the name of Triton's type
_make_tuple_type = _core._type_for_tuple_values


def _np_dtype(dtype):
    scalar = dtype.scalar
    if scalar.name not in _np_dtypes:
        _np_dtypes[scalar.name] = _get_np_dtype(scalar)
    return _np_dtypes[scalar.name]


@functools.cache
def _shape(sizes):
    """A shape of integers, how many elements it has, its text, and the same as constants."""
    shape = _core.tuple(sizes)
    return shape, _core.validate_block_shape(shape), str(shape), _core.tuple([_core.constexpr(size) for size in sizes])


def _init_block_type(self, element_ty, shape):
    sizes = tuple(_core._unwrap_if_constexpr(size) for size in shape)
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, self.numel, text, self.constants = _shape(sizes)
    self.name = f"<{text}, {element_ty}>"


def _init_tensor(self, handle, type):
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    is_block = type.is_block()
    self.shape = type.constants if is_block else _NO_SHAPE
    self.numel = _core.constexpr(type.numel if is_block else 1)


def _init_tuple(self, args, type=None):
    self.values = list(args)
    self._given_type = _core.tuple_type(type) if isinstance(type, list | tuple) else type


def _tuple_type(self):
    return self._given_type or _make_tuple_type(self.values)


def _set_tuple_type(self, type):
    self._given_type = type


_core.tuple.__init__ = _init_tuple
_core.tuple.type = property(_tuple_type, _set_tuple_type)
_core.tensor.__init__ = _init_tensor
_core.block_type.__init__ = _init_block_type
interpreter._get_np_dtype = _np_dtype
_NO_SHAPE = _core.tuple(())
