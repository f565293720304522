"""Rules that hold for every source file and that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.scripts import ROOT

PACKAGE = sorted((ROOT / "llmtrain").rglob("*.py"))
LAUNCH_VARIABLE = re.compile(r"(LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|SLURM_\w+|TORCHELASTIC_\w+")


def docstrings(tree: ast.AST) -> set[int]:
    """Identities of the string nodes that document something and are no values."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}


def launch_variables(source: str) -> list[str]:
    """Launch variables that stand in code as a whole string."""
    tree = ast.parse(source)
    documentation = docstrings(tree)
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in documentation]
    return [text for text in texts if isinstance(text, str) and LAUNCH_VARIABLE.fullmatch(text)]


def private_torch(source: str) -> list[str]:
    """Dotted names below torch with a part that starts with one underscore, imported or used."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("torch.")]
        elif isinstance(node, ast.Attribute):
            found.append(ast.unparse(node))
    return [name for name in found if re.match(r"torch(\.\w+)*\._[A-Za-z]", name) or name.endswith("._cdata")]


def tracked_files() -> list[Path]:
    """Text files of the repository: what git knows or would add, else everything that is no build product."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = listed.stdout.splitlines() if listed.returncode == 0 else [str(path.relative_to(ROOT)) for path in _unpacked()]
    files = [ROOT / name for name in names]
    return [file for file in files if file.is_file() and b"\0" not in file.read_bytes()[:8192]]


def _unpacked() -> Iterator[Path]:
    skipped = {".venv", "build", "runs", "__pycache__"}
    return (path for path in ROOT.rglob("*") if path.is_file() and skipped.isdisjoint(path.relative_to(ROOT).parts))


def test_only_world_reads_launch_variables() -> None:
    readers = {str(file.relative_to(ROOT)) for file in PACKAGE if launch_variables(file.read_text(encoding="utf-8"))}
    assert readers == {"llmtrain/dist/world.py"}


def test_private_torch_has_one_home() -> None:
    users = {str(file.relative_to(ROOT)): private_torch(file.read_text(encoding="utf-8")) for file in PACKAGE}
    users.pop("llmtrain/dist/torch_private.py", None)
    assert {file: names for file, names in users.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os\nrank = os.environ['RANK']", ["RANK"]),
        ("job = environ.get('SLURM_JOB_ID')", ["SLURM_JOB_ID"]),
        ("def f():\n    '''RANK'''", []),
        ("print('the RANK of a matrix')", []),
    ],
)
def test_launch_variables_are_found(source: str, found: list[str]) -> None:
    assert launch_variables(source) == found


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("from torch._C import x", 1),
        ("from torch.utils import _pytree", 1),
        ("from torch.utils._python_dispatch import TorchDispatchMode", 1),
        ("import torch._dynamo", 1),
        ("import torch\ntorch._foreach_mul_(a, 2)", 1),
        ("t.untyped_storage()._cdata", 1),
        ("import torch\ntorch.nn.functional.linear(a, b)", 0),
        ("self._torch.x", 0),
    ],
)
def test_private_torch_is_found(source: str, count: int) -> None:
    assert len(private_torch(source)) == count


def test_no_machine_paths_in_any_file() -> None:
    # Put together here, so that this file does not hold what it looks for.
    paths = re.compile("|".join("/" + place for place in ("work/", "root/", "home/", "opt/", "Users/")))
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in tracked_files()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if paths.search(line)
    ]
    assert found == []


def test_addresses_are_public_references() -> None:
    known = ("arxiv.org", "www.apache.org", "doi.org", "en.wikipedia.org", "github.com", "pytorch.org", "docs.pytorch.org")
    hosts = {
        host: file.name
        for file in tracked_files()
        for host in re.findall(r"\b[a-z]+://([^/\s\"'`)>]+)", file.read_text(encoding="utf-8"))
        if "{" not in host
    }
    assert {host: name for host, name in hosts.items() if host not in known} == {}


def test_no_marks_left_for_later() -> None:
    mark = re.compile("|".join(f"{first}{second}" for first, second in (("TO", "DO"), ("FIX", "ME"), ("XX", "X"))))
    found = [str(file.relative_to(ROOT)) for file in tracked_files() if mark.search(file.read_text(encoding="utf-8"))]
    assert found == []
