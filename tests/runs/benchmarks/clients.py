"""b) The same job without a model against other Kafka clients, c) the same with the model: throughput, CPU, latency."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from tests.runs.benchmarks.bench import PRODUCT, STAND_IN, Bench, PeerProcess, Timeline, wait_ready_or_ended
from tests.runs.benchmarks.job import table_embed
from tests.runs.benchmarks.results import installed
from tests.runs.benchmarks.workload import (
    PARTITIONS,
    Outputs,
    Source,
    Topics,
    check,
    check_count,
    documents,
    expected,
    fill,
)
from tests.support.kafka_fixtures import WorkerProcess

AT_LEAST: Final = "at least once"
EXACTLY: Final = "exactly once"
STEP: Final = 5000
"""Counts are multiples of it, for quix's checkpoints (see peers/quix.py)."""

LATENCY_RATE: Final = 200.0


@dataclass(frozen=True)
class Contender:
    """One row of the comparison: a peer, or the worker, in one mode."""

    name: str
    mode: str
    peer: str | None = None
    vectors: str = "table"
    needs: tuple[str, ...] = ()
    slow: bool = False
    options: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    module: str = STAND_IN

    def __str__(self) -> str:
        return f"{self.name}, {self.mode}"

    @contextmanager
    def run(self, bench: Bench, topics: Topics) -> Iterator[PeerProcess | WorkerProcess]:
        if self.peer is None:
            settings = {"KP_DELIVERY": self.mode.replace(" ", "_"), **self.settings}
            with bench.worker(topics, settings, self.module) as process:
                yield process
        else:
            mode = ("--exactly-once",) if self.mode == EXACTLY else ()
            options = (f"--vectors={self.vectors}", *mode, *self.options)
            with bench.peer(self.peer, topics, *options) as process:
                yield process


def _worker(name: str, mode: str, vectors: str) -> Contender:
    none = {"KP_EMBEDDER": "none"} if vectors == "none" else {}
    settings = {"BENCH_VECTORS": vectors, "KP_EMBED_REMEMBERED": "0", **none}
    return Contender(name, mode, vectors="none" if none else "table", settings=settings)


QUIX: Final = ("quixstreams",)
CONFLUENT: Final = ("confluent-kafka",)
CONTENDERS: Final = (
    # What is compared runs side by side: the machine's speed drifts within minutes. With vectors given: parse, scan of
    # the cache, score, output, changelog entry. Without: novelty is 0.5, no scan, no changelog entry.
    Contender("quix-streams", EXACTLY, "quix", needs=QUIX, options=("--commit-interval=0",)),
    _worker("worker, vectors inline", EXACTLY, "inline"),
    Contender("aiokafka loop", EXACTLY, "aiokafka_loop"),
    _worker("worker, no vectors", EXACTLY, "none"),
    Contender("aiokafka loop, no vectors", EXACTLY, "aiokafka_loop", "none"),
    Contender("confluent-kafka loop", EXACTLY, "confluent_loop", needs=CONFLUENT),
    _worker("worker, vectors by its pool", EXACTLY, "pool"),
    Contender("quix-streams", AT_LEAST, "quix", needs=QUIX, options=("--commit-interval=0",)),
    _worker("worker, vectors inline", AT_LEAST, "inline"),
    Contender("aiokafka loop", AT_LEAST, "aiokafka_loop"),
    _worker("worker, no vectors", AT_LEAST, "none"),
    Contender("aiokafka loop, no vectors", AT_LEAST, "aiokafka_loop", "none"),
    Contender("confluent-kafka loop", AT_LEAST, "confluent_loop", needs=CONFLUENT),
    _worker("worker, vectors by its pool", AT_LEAST, "pool"),
    Contender("Faust as usually written", AT_LEAST, "faust_agent", slow=True),
)


def available(bench: Bench, part: str, contenders: tuple[Contender, ...]) -> list[Contender]:
    """Leave out what is not installed, and say so."""
    for contender in contenders:
        if not installed(*contender.needs):
            missing = ", ".join(contender.needs)
            bench.results.note(part, f"{contender.name}: skipped, {missing} is not installed (pip install '.[bench]')")
    return [contender for contender in contenders if installed(*contender.needs)]


def throughput(bench: Bench, contender: Contender, source: Source, wanted: Outputs) -> None:
    """Let a contender work off a filled topic; keep its messages a second."""
    topics = bench.topics(source)
    with contender.run(bench, topics) as process:
        timeline = bench.follow(topics, len(source.values), [process])
    outputs = bench.outputs(topics)
    check(str(contender), outputs, wanted)
    _keep(bench, "b", contender, outputs, timeline, len(source.values))


def warm_throughput(bench: Bench, contender: Contender, values: Sequence[bytes]) -> None:
    """Let a contender work off values that arrive when it is warm; the first MODEL_WARM_UP of them do not count."""
    topics, counted = bench.topics(), values[MODEL_WARM_UP:]
    with contender.run(bench, topics) as process:
        bench.work_off(topics, process, values[:MODEL_WARM_UP])
        began, timeline = bench.work_off(topics, process, counted, MODEL_WARM_UP)
    outputs = bench.outputs(topics, began)
    check_count(str(contender), outputs, len(counted))
    _keep(bench, "c", contender, outputs, timeline, len(counted))


def _keep(bench: Bench, part: str, contender: Contender, outputs: Outputs, timeline: Timeline, count: int) -> None:
    end = timeline[-1].at if contender.mode == EXACTLY else outputs.last
    cpu, broker = timeline.cpu_between(outputs.first, end)
    seconds = end - outputs.first
    bench.results.add(
        part,
        str(contender),
        messages_s=(count - 1) / seconds,  # the clock starts when the first one is out
        CPU_us_a_message=cpu / count * 1e6,
        broker_us_a_message=broker / count * 1e6,
        seconds=seconds,
    )


def run_without_model(bench: Bench) -> None:
    count = max(1, round(bench.seconds * 8000 / STEP)) * STEP
    slow = max(1, count // (5 * STEP)) * STEP
    sources = {n: asyncio.run(fill(bench.bootstrap, documents(n))) for n in {count, slow}}
    wanted = {
        (n, vectors): expected(source, table_embed if vectors == "table" else None)
        for n, source in sources.items()
        for vectors in ("table", "none")
    }
    contenders = available(bench, "b", CONTENDERS)
    warm_up(bench, sources[slow])
    for turn in bench.each_round():
        for contender in rotated(contenders, turn):
            n = slow if contender.slow else count
            throughput(bench, contender, sources[n], wanted[n, contender.vectors])
    for _ in range(bench.rounds):
        _latency_rows(bench)
    _goals_b(bench)


def warm_up(bench: Bench, source: Source) -> None:
    """Let the broker's JVM compile what the runs will need: the first one would pay for all."""
    for mode in (AT_LEAST, EXACTLY):
        topics = bench.topics(source)
        with Contender("warm-up", mode, "aiokafka_loop").run(bench, topics) as process:
            bench.follow(topics, len(source.values), [process])
        bench.outputs(topics)


def rotated(contenders: list[Contender], turn: int) -> list[Contender]:
    """Return the rows beginning with another mode in each round; those of one mode stay side by side."""
    begins = [i for i, row in enumerate(contenders) if i == 0 or row.mode != contenders[i - 1].mode]
    shift = begins[turn % len(begins)]
    return contenders[shift:] + contenders[:shift]


LATENCY_CONTENDERS: Final = (
    _worker("worker, vectors by its pool", EXACTLY, "pool"),
    Contender("aiokafka loop", EXACTLY, "aiokafka_loop"),
    Contender("quix-streams", EXACTLY, "quix", needs=QUIX),
    Contender("quix-streams, commit_interval 0.1 s", EXACTLY, "quix", needs=QUIX, options=("--commit-interval=0.1",)),
)


def _latency_rows(bench: Bench) -> None:
    """Measure end to end at 200 messages a second, exactly once; quix with its defaults, and tuned."""
    count = max(100, round(LATENCY_RATE * bench.seconds))
    for contender in available(bench, "b", LATENCY_CONTENDERS):
        topics = bench.topics(stamped=False)
        with contender.run(bench, topics) as process:
            bench.work_off(topics, process, documents(PARTITIONS))
            latencies = bench.latencies(topics, documents(count), LATENCY_RATE, 30)
        bench.outputs(topics)
        row = f"{contender}, end to end at 200/s"
        bench.results.add("b", row, p50_ms=latencies.percentile(50), p99_ms=latencies.percentile(99))


def _goals_b(bench: Bench) -> None:
    r = bench.results
    for mode in (AT_LEAST, EXACTLY):
        mine = f"worker, vectors inline, {mode}"
        loop = r.ratio("b", "messages_s", mine, f"aiokafka loop, {mode}")
        r.goal("b", f"worker, vectors inline / aiokafka loop, {mode}, messages/s", loop, 0.85, "min")
        cpu = r.ratio("b", "CPU_us_a_message", mine, f"quix-streams, {mode}")
        r.goal("b", f"worker, vectors inline / quix-streams, {mode}, CPU a message", cpu, 1.2, "max")
    rows = (f"{name}, {EXACTLY}, end to end at 200/s" for name in ("worker, vectors by its pool", "quix-streams"))
    p50 = r.ratio("b", "p50_ms", *rows)
    r.goal("b", "worker / quix-streams, exactly once, end-to-end p50 at 200/s", p50, 0.1, "max")


MODEL_SETTINGS: Final = {"KP_EMBED_REMEMBERED": "0"}
"""The data repeats some texts; a remembered one would be counted as an embedded one."""


def _precision(precision: str) -> Contender:
    settings = {**MODEL_SETTINGS, "KP_PRECISION": precision}
    return Contender(f"worker, {precision}", EXACTLY, settings=settings, module=PRODUCT)


MODEL_CONTENDERS: Final = (
    _precision("fp32"),
    Contender("aiokafka loop with encode()", AT_LEAST, "aiokafka_loop", "model", needs=("sentence-transformers",)),
    Contender("quix-streams with encode()", AT_LEAST, "quix", "model", needs=("quixstreams", "sentence-transformers")),
)
MODEL_WARM_UP: Final = 200
"""Messages before them that do not count."""


def offered_precisions(bench: Bench, part: str) -> list[str]:
    """Return bf16 if a worker starts with it here; otherwise say why it is not measured."""
    with bench.worker(bench.topics(), {"KP_PRECISION": "bf16"}) as process:
        wait_ready_or_ended(process)
        if process.returncode is None:
            return ["bf16"]
        bench.results.note(part, f"worker, bf16: not measured: {process.log().strip().rpartition(chr(10))[2]}")
        return []


def run_with_model(bench: Bench) -> None:
    count = max(40, round(bench.seconds * 50))
    values = documents(count + MODEL_WARM_UP, broken=False)
    random.Random(1).shuffle(values)  # as many lengths in the part that does not count as in the other
    precisions = offered_precisions(bench, "c")
    contenders = [*available(bench, "c", MODEL_CONTENDERS), *(_precision(p) for p in precisions)]
    for _ in bench.each_round():
        for contender in contenders:
            warm_throughput(bench, contender, values)
    loop, quix = "aiokafka loop with encode()", "quix-streams with encode()"
    faster = ((f"worker, {precision}", loop, 3.0) for precision in precisions)
    for row, peer, limit in (("worker, fp32", loop, 1.2), ("worker, fp32", quix, 1.2), *faster):
        ratios = bench.results.ratio("c", "messages_s", f"{row}, {EXACTLY}", f"{peer}, {AT_LEAST}")
        bench.results.goal("c", f"{row} (exactly once) / {peer}, messages/s", ratios, limit, "min")
