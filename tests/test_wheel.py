"""A built wheel holds everything that the package needs: `redraft train toy` runs from the wheel alone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(name="wheel", scope="module")
def _wheel(tmp_path_factory) -> Path:
    """The wheel, built offline from a copy of the checkout: setuptools leaves folders behind in the tree it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "redraft", source / "redraft", ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys, setuptools.build_meta as backend; print(backend.build_wheel(sys.argv[1]))"
    run = subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    (path,) = folder.glob("redraft-*.whl")
    return path


@pytest.mark.soak
def test_the_wheel_holds_every_file_of_the_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    listed = subprocess.run(["git", "ls-files", "redraft"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {name for name in listed.stdout.split() if (ROOT / name).is_file()}
    assert {"redraft/train/recipes/toy.py", "redraft/train/recipes/__init__.py"} <= tracked
    assert tracked - names == set()


@pytest.mark.soak
def test_a_recipe_trains_from_the_wheel_alone(wheel, tmp_path):
    """In an empty folder, with only the wheel's redraft on the path: the checkout cannot be imported by accident."""
    content = tmp_path / "content"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(content)
    work = tmp_path / "work"
    work.mkdir()
    start = (
        f"import sys; sys.path.insert(0, {str(content)!r}); import redraft; "
        f"assert redraft.__file__.startswith({str(content)!r}), redraft.__file__; "
        "from redraft.cli.main import main; sys.argv = ['redraft', *sys.argv[1:]]; main()"
    )
    command = [sys.executable, "-I", "-c", start, "train", "toy", "--set", "steps=1", "--set", "rows=2", "--device", "cpu"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(work), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "runs/toy/model"
    assert (work / "runs/toy/model/model.safetensors").is_file()
