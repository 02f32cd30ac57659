"""The page of a report and the command around it, as a reader gets them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.builders import DATA, T0, read_jsonl
from tests.support.kafka_fixtures import create_topics, produce, unique
from tests.support.reports import dump, parsed, random_documents, run, scored_document, summary_of, words
from worker.config import Settings
from worker.embedded_kafka import EmbeddedKafka
from worker.report import EmptyReport, Traces, summarize
from worker.report_kafka import read_outputs
from worker.report_page import duration, percent, render

ROOT = Path(__file__).parents[2]
HOSTILE = "<script>alert('x')</script>\"]]>&amp;{{ 7*7 }}$\\frac$ \u202egnp\u0000\u0007"


def test_random_pages_are_well_formed_and_equal_for_equal_input(seed: int) -> None:
    documents = random_documents(random.Random(seed), 50)
    page = render(summary_of(documents), "x.jsonl")
    parsed(page)
    assert render(summary_of(documents[::-1]), "x.jsonl") == page
    ids = re.findall(r' id="(?!p[0-9a-f]{10}|m[0-9a-f]{10}|C)([^"]*)"', page)
    assert len(ids) == len(set(ids))


def test_the_page_loads_nothing() -> None:
    page = render(summary_of(random_documents(random.Random(1), 30)), "x.jsonl")
    root = parsed(page)
    assert not list(root.iter("script"))
    loading = [
        value for element in root.iter() for name, value in element.attrib.items()
        if name.split("}")[-1] in ("src", "href", "data", "action") and not value.startswith("#")
    ]  # fmt: skip
    assert not loading
    assert "url(http" not in page
    assert "@import" not in page


@pytest.mark.parametrize("hide_texts", [False, True])
def test_all_texts_are_escaped(hide_texts: bool) -> None:
    documents = [
        scored_document(
            n,
            trace_id=f"kp:trace:{n}{HOSTILE}",
            domain=f"{HOSTILE}{n % 2}",
            objective=HOSTILE,
            overrides=(HOSTILE,),
            nearest=(f"kp:trace:0{HOSTILE}", 0.95),
            latencies=(5.0,),
        )
        for n in range(4)
    ]
    for document in documents:
        document["scoring"] |= {"profile": HOSTILE, "worker_version": HOSTILE}
    traces = Traces(hide_texts=hide_texts)
    for document in documents:
        traces.add(dump(document), HOSTILE)
    traces.add(b"{", HOSTILE)
    page = render(summarize(traces), HOSTILE)
    assert not list(parsed(page).iter("script"))
    assert not set("\u202e\0\a") & set(page)
    assert HOSTILE[: HOSTILE.index("\u202e")].strip() in words(page)


def test_hidden_texts_are_not_in_the_page() -> None:
    line = dump(scored_document(objective="sell the harbour", nearest=("kp:trace:0", 0.99)))
    other = dump(scored_document(1, objective="sell the harbour", nearest=("kp:trace:0", 0.99)))
    shown, hidden = (
        run("-", "-o", "-", *option, data=line + b"\n" + other).stdout for option in ([], ["--hide-texts"])
    )
    assert "sell the harbour" in shown
    assert "harbour" not in hidden
    assert "objective hidden" in hidden


def test_one_trace_without_neighbour_or_latency_makes_a_page() -> None:
    text = words(render(summary_of([scored_document(nearest=None)]), "x"))
    assert "says nothing" in text
    assert "Slowest agents" not in text
    assert text.startswith("kp-worker report: 1 trace ")


def test_numbers_are_written_so_that_they_do_not_lie() -> None:
    assert [percent(value) for value in (0, 0.0004, 0.0123, 0.9996, 1)] == ["0%", "<0.1%", "1.2%", ">99.9%", "100%"]
    assert [duration(value) for value in (5, 1500, 90_000, 7_200_000, 864e6)] == [
        "5 ms", "1.5 s", "1.5 min", "2.0 h", "10 d",
    ]  # fmt: skip


# -- the command


def test_lines_that_cannot_be_read_are_left_out_and_named(tmp_path: Path) -> None:
    source, output = tmp_path / "scored.jsonl", tmp_path / "page.html"
    source.write_bytes(dump(scored_document()) + b"\n\n{broken\n")
    result = run(str(source), "-o", str(output))
    assert result.exit_code == 0, result.output
    assert "1 cannot be read" in result.stderr
    assert "line 3: JSON is malformed" in result.stderr
    text = words(output.read_text("utf-8"))
    assert "line 3: JSON is malformed" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("arguments", "data", "message"),
    [
        (["-"], b"", "no documents"),
        (["-"], b"{}\n", "none of 1 documents can be read"),
        ([], b"", "give a file of scored traces"),
        (["-", "--from-kafka"], b"", "give a file of scored traces"),
        (["-", "--last", "5"], b"", "go with --from-kafka"),
        (["--from-kafka", "--since", "yesterday"], b"", "yesterday"),
    ],
)
def test_wrong_input_is_a_clear_error(arguments: list[str], data: bytes, message: str, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    result = run(*arguments, "-o", str(output), data=data)
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert not output.exists()


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_the_extra_the_error_names_it(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv[1:] = ['report', '-']\n"
        "from worker.cli import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, input="", capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1
    assert result.stderr == f"Error: {package} is not installed: pip install 'kp-worker[report]'\n"


@pytest.mark.model
def test_the_shared_traces_from_file_to_page(tmp_path: Path) -> None:
    scored, output = tmp_path / "scored.jsonl", tmp_path / "report.html"
    source = tmp_path / "traces.jsonl"
    source.write_bytes(b"".join((DATA / "traces.jsonl").read_bytes().splitlines(keepends=True)[:300]))
    for command in (["score", str(source), "-o", str(scored)], ["report", str(scored), "-o", str(output)]):
        subprocess.run([sys.executable, "-W", "error::UserWarning:worker", "-m", "worker", *command], cwd=ROOT,
                       check=True, capture_output=True, timeout=200)  # fmt: skip
    documents = [json.loads(line) for line in scored.read_bytes().splitlines()]
    expected = [row["score"] for row in read_jsonl("traces_scores.jsonl")[:300]]
    text = words(output.read_text("utf-8"))
    accepted = sum(score >= 0.75 for score in expected)
    assert f"{accepted} accepted, {percent(accepted / 300)}" in text
    nearest = min(score for score in expected if score >= 0.75)
    assert f"{nearest:.3f}" in text
    for domain in {document["metadata"]["task_domain"] for document in documents}:
        assert domain in text


# -- the topics


@pytest.mark.kafka
def test_the_topics_are_read_committed_to_their_end(kafka: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted, rejected = unique("accepted"), unique("rejected")
    create_topics(kafka.bootstrap_servers, {accepted: 2, rejected: 2})
    for topic, score in ((accepted, 0.9), (rejected, 0.3)):
        records = [
            (None, dump(scored_document(n, score=score, time_ms=T0 + n * 1000)), [], n % 2, T0 + n * 1000)
            for n in range(40)
            if n % 4 == 0 or topic == rejected
        ]
        produce(kafka.bootstrap_servers, topic, records)
    asyncio.run(_abort(kafka.bootstrap_servers, accepted))
    monkeypatch.setenv("KP_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    monkeypatch.setenv("KP_ACCEPTED_TOPIC", accepted)
    monkeypatch.setenv("KP_REJECTED_TOPIC", rejected)

    result = run("--from-kafka", "-o", "-")
    assert result.exit_code == 0, result.output
    assert "50 traces: 10 accepted, 40 rejected" in result.stderr
    parsed(result.stdout)
    # Ten seconds from the end: 10 rejected, and those accepted of them.
    since = "2026-04-14T08:00:30Z"
    assert "12 traces: 2 accepted, 10 rejected" in run("--from-kafka", "--since", since, "-o", "-").stderr
    # The last ones of both topics together: the accepted topic, with fewer records, reaches no further back.
    assert "6 traces: 1 accepted, 5 rejected" in run("--from-kafka", "--last", "6", "-o", "-").stderr


async def _abort(bootstrap: str, topic: str) -> None:
    from aiokafka import AIOKafkaProducer

    async with AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=unique("report")) as producer:
        await producer.begin_transaction()
        await producer.send_and_wait(topic, dump(scored_document(999)))
        await producer.abort_transaction()


@pytest.mark.kafka
async def test_empty_and_missing_topics(kafka: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.kafka_fixtures import create_topics_async
    from worker.config import ConfigError

    accepted, rejected = unique("accepted"), unique("rejected")
    settings = Settings(
        bootstrap_servers=kafka.bootstrap_servers, accepted_topic=accepted, rejected_topic=rejected
    )  # fmt: skip
    traces = Traces()
    with pytest.raises(ConfigError, match=f"topic {accepted} .*UnknownTopic.* KP_ACCEPTED_TOPIC"):
        await read_outputs(settings, traces, None, None)
    await create_topics_async(kafka.bootstrap_servers, {accepted: 1, rejected: 1})
    assert await read_outputs(settings, traces, None, 5) == 0
    with pytest.raises(EmptyReport, match="no documents"):
        summarize(traces)
    nobody = settings.model_copy(update={"bootstrap_servers": "127.0.0.1:1"})
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1 failed"):
        await read_outputs(nobody, traces, None, None)
