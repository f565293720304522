"""Size limits of source files: lines of a file, lines of a function, levels of nesting. Prints what is over and exits 1.

A function's lines are counted without its docstring; an `elif` is no level of its own.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_NESTING = 4
FOLDERS = ("llmtrain", "scripts", "tests")

Function = ast.FunctionDef | ast.AsyncFunctionDef
_LEVELS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


def violations(file: Path) -> Iterator[str]:
    """Lines `file:line: what is over which limit`."""
    text = file.read_text(encoding="utf-8")
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{file}:1: {num_lines} lines, limit {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(text, str(file))):
        if not isinstance(node, Function):
            continue
        length = function_lines(node)
        if length > MAX_FUNCTION_LINES:
            yield f"{file}:{node.lineno}: {node.name} has {length} lines, limit {MAX_FUNCTION_LINES}"
        depth = nesting(node.body)
        if depth > MAX_NESTING:
            yield f"{file}:{node.lineno}: {node.name} is nested {depth} deep, limit {MAX_NESTING}"


def function_lines(function: Function) -> int:
    """Lines from `def` to the end, the docstring not counted."""
    assert function.end_lineno is not None
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
    return function.end_lineno - function.lineno + 1 - docstring


def nesting(body: list[ast.stmt]) -> int:
    """Deepest chain of compound statements; functions and classes inside are judged by themselves."""
    return max((_depth(statement) for statement in body), default=0)


def _depth(statement: ast.stmt) -> int:
    if not isinstance(statement, _LEVELS):
        return 0
    depth = 1 + nesting(statement.body) if not isinstance(statement, ast.Match) else 1
    blocks = [handler.body for handler in getattr(statement, "handlers", [])]
    blocks += [case.body for case in getattr(statement, "cases", [])]
    blocks += [getattr(statement, "finalbody", [])]
    depth = max([depth, *(1 + nesting(block) for block in blocks if block)])
    otherwise = getattr(statement, "orelse", [])
    is_elif = isinstance(statement, ast.If) and len(otherwise) == 1 and isinstance(otherwise[0], ast.If)
    return max(depth, nesting(otherwise) if is_elif else (1 + nesting(otherwise)) if otherwise else 0)


def main(root: Path = Path(".")) -> int:
    """Check every Python file of the repository."""
    files = [file for folder in FOLDERS for file in sorted((root / folder).rglob("*.py"))]
    found = [line for file in files for line in violations(file)]
    print(
        "\n".join(found)
        or f"{len(files)} files within {MAX_FILE_LINES} lines, {MAX_FUNCTION_LINES} a function, nesting {MAX_NESTING}"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
