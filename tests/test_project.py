"""The project's own rules: imports point down, public functions have types, documents match the code."""

import ast
import graphlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import commands
import print_lengths
import pytest
import test_transformers_parity

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "redraft"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
sys.path.insert(0, str(ROOT / "docs"))
import make_cli  # noqa: E402
import make_hardware  # noqa: E402


def ranks() -> dict[str, int]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Who may import whom")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", text, re.MULTILINE)
    return {name: int(rank) for rank, names in rows for name in names.split(", ")}


def package_of(path: Path) -> str:
    """`config` for redraft/config.py, `kernels` for everything below redraft/kernels."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The packages of redraft that a file imports; `redraft` stands for the public names in redraft/__init__.py."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" if node.module == "redraft" else node.module for alias in node.names]
        else:
            continue
        modules |= {name for name in names if name == "redraft" or name.startswith("redraft.")}
    return {name.split(".")[1] if "." in name else name for name in modules}


def test_every_package_has_a_rank_and_imports_only_lower_ranks():
    table = ranks()
    assert {package_of(path) for path in MODULES} - {"__init__", "__main__"} == set(table)
    for path in MODULES:
        package = package_of(path)
        for target in imports(path):
            if package.startswith("__") or target == package or (package, target) == ("cli", "redraft"):
                continue
            assert table[target] < table[package], f"{path.name} imports {target}"


def module_name(path: Path) -> str:
    """redraft.train.loop for redraft/train/loop.py, redraft.train for redraft/train/__init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(source: str, modules: set[str]) -> set[str]:
    """The modules that a source imports anywhere: at its top, under TYPE_CHECKING, or inside a function."""
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                imported.add(submodule if submodule in modules else node.module)
    return imported & modules


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Some cycle of a directed graph, or an empty list."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("package", sorted({path.parent for path in MODULES} - {PACKAGE}), ids=module_name)
def test_imports_inside_a_package_have_no_cycle(package):
    """Counts imports under TYPE_CHECKING and inside functions. Subpackages count as part of the package."""
    paths = {module_name(path): path for path in sorted(package.rglob("*.py"))}
    graph = {name: imported_modules(path.read_text(encoding="utf-8"), set(paths)) for name, path in paths.items()}
    assert find_cycle(graph) == []


def test_a_cycle_of_imports_is_found():
    sources = {
        "redraft.x.a": "if TYPE_CHECKING:\n    from redraft.x.b import B",
        "redraft.x.b": "def f():\n    from redraft.x import a",
    }
    graph = {name: imported_modules(source, set(sources)) for name, source in sources.items()}
    assert set(find_cycle(graph)) == set(sources)
    assert find_cycle({**graph, "redraft.x.b": set()}) == []


def test_the_core_imports_with_only_the_core_installed():
    hidden = "('transformers', 'pytest', 'hypothesis', 'fastapi', 'pyte', 'huggingface_hub')"
    code = f"import sys; [sys.modules.__setitem__(m, None) for m in {hidden}]; import redraft, redraft.cli.main"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def definitions(path: Path):
    """Public functions, methods and classes at module or class level."""
    pending = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            decorators = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
            if "overload" not in decorators:
                yield node
            if isinstance(node, ast.ClassDef):
                pending += node.body


@pytest.mark.parametrize("path", [*MODULES, *(ROOT / "benchmarks").glob("*.py")], ids=str)
def test_a_module_has_a_docstring_and_its_public_functions_have_types(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path} has no docstring"
    for node in definitions(path):
        if isinstance(node, ast.FunctionDef):
            parameters = [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]
            untyped = [a.arg for a in parameters if a.annotation is None and a.arg not in ("self", "cls")]
            assert not untyped, f"{path.name}: {node.name} has no types for {untyped}"
            assert node.returns is not None, f"{path.name}: {node.name} has no return type"


def test_long_files_and_functions_are_asked_about(tmp_path, capsys):
    long_function = "def f() -> None:\n" + "    pass\n" * 80
    (tmp_path / "short.py").write_text(long_function.removesuffix("    pass\n"))
    print_lengths.ask(tmp_path)
    assert capsys.readouterr().out == ""
    (tmp_path / "long.py").write_text(long_function + "\n" * 420)
    print_lengths.ask(tmp_path)
    assert capsys.readouterr().out == (
        "long.py has 501 lines: is it two files?\nlong.py: f has 81 lines: does it tell two stories?\n"
    )


def test_the_top_level_reads_as_a_table_of_contents():
    entries = {path.relative_to(PACKAGE).parts[0] for path in tracked() if path.is_relative_to(PACKAGE)}
    assert len(entries - {"__main__.py", "py.typed"}) <= 16, sorted(entries)
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for entry in entries:
        assert f"| `{entry}` |" in text or f"| `{entry}/` |" in text, f"CONTRIBUTING.md does not list {entry}"


@pytest.mark.parametrize("contents", sorted(PACKAGE.rglob("*/__init__.py")), ids=lambda path: path.parent.name)
def test_a_packages_docstring_lists_its_files(contents):
    docstring = ast.get_docstring(ast.parse(contents.read_text(encoding="utf-8"))) or ""
    entries = {path.stem for path in contents.parent.glob("*.py")} - {"__init__", "__main__"}
    entries |= {path.parent.name for path in contents.parent.glob("*/__init__.py")}
    listed = {*re.findall(r"^ *(\w+)/? ", docstring, re.MULTILINE), *re.findall(r"\b(\w+)\.py\b", docstring)}
    assert entries <= listed, f"{contents.relative_to(ROOT)} does not list {sorted(entries - listed)}"


CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "time.time", "time.time_ns"}


def test_no_test_reads_a_clock():
    """A test that measures time fails on a busy machine; speeds belong to benchmarks/. Replacing a clock is allowed."""
    for path in TESTS:
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        for call in calls:
            name = ast.unparse(call.func)
            is_clock = name in CLOCKS or name.split(".")[-1] in CLOCKS
            assert not is_clock, f"{path.relative_to(ROOT)}:{call.lineno} reads a clock: {name}"


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.split("\n") if name and (ROOT / name).is_file()]


def test_no_machine_is_named():
    """Neither a path of the machine this was written on, nor unfinished work."""
    forbidden = re.compile("|".join(("/" + "work/", "/" + "root/", "TO" + "DO", "FIX" + "ME", "Not" + "ImplementedError")))
    assert len(tracked()) > 40
    for path in tracked():
        if path.suffix in (".py", ".md", ".toml", ".txt", ".jinja", "") and path.name != "LICENSE":
            assert not forbidden.search(path.read_text(encoding="utf-8")), path


def test_the_command_line_page_is_up_to_date():
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == make_cli.document(), "run make docs"


@pytest.mark.soak
def test_the_hardware_page_is_what_the_plan_computes():
    assert (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8") == make_hardware.document(), "run make docs"
    assert "| 8 GB |" in make_hardware.document()


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(name="demo", scope="module")
def _demo(tmp_path_factory):
    """An empty folder in which the README's commands find redraft."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "bin").mkdir()
    (folder / "bin" / "redraft").write_text(f'#!/bin/sh\nexec {shlex.join(commands.redraft())} "$@"\n')
    (folder / "bin" / "redraft").chmod(0o755)
    return folder


def run_in(folder: Path, command: list[str]) -> str:
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert run.returncode == 0, (command, run.stderr)
    assert run.stdout.strip()
    return run.stdout


SHORTER = {  # what the test adds to a command of the README that would take long, or would not end
    'redraft "Once upon a time"': "--steps 8",
    "redraft train": "--set steps=2",
    "redraft serve": "--help",
}


@pytest.mark.soak
def test_the_readmes_commands_work(demo):
    lines = [line for block in blocks(ROOT / "README.md", "sh") for line in block.splitlines() if line.strip()]
    assert len(lines) >= 5
    for line in lines:
        command = line.split("  #")[0]
        more = [extra for start, extra in SHORTER.items() if command.startswith(start)]
        run_in(demo, ["bash", "-c", " ".join([command, *more])])


def test_the_documents_make_targets_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        named = set(re.findall(r"`make (\w+)`", page.read_text(encoding="utf-8")))
        assert named <= targets, f"{page.name} names {named - targets}"


@pytest.mark.soak
def test_the_readmes_python_works(demo):
    for block in blocks(ROOT / "README.md", "python"):
        assert "\n" in run_in(demo, [sys.executable, "-c", block])


def test_links_files_and_names_in_documents_exist():
    files = [f"/{path.relative_to(ROOT).as_posix()}" for path in tracked()]
    for page in DOCUMENTS:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
        for name in re.findall(r"`([\w/]+\.(?:py|js|md|jinja))`", text):
            assert any(file.endswith(f"/{name}") for file in files), f"{page.name} names {name}"
    numerics = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+\.py)` (\w+)", numerics, re.MULTILINE)
    assert len(rows) >= 10
    for file, name in rows:
        assert re.search(rf"(def|class) {name}\b", (PACKAGE / file).read_text(encoding="utf-8")), (file, name)
    tests = re.findall(r"\| `(test_\w+)` \|", numerics)
    assert len(tests) >= 5
    for name in tests:
        assert any(f"def {name}(" in path.read_text(encoding="utf-8") for path in TESTS), name


@pytest.mark.parametrize("document", ["README.md", "docs/measurements.md"])
def test_documents_claim_the_number_of_parity_cases_that_are_tested(document):
    claims = re.findall(r"\b(\d+) of (\d+)(?= generations| \|)", (ROOT / document).read_text(encoding="utf-8"))
    assert claims
    assert {int(number) for claim in claims for number in claim} == {len(test_transformers_parity.CASES)}


def test_make_and_bash_can_read_our_files():
    if shutil.which("make"):
        subprocess.run(["make", "-n", "test"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["bash", "-n", ".ci/run"], cwd=ROOT, check=True)
