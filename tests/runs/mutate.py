"""Break the pure parts, the stream and the Kafka side of worker/ in small ways: do the unit tests notice?

`python -m tests.runs.mutate --count 100 --seed 7`: each mutation is one change of one expression (a comparison, an
arithmetic operator, a number, a Boolean, a negated condition, a left-out statement) within a function. The tests that
execute its line judge it, the fastest first, up to the first that fails. One line is printed for each mutation, and at
the end how many were killed. `--at worker/core/scan.py:50` judges all mutations of a line.

`--before TREE` compares with the tests of another commit in a worktree: the same mutation is applied to both trees, in
functions that both have with nearly the same source. `--others N` adds N mutations of functions that are only here.

A process for each tree collects the tests, measures in a first run with coverage.py (`uv pip install coverage`) which
lines each of them executes, and forks for each mutation. The child gives the functions in memory their new code: no
file changes, and a mutant costs its tests alone. What runs at import or in a process that a test starts is not judged.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import difflib
import gc
import hashlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import IO, Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("core", "redact", "stream", "kafka")
SIMILAR = 0.8
"""Functions of one name are the same one in two trees if so much of their source agrees (difflib's ratio)."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Add,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# What can be changed
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A node that can be changed: the number-th of its module, in a function, and how its lines and it read."""

    path: str
    number: int
    function: str
    how: str
    statement: str
    before: str
    after: str
    lines: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.path}:{self.lines[0]}: {self.how}: {self.before} -> {self.after}"


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions of a module and the methods of its classes; what is nested in one belongs to it."""
    for outer in tree.body:
        for node in outer.body if isinstance(outer, ast.ClassDef) else [outer]:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{outer.name}.{node.name}" if isinstance(outer, ast.ClassDef) else node.name, node


def kind(node: ast.AST) -> str | None:
    """Return how the node can be changed, if so; logs and texts cannot."""
    match node:
        case ast.Compare() if type(node.ops[0]) in COMPARISONS:
            return "comparison"
        case ast.BinOp() if type(node.op) in OPERATORS and not any(
            isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", 0), str) for part in ast.walk(node)
        ):
            return "operator"
        case ast.BoolOp():
            return "and/or"
        case ast.If() | ast.IfExp() | ast.While():
            return "negation"
        case ast.Constant(value=int()):
            return "constant"
        case ast.AugAssign():
            return "left out"
        case ast.Expr(value=ast.Call()) if "log." not in ast.unparse(node):
            return "left out"
    return None


def change(node: ast.AST) -> ast.AST:
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


def changeable(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, ast.AST]]:
    """Yield each node that can be changed, with the name of its function and its statement."""

    def visit(node: ast.AST, statement: ast.stmt) -> Iterator[tuple[ast.stmt, ast.AST]]:
        if kind(node):
            yield statement, node
        for child in ast.iter_child_nodes(node):
            yield from visit(child, child if isinstance(child, ast.stmt) else statement)

    for name, function in functions(tree):
        for part in function.body:
            yield from ((name, statement, node) for statement, node in visit(part, part))


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0]


def places(tree: Path) -> list[Place]:
    """Return what can be changed in the packages of a tree."""
    found = []
    for package in PACKAGES:
        for path in sorted((tree / "worker" / package).rglob("*.py")):
            module = ast.parse(path.read_text("utf-8"))
            for number, (function, statement, node) in enumerate(changeable(module)):
                body = getattr(statement, "body", None)  # of a compound statement, its head alone
                last = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
                text = _first_line(statement) if body else ast.unparse(statement)
                found.append(
                    Place(
                        str(path.relative_to(tree)),
                        number,
                        function,
                        kind(node) or "",
                        text,
                        _first_line(node),
                        _first_line(change(node)),
                        (statement.lineno, max(last, statement.lineno)),
                    )
                )
    return found


def mutant(path: Path, number: int) -> CodeType:
    """Return the code of a module with one change."""
    tree = ast.parse(path.read_text("utf-8"))
    _, _, node = list(changeable(tree))[number]

    class Replace(ast.NodeTransformer):
        def visit(self, at: ast.AST) -> ast.AST:
            return ast.copy_location(change(at), at) if at is node else self.generic_visit(at)

    changed = Replace().visit(tree)
    assert isinstance(changed, ast.Module)
    code: CodeType = compile(ast.fix_missing_locations(changed), str(path), "exec")
    return code


# ---------------------------------------------------------------------------------------------------------------------
# The same mutation in two trees
# ---------------------------------------------------------------------------------------------------------------------


def sources(tree: Path) -> dict[tuple[str, str], list[str]]:
    """Return the lines of each function, without docstrings, by path and name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((tree / "worker" / package).rglob("*.py")):
            for name, function in functions(ast.parse(path.read_text("utf-8"))):
                body = function.body[1:] if ast.get_docstring(function) else function.body
                found[str(path.relative_to(tree)), name] = [
                    line for part in body for line in ast.unparse(part).split("\n")
                ]
    return found


def pairs(before: Path, after: Path) -> tuple[list[tuple[Place, Place]], list[Place]]:
    """Return the mutations that both trees can have, and those of functions that only the later one has."""
    old, new = sources(before), sources(after)
    by_name = defaultdict(list)
    for path, name in old:
        by_name[name.rpartition(".")[2]].append((path, name))
    same: dict[tuple[str, str], tuple[str, str]] = {}
    for there, lines in new.items():
        ratios = [
            (difflib.SequenceMatcher(None, old[here], lines).ratio(), here)
            for here in by_name[there[1].rpartition(".")[2]]
        ]
        if ratios and max(ratios)[0] >= SIMILAR:
            same[there] = max(ratios)[1]

    def keyed(found: list[Place]) -> dict[tuple[object, ...], Place]:
        seen: Counter[tuple[str, ...]] = Counter()
        keys: dict[tuple[object, ...], Place] = {}
        for place in found:
            key = (place.path, place.function, place.how, place.statement, place.before)
            seen[key] += 1
            keys[*key, seen[key]] = place
        return keys

    here = keyed(places(before))
    both, alone = [], []
    for (_, _, *rest), place in keyed(places(after)).items():
        if twin := same.get((place.path, place.function)):
            if (*twin, *rest) in here:
                both.append((here[*twin, *rest], place))
        else:
            alone.append(place)
    return both, alone


# ---------------------------------------------------------------------------------------------------------------------
# The process that judges the mutants of a tree
# ---------------------------------------------------------------------------------------------------------------------


class Judge:
    """A plugin of pytest that runs the collected tests once for coverage, and then those of each mutant in a child.

    What the first run has found is kept in `.cache/mutate.json`, for as long as no file of worker/ and tests/ changes.

    Requests, one JSON object in a line: path and number of a place, and its lines. Answers: the verdict.
    """

    def __init__(self, tree: Path, seconds: float, requests: IO[str], answers: IO[str]) -> None:
        self.tree, self.budget, self.requests, self.answers = tree, seconds, requests, answers

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Measure the tests, and answer requests up to the last."""
        self.session = session
        names = [item.nodeid for item in session.items]
        found = self._measured(names)
        self.seconds = found["seconds"]
        self.failing = set(found["failing"])
        self.tests = {path: {int(line): of for line, of in lines.items()} for path, lines in found["tests"].items()}
        failing = [names[number] for number in sorted(self.failing)]
        self._answer(tests=len(names), seconds=round(sum(self.seconds)), failing=failing)
        for line in self.requests:
            request = json.loads(line)
            self._answer(**self._judged(request["path"], request["number"], range(*request["lines"])))
        return True

    def _answer(self, **fields: object) -> None:
        print(json.dumps(fields), file=self.answers, flush=True)

    def _measured(self, names: list[str]) -> dict[str, Any]:
        """Return the tests' seconds, those that fail, and by path and line the tests that execute it; from a file."""
        files = sorted(path for folder in ("worker", "tests") for path in (self.tree / folder).rglob("*.py"))
        state = hashlib.sha256(repr(names).encode() + b"".join(path.read_bytes() for path in files)).hexdigest()
        kept = self.tree / ".cache" / "mutate.json"
        if kept.exists() and (found := json.loads(kept.read_text("utf-8")))["state"] == state:
            return dict(found)
        found = {"state": state, "seconds": [], "failing": [], "tests": {}}
        for part in self._in_child(self._measure, lambda _: 300.0):
            if "ended" in part:
                raise RuntimeError(f"the run without a mutant ended early: {part}")
            if "path" in part:
                found["tests"][part["path"]] = part["lines"]
            else:
                if part["failed"]:
                    found["failing"].append(len(found["seconds"]))
                found["seconds"].append(part["seconds"])
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(found), "utf-8")
        return found

    def _measure(self) -> Iterator[dict[str, Any]]:
        import coverage  # no dependency of the tests: only this run needs it

        observer = coverage.Coverage(
            data_file=None, config_file=False, include=[f"{self.tree}/worker/{package}/*" for package in PACKAGES]
        )
        observer.start()
        for number in range(len(self.session.items)):
            observer.switch_context(str(number))
            began = time.monotonic()
            failed = self._failed(number)
            yield {"seconds": time.monotonic() - began, "failed": failed}
        observer.stop()
        data = observer.get_data()
        for path in data.measured_files():
            lines = data.contexts_by_lineno(path).items()
            by_line = {str(line): [int(context) for context in contexts if context] for line, contexts in lines}
            yield {"path": str(Path(path).relative_to(self.tree)), "lines": by_line}

    def _failed(self, number: int) -> bool:
        before = self.session.testsfailed
        item = self.session.items[number]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)  # no fixture stays for a test out of order
        return self.session.testsfailed > before

    def _judged(self, path: str, number: int, lines: range) -> dict[str, Any]:
        executed = self.tests.get(path, {})
        tests = {test for line in lines for test in executed.get(line, ())} - self.failing
        order = sorted(tests, key=lambda test: self.seconds[test])
        total = itertools.accumulate(self.seconds[test] for test in order)
        order = [test for test, so_far in zip(order, total, strict=True) if so_far <= self.budget]

        def run(chosen: list[int], patched: bool) -> Iterator[dict[str, Any]]:
            if patched:
                try:
                    self._patch(path, number)
                except (ValueError, LookupError) as error:  # a closure that lost a variable, code that runs at import
                    yield {"ended": f"not applied: {error}"}
            for test in chosen:
                yield {"failed": self._failed(test)}

        def limit(at: int) -> float:
            undisturbed: float = self.seconds[order[min(at, len(order) - 1)]]
            return 20 + 10 * undisturbed

        at = 0
        while at < len(order):
            for found in self._in_child(lambda: run(order[at:], True), lambda count: limit(at + count)):  # noqa: B023
                if found.get("failed") or "ended" in found:
                    break
                at += 1
            else:
                break
            verdict = found.get("ended", "killed")
            if not verdict.startswith("killed"):
                return {"verdict": verdict}
            alone = self._in_child(lambda: run([order[at]], False), lambda _: limit(at))  # noqa: B023
            if not any(found.get("failed") or "ended" in found for found in list(alone)):
                name = self.session.items[order[at]].nodeid
                return {"verdict": f"{verdict} by {name} ({at + 1} of {len(order)} tests)", "killed": True}
            self.failing.add(order[at])  # it fails without the mutant, too
            at += 1
        return {"verdict": f"SURVIVED ({len(order)} of {len(tests)} tests)", "killed": False}

    def _patch(self, path: str, number: int) -> None:
        """Give each function of the module its code in the mutant, whoever holds the function."""
        importlib.import_module(path.removesuffix(".py").replace("/", "."))
        file = self.tree / path
        new: dict[tuple[str, int], CodeType] = {}
        waiting = [mutant(file, number)]
        while waiting:
            code = waiting.pop()
            new[code.co_qualname, code.co_firstlineno] = code
            waiting += [part for part in code.co_consts if isinstance(part, CodeType)]
        patched = 0
        for function in gc.get_objects():
            if isinstance(function, FunctionType) and function.__code__.co_filename == str(file):
                old = function.__code__
                code = new.get((old.co_qualname, old.co_firstlineno), old)
                if code != old:
                    function.__code__ = code
                    patched += 1
        if not patched:
            raise LookupError("no function has other code")

    def _in_child(
        self, work: Callable[[], Iterator[dict[str, Any]]], limit: Callable[[int], float]
    ) -> Iterator[dict[str, Any]]:
        """Yield what the work yields in a child, `{"ended": why}` where it breaks off; the n-th within limit(n) s."""
        reader, writer = multiprocessing.Pipe(duplex=False)
        child = os.fork()
        if not child:
            try:
                os.setsid()  # so that what its tests start can be ended with it
                for found in work():
                    writer.send(found)
                writer.send(None)
            except BaseException as error:  # a test's KeyboardInterrupt, too: no child returns from here
                writer.send({"ended": f"killed ({error!r})"})
            finally:
                os._exit(0)
        writer.close()
        try:
            for count in itertools.count():
                if not reader.poll(limit(count)):
                    yield {"ended": "killed (it does not end)"}
                    return
                found = reader.recv()
                if found is None:
                    return
                yield found
        except EOFError:
            yield {"ended": "killed (the process died)"}
        finally:
            reader.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)


def serve(tree: Path, seconds: float, tests: list[str]) -> int:
    """Judge mutants of a tree, as requests on standard input ask for them; what the tests write goes to stderr."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.path[0] = str(tree)
    return pytest.main(
        ["-q", "-s", "--seed", "1", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(tree), *tests],
        plugins=[Judge(tree, seconds, requests, answers)],
    )


class Tree:
    """A tree, and the process that judges its mutants."""

    def __init__(self, path: Path, options: argparse.Namespace, log: IO[str]) -> None:
        # PYTHONPATH: so that processes that tests start have this tree's worker, whichever one is installed.
        environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONHASHSEED": "0"}
        command = [sys.executable, __file__, "--serve", str(path), "--seconds", str(options.seconds), "--tests"]
        self._path = path
        self._process = subprocess.Popen(
            [*command, *options.tests], cwd=path, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip

    def ready(self) -> None:
        """Wait until its tests are measured."""
        print(f"{self._path}: {self._answer()}", flush=True)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise SystemExit("a tree's tests could not be run; its standard error says why (--log FILE)")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def judge(self, place: Place) -> dict[str, Any]:
        """Return the verdict on a mutation, and whether it was killed (absent if it could not be made)."""
        assert self._process.stdin
        request = {"path": place.path, "number": place.number, "lines": [place.lines[0], place.lines[1] + 1]}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def main() -> int:
    """Run from the command line; exit code 0 whatever survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.runs.mutate", description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many, however many are judged")
    parser.add_argument("--at", metavar="PATH:LINE", action="append", default=[], help="all mutations of this line")
    parser.add_argument("--before", type=Path, metavar="TREE", help="a worktree of the commit to compare with")
    parser.add_argument("--others", type=int, default=0, help="with --before: so many of functions that are only here")
    parser.add_argument("--tests", nargs="+", default=["tests/unit"], help="the tests that judge")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="judge by the fastest tests that take so long together"
    )
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="what the tests write")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.seconds, options.tests)
    if importlib.util.find_spec("coverage") is None:
        parser.error("coverage.py is not installed: run .venv/bin/uv pip install coverage")
    began, rng = time.monotonic(), random.Random(options.seed)
    both: list[tuple[Place, Place]] = []
    if options.before:
        options.before = options.before.resolve()
        both, alone = pairs(options.before, ROOT)
        print(f"{len(both)} places in both trees, {len(alone)} only here", end="")
        both = rng.sample(both, min(options.count, len(both)))
        alone = rng.sample(alone, min(options.others, len(alone)))
    elif options.at:
        alone = [place for place in places(ROOT) if f"{place.path}:{place.lines[0]}" in options.at]
        print(f"{len(alone)} places", end="")
    else:
        alone = places(ROOT)
        print(f"{len(alone)} places", end="")
        alone = rng.sample(alone, min(options.count, len(alone)))
    print(f", seed {options.seed}", flush=True)
    tally: Counter[str] = Counter()
    with options.log.open("a", encoding="utf-8") as log:
        here = Tree(ROOT, options, log)
        there = Tree(options.before, options, log) if options.before else None
        for tree in filter(None, (here, there)):
            tree.ready()
        jobs: list[tuple[Place | None, Place]] = [*both, *((None, place) for place in alone)]
        for old, place in jobs:
            if time.monotonic() - began > options.minutes * 60:
                break
            new_verdict = here.judge(place)
            print(f"{place}: {new_verdict['verdict']}", flush=True)
            if there and old:
                old_verdict = there.judge(old)
                print(f"    before, {old.path}:{old.lines[0]}: {old_verdict['verdict']}", flush=True)
                if "killed" in new_verdict and "killed" in old_verdict:
                    words = {True: "killed", False: "survived"}
                    tally[f"{words[old_verdict['killed']]} before, {words[new_verdict['killed']]} here"] += 1
                    if old_verdict["killed"] and not new_verdict["killed"]:
                        print("    LOST", flush=True)
            elif "killed" in new_verdict:
                tally["killed" if new_verdict["killed"] else "survived"] += 1
        for tree in filter(None, (here, there)):
            tree.close()
    print(f"{dict(sorted(tally.items()))} in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
