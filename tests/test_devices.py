"""Devices as users name them. There is no GPU here: torch is told that there are two."""

import pytest
import torch

from redraft.kernels import backend


@pytest.fixture(name="gpus")
def _gpus(monkeypatch):
    """Two GPUs, the second one current. Returns what torch.cuda.set_device was called with."""
    chosen = []

    def set_device(device):
        if torch.device(device).index is None:
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
        chosen.append(torch.device(device))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    return chosen


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, "cuda:1"),
        ("cuda", "cuda:1"),
        (torch.device("cuda"), "cuda:1"),
        ("cuda:0", "cuda:0"),
        (torch.device("cuda", 0), "cuda:0"),
        ("cpu", "cpu"),
    ],
)
def test_a_device_has_an_index(gpus, asked, expected):
    assert backend.select_device(asked) == torch.device(expected)
    assert gpus == ([torch.device(expected)] if expected != "cpu" else [])


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("cuda:2", "there is no 'cuda:2' here: 2 GPUs found"),
        ("mps", "not on 'mps'"),
        ("gpu", "'gpu' is not a device"),
    ],
)
def test_a_device_that_is_not_there_is_refused(gpus, asked, sentence):
    with pytest.raises(ValueError, match=sentence):
        backend.select_device(asked)


def test_without_a_gpu_the_cpu_is_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert backend.select_device(None) == torch.device("cpu")
    with pytest.raises(ValueError, match="there is no 'cuda' here: 0 GPUs found; try cpu"):
        backend.select_device("cuda")
