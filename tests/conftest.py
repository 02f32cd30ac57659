"""Fixtures of all tests, the tiers, the seed of all that is random, and an environment without KP_ variables.

Builders of traces and records are plain functions, in tests/support/builders.py.
"""

import gc
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import kafka_versions, warm
from tests.support.kafka_fixtures import cluster, hashing, kafka, workers
from tests.support.stage import desk, stage
from worker.lab.broker import kafka_node
from worker.lab.broker.kafka_jars import KAFKA_VERSION

__all__ = ["cluster", "desk", "hashing", "kafka", "stage", "workers"]

TIERS = ("crash", "model", "kafka", "unit", "docs")
"""The folders, in the order in which their tests run, and the large files first: the longest must not begin last."""

# Hypothesis draws the same each time, without a memory of earlier runs; with --long it draws anew.
settings.register_profile(
    "test", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", settings.get_profile("test"), derandomize=False, max_examples=500)

WITH_TORCH = {f"tests/model/test_{name}.py" for name in ("fast_embedder", "long_texts", "model")}

ON_KAFKA = {"cluster", "hashing", "kafka", "workers"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="the seed of the random tests and of the samples [1; with --long: drawn]")
    parser.addoption("--long", action="store_true", help="all of what a run without it takes a sample of")
    parser.addoption(
        "--kafka", default=KAFKA_VERSION, help=f"the Kafka to run on: {', '.join(kafka_versions.versions())}"
    )


def pytest_configure(config: pytest.Config) -> None:
    try:
        config.option.kafka = kafka_versions.chosen(config.option.kafka)
    except ValueError as error:
        raise pytest.UsageError(f"--kafka: {error}") from None
    kafka_versions.use(config.option.kafka)
    if hasattr(config, "workerinput"):  # side by side, all processes have one seed
        config.option.seed = config.workerinput["seed"]
    elif config.option.seed is None:  # two runs of `make test` must do the same
        config.option.seed = random.SystemRandom().randrange(2**32) if config.option.long else 1
    settings.load_profile("long" if config.option.long else "test")
    if config.option.long:
        config.option.hypothesis_seed = str(config.option.seed)
    warm.enabled = not config.option.long
    if "PYTEST_XDIST_WORKER" in os.environ:  # side by side, none takes a port that another one is about to listen on
        mine, of = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        kafka_node.PORT_RANGE = kafka_node.PORT_RANGE[mine::of]
    # A job in the background of a shell has SIGINT ignored, and so would the commands whose Ctrl-C is tested.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the seed to a process of xdist."""
    node.workerinput["seed"] = node.config.option.seed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Twice as many as there are cores for `-n auto`: what waits for Kafka leaves its core to another test."""
    cores = len(os.sched_getaffinity(0))
    return 2 * cores if config.option.numprocesses == "auto" else cores


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadfile`: a file stays together, as its fixtures may be dear, but a crash test takes minutes.

    The files that import torch stay together, too: that takes 5 s of CPU.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/crash/"):
                return nodeid
            file = super()._split_scope(nodeid)
            return "torch" if file in WITH_TORCH else file

    return Scheduling(config, log) if config.option.dist == "loadfile" else None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what repeats the run; -q would hide a header."""
    terminalreporter.line(f"Apache Kafka {config.option.kafka}; --seed {config.option.seed}")


def tier(path: Path) -> str:
    """Return the folder below tests/ that says what a test needs; "" for the runs of their own make targets."""
    return next((parent.name for parent in path.parents if parent.name in TIERS and parent.parent.name == "tests"), "")


def left_out(config: pytest.Config, items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that only `--long` runs: those marked long, and of those marked sample(n) all but n by chance.

    n is of the cases of one test, or of all cases of a file that have the mark's second argument in common. Cases that
    the command line names always run.
    """
    if config.option.long or any("::" in argument for argument in config.args):
        return set()
    out = {item for item in items if item.get_closest_marker("long")}
    drawn: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if (mark := item.get_closest_marker("sample")) and item not in out:
            count, *of = mark.args
            test = "::".join([item.nodeid.partition("::")[0], *of]) if of else item.nodeid.partition("[")[0]
            drawn.setdefault((test, count), []).append(item)
    for (test, count), cases in drawn.items():
        rng = random.Random(f"{config.option.seed} {test}")
        out |= set(rng.sample(cases, max(0, len(cases) - count)))
    return out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    out = left_out(config, items)
    if out:
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]
    for item in items:
        folder = tier(item.path)
        if folder in ("crash", "kafka") or ON_KAFKA & fixtures(item):
            item.add_marker("kafka")
        if folder in ("crash", "model"):
            item.add_marker(folder)
        for mark in item.iter_markers("since_kafka"):
            version, reason = mark.args
            item.add_marker(pytest.mark.skipif(not kafka_versions.since(version), reason=f"Kafka {version}: {reason}"))
    sizes = {path: path.stat().st_size for path in {item.path for item in items}}
    items.sort(key=lambda item: (TIERS.index(tier(item.path) or TIERS[-1]), -sizes[item.path], item.path))


def pytest_collection_finish() -> None:
    """Keep what is there by now out of garbage collections: thousands of tests with their modules."""
    gc.collect()
    gc.freeze()


def fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail before a broker starts."""
    dear = ON_KAFKA & fixtures(item)
    if dear and tier(item.path) in ("unit", "docs"):
        pytest.fail(
            f"tests/{tier(item.path)} runs without Kafka, and this test asks for {', '.join(sorted(dear))}: "
            "move it to tests/kafka",
            pytrace=False,
        )


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of the run; pytest shows the line printed here when the test fails."""
    chosen: int = request.config.getoption("--seed")
    print(f"repeat with --seed {chosen}")
    return chosen


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether the test shall take all its rounds, steps or records (`make test-long`), and not a sample of them."""
    chosen: bool = request.config.getoption("--long")
    return chosen


@pytest.fixture(autouse=True)
def _no_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("KP_"):
            monkeypatch.delenv(name)
