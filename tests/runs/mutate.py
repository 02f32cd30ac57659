"""Break worker/core, worker/stream and worker/kafka in small ways, and see whether the unit tests notice.

`python -m tests.runs.mutate --count 100 --seed 7`: each mutation is one change of one expression (a comparison, an
arithmetic operator, a number, a Boolean, a negated condition, a left-out statement) in a copy of the repository, judged
by the unit tests of the package, first those of the module's name. Prints one line each, and killed of all at the end.
"""

from __future__ import annotations

import argparse
import ast
import copy
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.imports import ROOT

PACKAGES = ("core", "stream", "kafka")
TESTS = {"core": ["core"], "stream": ["stream", "core"], "kafka": ["kafka", "core"]}
SECONDS = 240.0

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Add,
}  # fmt: skip


def mutations(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield each node that can be changed, and what with it; no docstrings, annotations, logs or messages."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
                    yield node, "comparison"
                elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _text(node):
                    yield node, "operator"
                elif isinstance(node, ast.BoolOp):
                    yield node, "and/or"
                elif isinstance(node, ast.If | ast.IfExp | ast.While):
                    yield node, "negation"
                elif isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value is not None:
                    yield node, "constant"
                elif isinstance(node, ast.AugAssign) or (
                    isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "log." not in ast.unparse(node)
                ):
                    yield node, "left out"


def _text(node: ast.BinOp) -> bool:
    return any(isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", 0), str) for part in ast.walk(node))


def change(node: ast.AST, how: str) -> ast.AST:
    """Return what stands for the node in the mutant."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare):
        new.ops[0] = COMPARISONS[type(new.ops[0])]()
    elif isinstance(new, ast.BinOp):
        new.op = OPERATORS[type(new.op)]()
    elif isinstance(new, ast.BoolOp):
        new.op = ast.And() if isinstance(new.op, ast.Or) else ast.Or()
    elif isinstance(new, ast.If | ast.IfExp | ast.While):
        new.test = ast.UnaryOp(ast.Not(), new.test)
    elif isinstance(new, ast.Constant):
        new.value = not new.value if isinstance(new.value, bool) else int(str(new.value)) + 1
    else:
        new = ast.Pass()
    return new


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        """Replace one node."""
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)


def tests_of(copy_of: Path, path: Path) -> list[str]:
    """Return the unit tests for a module: those that name it first."""
    package = path.relative_to(copy_of / "worker").parts[0]
    files = [file for folder in TESTS[package] for file in sorted((copy_of / "tests/unit" / folder).glob("test_*.py"))]
    module = ".".join(path.relative_to(copy_of).with_suffix("").parts)
    name = path.stem

    def rank(file: Path) -> tuple[int, int]:
        text = file.read_text("utf-8")
        imported = module in text or f"from {module.rpartition('.')[0]} import {name}" in text
        return (name not in file.stem, not imported)

    return [str(file.relative_to(copy_of)) for file in sorted(files, key=rank)]


def judge(copy_of: Path, path: Path) -> str:
    """Return `killed` with the test that noticed, or `survived`."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--seed", "1"]
    try:
        done = subprocess.run(
            [*command, *tests_of(copy_of, path)], cwd=copy_of, capture_output=True, text=True, timeout=SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "killed (it does not end)"
    if done.returncode == 0:
        return "SURVIVED"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return f"killed by {failed[0].split()[1] if failed else f'exit code {done.returncode}'}"


def main() -> int:
    """Run from the command line; exit code 0 whatever survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.runs.mutate", description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many, however many are judged")
    options = parser.parse_args()
    rng, began = random.Random(options.seed), time.monotonic()
    killed = total = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copied = Path(folder)
        for name in ("worker", "tests", "schemas", "docs", "pyproject.toml", "deploy", "Makefile", "README.md"):
            source = ROOT / name
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copied / name, ignore=skipped) if source.is_dir() else shutil.copy(source, copied)
        places = [
            (path, number)
            for package in PACKAGES
            for path in sorted((copied / "worker" / package).rglob("*.py"))
            for number, _ in enumerate(mutations(ast.parse(path.read_text("utf-8"))))
        ]
        print(f"{len(places)} places, seed {options.seed}", flush=True)
        for path, number in rng.sample(places, min(options.count, len(places))):
            if time.monotonic() - began > options.minutes * 60:
                break
            original = path.read_text("utf-8")
            tree = ast.parse(original)
            node, how = list(mutations(tree))[number]
            before, new = ast.unparse(node).splitlines()[0], change(node, how)
            path.write_text(ast.unparse(ast.fix_missing_locations(_Replace(node, new).visit(tree))), "utf-8")
            verdict = judge(copied, path)
            path.write_text(original, "utf-8")
            total += 1
            killed += not verdict.startswith("SURVIVED")
            where = f"{path.relative_to(copied)}:{node.lineno}"  # type: ignore[attr-defined]
            print(f"{where}: {how}: {before} -> {ast.unparse(new).splitlines()[0]}: {verdict}", flush=True)
    print(f"{killed} of {total} killed in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
