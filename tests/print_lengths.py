"""Prints the files above 500 lines and the functions above 80 as questions. `make lint` runs it; no length is an error.

python tests/print_lengths.py
"""

import ast
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 80


def ask(folder: Path) -> None:
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        name = path.relative_to(folder)
        if (lines := source.count("\n")) > FILE_LINES:
            print(f"{name} has {lines} lines: is it two files?")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and (lines := node.end_lineno - node.lineno + 1) > FUNCTION_LINES:
                print(f"{name}: {node.name} has {lines} lines: does it tell two stories?")


if __name__ == "__main__":
    for room in ("redraft", "tests", "benchmarks"):
        ask(Path(__file__).parents[1] / room)
