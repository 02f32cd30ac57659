"""The folders of worker/ say who may import what, and each library has one home."""

import ast
import functools
import pkgutil
import sys
from collections.abc import Iterator

import aiokafka
import pytest

from tests.conftest import TIERS
from tests.support.imports import MODEL_RUNTIMES, loaded_after, modules_after
from tests.support.surroundings import ROOT
from worker.cli import COMMANDS

pytestmark = pytest.mark.slow  # `make check` runs it

PACKAGE = ROOT / "worker"
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
"""Module below worker/, such as `core.trace`, and its file. `__init__` is the package worker itself."""


@functools.cache
def source(module: str) -> ast.Module:
    """Return a module's syntax tree. At import, each process of xdist would parse them all."""
    return ast.parse(MODULES[module].read_text("utf-8"))


ROOMS = {
    # room: the rooms and modules it may import besides its own; everything may import `version`
    "core": set[str](),
    "redact": {"core"},
    "runs": {"core"},
    "config": {"core", "redact"},
    "embed": {"config", "core"},
    "kafka": {"config", "core"},
    "observe": {"config", "core"},
    "stream": {"config", "core", "embed", "kafka", "observe"},
    "contribute": {"config", "core", "kafka", "observe", "redact"},
    "assemble": {"config", "core", "kafka", "observe", "runs"},
    "commands": {"assemble", "config", "contribute", "core", "embed", "kafka", "observe", "redact", "runs", "stream"},
    "lab": {"commands", "config", "core", "embed", "kafka", "observe"},
    "cli": {"commands", "core", "lab", "observe"},  # lab by the names of its table alone
    "__main__": {"cli"},
    "__init__": {"core", "redact"},
    "version": set[str](),
}

HOMES = (
    {
        # library: the rooms (or modules) that may import it
        "aiokafka": {"assemble", "kafka", "stream", "commands", "contribute", "lab"},
        "faust": {"stream.faust_consumer"},
        "mode": {"stream.faust_consumer"},
        "cramjam": {"kafka.record_batch"},
        "simsimd": {"core.scan"},
        "re2": {"redact.markers", "redact.strict"},
        "aiohttp": {
            "observe.http_server",
            "contribute.registry",
            "embed.http_embedder",
        },
        "yarl": {"contribute.registry", "embed.http_embedder"},
        "prometheus_client": {"observe", "commands.run", "lab.demo.show", "commands.doctor.examine"},
        "pydantic": {"config"},
        "click": {"cli", "commands", "lab"},
        "rich": {"commands", "lab"},
        "jinja2": {"commands.report.view"},
        "opentelemetry": {"observe.tracing", "stream.evaluator", "runs.otlp.spans"},  # stream: the type alone
        "google": {"runs.otlp.spans"},  # protobuf
    }
    | {library: {"embed"} for library in sorted(MODEL_RUNTIMES)}
    | {"huggingface_hub": {"commands.model", "embed"}}
)

PRIVATE = {"kafka.aiokafka_private"}
"""The only module that touches private names of aiokafka; unit/kafka/test_aiokafka_private.py guards each one."""

AIOKAFKA_PUBLIC = {
    # what aiokafka documents; `aiokafka` itself, too
    "aiokafka.abc", "aiokafka.admin", "aiokafka.admin.config_resource", "aiokafka.errors", "aiokafka.structs",
}  # fmt: skip

AIOKAFKA_MODULES = {module.name for module in pkgutil.walk_packages(aiokafka.__path__, "aiokafka.")}

AIOKAFKA_INTERNAL = {
    # a module that aiokafka does not document: the modules that may import names without an underscore from it
    "aiokafka.codec": {"kafka.topics"},  # which codecs it can read
    "aiokafka.coordinator.assignors.sticky": {"stream.faust_consumer"},  # an argument of its consumer
    "aiokafka.partitioner": {"kafka.rows"},  # the partition of a key, as all clients choose it
    "aiokafka.protocol": {  # requests that no method of its clients sends
        "kafka.connections", "kafka.describe", "kafka.protocol",
    },
}  # fmt: skip

OF_OTHERS = {
    # (module, attribute): underscores that are not aiokafka's
    ("*", "_asdict"),  # named tuples
    ("*", "_make"),
    ("*", "_replace"),
    ("commands.doctor", "_exit"),  # os
    ("commands.run", "_exit"),  # os
    ("stream.faust_consumer", "_stopped"),  # Faust's fetcher
}

NOT_IN_THE_CORE = {
    # clocks, chance, the environment, logging, input and output, and whatever runs beside the caller
    "asyncio", "concurrent", "http", "io", "logging", "multiprocessing", "os", "pathlib", "random", "secrets", "select",
    "shutil", "signal", "socket", "sqlite3", "subprocess", "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip
CLOCK_READERS = {"now", "utcnow", "today", "time", "time_ns", "monotonic", "perf_counter"}

CORE = sorted(module for module in MODULES if module.startswith("core."))

PURE = [*CORE, *sorted(module for module in MODULES if module.startswith(("redact.", "runs.")))]
"""Modules that take values and return values: `runs/` may parse OTLP besides."""


def imports(node: ast.AST) -> Iterator[str]:
    """Yield the full name of every imported module, also of those inside functions and type-checking blocks."""
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            yield from (alias.name for alias in part.names)
        elif isinstance(part, ast.ImportFrom):
            assert part.level == 0, "imports are absolute"
            assert part.module is not None
            yield part.module
            yield from (f"{part.module}.{alias.name}" for alias in part.names)


@functools.cache
def imported(module: str) -> frozenset[str]:
    """Return what a module of worker/ imports."""
    return frozenset(imports(source(module)))


@functools.cache
def packages(module: str) -> frozenset[str]:
    """Return the top-level packages that a module of worker/ imports."""
    return frozenset(name.split(".")[0] for name in imported(module))


def siblings(module: str) -> set[str]:
    """Return the modules of worker/ that a module of worker/ imports."""
    return {name.removeprefix("worker.") for name in imported(module)} & MODULES.keys()


def room(module: str) -> str:
    return module.partition(".")[0]


def test_every_room_has_a_row() -> None:
    assert {room(module) for module in MODULES} == ROOMS.keys()


def test_a_room_imports_what_its_row_names() -> None:
    for module in sorted(MODULES):
        allowed = ROOMS[room(module)] | {room(module), "version"}
        wrong = {other for other in siblings(module) if room(other) not in allowed}
        assert not wrong, f"worker/{module.replace('.', '/')}.py imports {sorted(wrong)}: see ROOMS"


def test_each_library_has_its_home() -> None:
    for library, homes in HOMES.items():
        users = {module for module in MODULES if library in packages(module)}
        homeless = {module for module in users if not {module, room(module)} & homes}
        assert not homeless, f"{library} is imported by {sorted(homeless)}: see HOMES"
        assert users or library in MODEL_RUNTIMES, f"nobody imports {library}: take it out of the table"


def underscores(tree: ast.AST) -> Iterator[str]:
    """Yield the private attributes of anything but `self`, `cls` and `super()`: x._name, f()._name, self.x._name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value
            mine = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
            mine |= isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"
            if not mine:
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and str(name.value).startswith("_"):
                yield str(name.value)


def test_private_names_of_aiokafka_are_used_in_one_place() -> None:
    for module in sorted(MODULES.keys() - PRIVATE):
        allowed = {name for where, name in OF_OTHERS if where in ("*", module)}
        wrong = set(underscores(source(module))) - allowed
        assert not wrong, f"worker/{module.replace('.', '/')}.py uses {sorted(wrong)}: see kafka/aiokafka_private.py"
        for name in imported(module) & AIOKAFKA_MODULES - AIOKAFKA_PUBLIC:
            homes = [users for internal, users in AIOKAFKA_INTERNAL.items() if f"{name}.".startswith(f"{internal}.")]
            assert any(module in users for users in homes), f"{module} imports {name}: see AIOKAFKA_INTERNAL"
        assert not [name for name in imported(module) if name.startswith("aiokafka.") and "._" in name], module


def test_no_row_of_the_tables_is_left_over() -> None:
    used = {(module, name) for module in MODULES for name in underscores(source(module))}
    for where, name in OF_OTHERS:
        assert any(name == other and where in ("*", module) for module, other in used), (where, name)
    for internal, modules in AIOKAFKA_INTERNAL.items():
        for module in modules:
            assert any(f"{name}.".startswith(f"{internal}.") for name in imported(module)), (internal, module)


def test_the_core_imports_the_standard_library_numpy_and_msgspec() -> None:
    """And simsimd and re2, which only compute: see HOMES."""
    for module in PURE:
        foreign = packages(module) - set(sys.stdlib_module_names) - {"numpy", "msgspec", "simsimd", "re2", "worker"}
        foreign -= {"google", "opentelemetry"} if module == "runs.otlp.spans" else set()
        assert not foreign, module
        assert not packages(module) & NOT_IN_THE_CORE, module


def test_the_core_reads_no_clock_and_no_file() -> None:
    for module, node in ((name, node) for name in PURE for node in ast.walk(source(name))):
        if isinstance(node, ast.Attribute):
            readers = CLOCK_READERS - ({"time_ns"} if module.startswith("runs.") else set())  # of an event: a field
            assert node.attr not in readers, f"{module}, line {node.lineno}"
            assert node.attr not in {"environ", "getenv"}, f"{module}, line {node.lineno}"
            assert not (isinstance(node.value, ast.Name) and (node.value.id, node.attr) == ("np", "random")), module
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            forbidden = {"open", "print", "input", "exec", "eval"}
            assert node.func.id not in forbidden, f"{module}, line {node.lineno}"


def test_settings_are_read_from_the_environment_in_one_place() -> None:
    readers = {
        module
        for module in MODULES
        for node in ast.walk(source(module))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    }
    # cli: OPENBLAS_NUM_THREADS; openvino_embedder: the user's cache directory; tracing: OpenTelemetry's own variables.
    # The others start processes.
    assert readers <= {
        "config.loading", "cli", "embed.openvino_embedder", "observe.tracing",
        "lab.demo.show", "commands.model", "lab.broker.kafka_node", "lab.broker.kafka_jars",
    }  # fmt: skip


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
    loaded = loaded_after(f"import {', '.join(f'worker.{module}' for module in CORE)}")
    assert not loaded & HOMES.keys()


HEAVY = {"aiohttp", "aiokafka", "faust", "numpy", "prometheus_client", "pydantic", "rich", *MODEL_RUNTIMES}
"""What takes longer to import than all the rest of `--help`."""

HELP = "from worker import cli; cli.cli(['--help'], standalone_mode=False)"
COMPLETION = (
    "import os\n"
    "os.environ |= {'_KP_WORKER_COMPLETE': 'bash_complete', 'COMP_WORDS': 'kp-worker r', 'COMP_CWORD': '1'}\n"
    "from worker import cli\ntry: cli.main()\nexcept SystemExit: pass"
)


@pytest.mark.parametrize("code", ["import worker, worker.cli", HELP, COMPLETION], ids=["import", "help", "completion"])
def test_the_command_line_starts_without_its_commands(code: str) -> None:
    """Nor numpy: `main` sets the number of BLAS threads, which numpy reads once, when it is imported."""
    loaded = modules_after(code)
    assert not {name.split(".")[0] for name in loaded} & {*HEAVY, "msgspec"}
    assert not {name for name in loaded if name.startswith("worker.lab")}
    assert not {place.partition(":")[0] for place, _ in COMMANDS.values()} & loaded


def test_the_help_of_a_command_imports_nothing_heavy() -> None:
    """`run` and `contribute` import the settings, to list them, when their help is written."""
    places = {place.partition(":")[0] for place, _ in COMMANDS.values()}
    loaded = modules_after(f"import {', '.join(sorted(places))}")
    assert places <= loaded
    assert not {name.split(".")[0] for name in loaded} & HEAVY


def test_the_table_of_commands_names_rooms_of_its_row() -> None:
    assert {place.split(".")[1] for place, _ in COMMANDS.values()} <= ROOMS["cli"]


def test_a_command_imports_no_other_one() -> None:
    """What two of them need lies in commands/shared."""

    def command(module: str) -> str:
        return module.split(".")[1] if module.startswith("commands.") else ""

    crossing = {
        (module, other)
        for module in MODULES
        for other in siblings(module)
        if command(other) not in ("", "shared", command(module))
    }
    assert not crossing


def test_no_test_imports_another_one() -> None:
    """What tests share lies in tests/support. A test in no tier's folder would run in no tier."""
    tests = ROOT / "tests"
    for path in tests.rglob("*.py"):
        shared = [name for name in imports(ast.parse(path.read_text("utf-8"))) if ".test_" in name]
        assert not shared, f"{path.relative_to(ROOT)} imports {shared}: move what it needs to tests/support"
    assert {path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py")} == set(TIERS)


def test_a_worker_that_neither_redacts_nor_screens_loads_no_rules_of_either() -> None:
    """Nor do the settings, the metrics and the start checks, which know their names."""
    code = (
        "import worker.stream.worker\nfrom worker.config import load\n"
        "from worker.config.redaction_rules import evaluation_config, output_rules\n"
        "settings = load(redact=%r, screen=%r)\n"
        "for check in worker.stream.worker.START_CHECKS.values(): check(settings)\n"
        "evaluation_config(settings, output_rules(settings))"
    )

    def rules(redact: str, screen: str) -> set[str]:
        return {name for name in modules_after(code % (redact, screen)) if name.startswith("worker.redact")}

    assert rules("off", "off") == set()
    assert rules("off", "mark") == {"worker.redact", "worker.redact.screen"}
    assert "worker.redact.documents" in rules("accepted", "off")


def test_the_worker_starts_without_what_assemble_needs() -> None:
    loaded = modules_after("import worker.stream.worker")
    assert "worker.stream.worker" in loaded
    assert not {name for name in loaded if name.startswith(("google.protobuf", "worker.assemble", "worker.runs"))}
