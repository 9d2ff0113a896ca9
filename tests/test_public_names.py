"""The public names: all of them exist, and importing redraft imports neither PyTorch nor NumPy."""

import subprocess
import sys

import pytest

import redraft


@pytest.mark.parametrize("name", redraft.__all__)
def test_every_public_name_is_there(name):
    assert getattr(redraft, name).__doc__
    assert name in dir(redraft)


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'wrote'"):
        _ = redraft.wrote


def test_importing_redraft_imports_no_pytorch():
    code = "import sys, redraft; print(sorted({'torch', 'numpy', 'tokenizers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
