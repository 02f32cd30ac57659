"""Scoring a file: the documents of the topics, line by line, and the command around it."""

import base64
import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.support.builders import NEVER_ACCEPTED, T0, TextEmbedder, make_record, trace_bytes
from tests.support.embedding_service import MODEL, EmbeddingService, vector
from tests.support.imports import MODEL_RUNTIMES, loaded_after
from tests.support.surroundings import ROOT
from worker import PartitionScorer, embedding_text, parse_trace
from worker.cli import cli
from worker.commands.score.lines import Summary, score_lines
from worker.config import Settings
from worker.core.documents import scored_record
from worker.core.scorer import event_time_ms
from worker.embed.embedder import ModelError

GOOD = trace_bytes("kp:trace:good")
WEAK = trace_bytes("kp:trace:weak", steps=NEVER_ACCEPTED)


def score(
    lines: list[bytes], embedder: Any = None, settings: Settings | None = None
) -> tuple[Summary, list[Any], list[Any]]:
    """Return the summary, the output documents and the dead letters."""
    output, dead = io.BytesIO(), io.BytesIO()
    summary = score_lines([io.BytesIO(b"\n".join(lines))], output, dead, settings or Settings(), embedder)
    documents, letters = ([json.loads(line) for line in stream.getvalue().splitlines()] for stream in (output, dead))
    return summary, documents, letters


# -- the lines


def test_one_output_line_for_each_valid_line_in_order() -> None:
    summary, documents, letters = score([GOOD, b"{", WEAK, b"", b"  \t", b'"\xff"', b"[]", GOOD + b"\r"])
    assert [document["id"] for document in documents] == ["kp:trace:good", "kp:trace:weak", "kp:trace:good"]
    assert [document["scoring"]["decision"] for document in documents] == ["accepted", "rejected", "accepted"]
    # The line's number, from 0, is the offset; blank lines count.
    assert [document["scoring"]["source"] for document in documents] == [
        {"topic": "traces", "partition": 0, "offset": offset} for offset in (0, 2, 7)
    ]
    reasons = {2: "not_json", 6: "not_utf8", 7: "invalid_type"}
    assert {letter["line"]: letter["reason"] for letter in letters} == reasons
    assert summary.dead_letters == dict.fromkeys(reasons.values(), 1)
    assert (summary.accepted, len(summary.scores)) == (2, 3)
    assert summary.scores == [document["scoring"]["score"] for document in documents]


def test_a_dead_letter_s_line_holds_reason_path_message_and_the_value() -> None:
    bad = trace_bytes(confidence=7)
    _, _, (letter, of_bytes) = score([bad, b"\xff\x00"])
    assert letter.pop("message").startswith("outcome.confidence: 7")
    assert letter == {"line": 1, "reason": "invalid_value", "path": "outcome.confidence", "value": bad.decode()}
    assert base64.b64decode(of_bytes["value_base64"]) == b"\xff\x00"
    assert "value" not in of_bytes


def test_the_lines_are_what_the_worker_publishes() -> None:
    embedder = TextEmbedder(8)
    raws = [trace_bytes(f"kp:trace:{n}", objective=f"task {n % 3}", created_at=T0 + 1000 * n) for n in range(20)]
    output = io.BytesIO()
    score_lines([io.BytesIO(b"\n".join(raws) + b"\n")], output, None, Settings(cache_max_elements=5), embedder)
    scorer = PartitionScorer(5, 3_600_000, 8)
    for number, (raw, line) in enumerate(zip(raws, output.getvalue().splitlines(), strict=True)):
        trace = parse_trace(raw)
        scored = scorer.score(trace, embedder.embed(embedding_text(trace)).vector, event_time_ms(trace, None))
        assert scored_record(make_record(raw, number), scored, embedder.identity).value == line


def test_settings_count() -> None:
    settings = Settings(
        threshold=0.0,
        source_topic="mine",
        max_steps=1,
        profiles={"finance": {"threshold": 1.0}},  # type: ignore[dict-item]
    )
    summary, documents, letters = score([trace_bytes(steps=["observation"], domain="code"), GOOD, WEAK], None, settings)
    assert [document["scoring"]["threshold"] for document in documents] == [0.0, 1.0]
    assert documents[0]["scoring"]["source"]["topic"] == "mine"
    assert [letter["reason"] for letter in letters] == ["too_many_steps"]
    assert (summary.accepted, len(summary.scores)) == (1, 2)


def test_one_trace_moves_stream_time_as_far_as_the_setting_lets_it() -> None:
    raws = [trace_bytes(created_at=time) for time in (T0, "9999-12-31T23:59:59Z", T0 + 30_000)]
    _, free, _ = score(raws)
    assert [document["scoring"]["stream_time"][:4] for document in free] == ["2026", "9999", "9999"]
    _, bounded, _ = score(raws, None, Settings(stream_time_max_step_seconds=20))
    times = [document["scoring"]["stream_time"][11:] for document in bounded]
    assert times == ["08:00:00.000Z", "08:00:20.000Z", "08:00:30.000Z"]


def test_a_text_on_which_the_model_fails_is_a_dead_letter() -> None:
    lines = [GOOD, trace_bytes(objective="poison"), trace_bytes(objective="long")]
    summary, documents, letters = score(lines, TextEmbedder(8))
    assert len(documents) == 2
    assert [(letter["line"], letter["reason"]) for letter in letters] == [(2, "embedding_failed")]
    assert summary.truncated == 1


def test_a_truncated_objective_is_counted_apart_from_a_truncated_text() -> None:
    lines = [trace_bytes(objective=objective) for objective in ("long", "short", "long")]
    summary, _, _ = score(lines, TextEmbedder(8), Settings(embed_text="objective"))
    assert (summary.truncated_objectives, summary.truncated) == (2, 0), "these traces are their objectives alone"
    summary, _, _ = score(lines, TextEmbedder(8), Settings(embed_text="whole"))
    assert (summary.truncated_objectives, summary.truncated) == (0, 2)


def test_a_model_that_fails_on_everything_ends_the_run() -> None:
    with pytest.raises(ModelError, match="every text"):
        score([GOOD], TextEmbedder(8, broken=True))


def test_progress_is_told_in_bytes() -> None:
    sizes: list[int] = []
    score_lines([io.BytesIO(b"7\n\n[]")], io.BytesIO(), None, Settings(), None, sizes.append)
    assert sizes == [2, 1, 2]


# -- the command


Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run `kp-worker score`; bytes as the first argument become a file."""

    def invoke(*arguments: Any, **options: Any) -> Result:
        words = []
        for argument in arguments:
            path = tmp_path / "in.jsonl"
            if isinstance(argument, bytes):
                path.write_bytes(argument)
            words.append(str(path if isinstance(argument, bytes) else argument))
        return CliRunner().invoke(cli, ["score", *words, "--embedder", "none"], **options)

    return invoke


def test_the_command_writes_output_dead_letters_and_a_summary(run: Run, tmp_path: Path) -> None:
    out, bad = tmp_path / "out.jsonl", tmp_path / "bad.jsonl"
    result = run(b"\n".join([GOOD, b"{", WEAK, b"[", b"[]"]), "--output", out, "--dead-letters", bad)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert [json.loads(line)["id"] for line in out.read_bytes().splitlines()] == ["kp:trace:good", "kp:trace:weak"]
    assert [json.loads(line)["line"] for line in bad.read_bytes().splitlines()] == [2, 4, 5]
    summary, named = result.stderr.splitlines()[:3], result.stderr.splitlines()[3:]
    assert summary == [
        "5 traces: 1 accepted, 1 rejected, 3 dead letters, 0 texts truncated at 256 tokens",
        "  1 invalid_type",
        "  2 not_json",
    ]
    assert [line.split(":")[1] for line in named] == ["2", "4", "5"]


def test_several_files_are_one_source_and_bad_lines_are_named_by_their_file(tmp_path: Path) -> None:
    first, second, dead = tmp_path / "a", tmp_path / "b", tmp_path / "dead"
    first.write_bytes(GOOD + b"\n" + b"{}\n" * 7)
    second.write_bytes(b"\xef\xbb\xbf" + WEAK + b"\n[]\n")
    command = ["score", str(first), str(second), "--dead-letters", str(dead)]
    result = CliRunner().invoke(cli, command, env={"KP_EMBEDDER": "none"})
    assert result.exit_code == 0
    assert [json.loads(line)["scoring"]["source"]["offset"] for line in result.stdout.splitlines()] == [0, 8]
    letters = [json.loads(line) for line in dead.read_bytes().splitlines()]
    assert [(each["file"], each["line"]) for each in letters] == [
        *((str(first), line) for line in range(2, 9)), (str(second), 2),
    ]  # fmt: skip
    summary = result.stderr.splitlines()
    named = [line.partition(": ")[0] for line in summary if line.startswith(str(tmp_path))]
    assert named == [*(f"{first}:{line}" for line in range(2, 7)), f"{second}:2", str(first)]
    assert f"{first}: 2 more like these; --dead-letters BAD.jsonl writes them all, with their reasons" in summary


PRETTY = json.dumps(json.loads(GOOD), indent=2).encode()
SEVERAL = "Error: {file} holds JSON over several lines; one trace per line is expected: jq -c {jq} {file}\n"
NOTHING = "Error: {file}: no line holds anything; one trace per line is expected\n"


def test_a_trace_over_several_lines_is_scored_as_on_one(run: Run) -> None:
    result = run(PRETTY)
    assert (result.exit_code, json.loads(result.stdout)["scoring"]["embedder"]) == (0, None)
    assert result.stdout == run(json.dumps(json.loads(GOOD), separators=(",", ":")).encode()).stdout


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (2 * PRETTY, SEVERAL.replace("{jq}", ".")),
        (PRETTY + b"\n" + PRETTY, SEVERAL.replace("{jq}", ".")),
        (PRETTY[:-1], SEVERAL.replace("{jq}", ".")),
        (b"[\n" + PRETTY + b"\n]", SEVERAL.replace("{jq}", "'.[]'")),
        (json.dumps([json.loads(GOOD)] * 70, indent=2).encode(), SEVERAL.replace("{jq}", "'.[]'")),
        (b"[]\n{}", "no line of the file is a valid trace; write them with their reasons: --dead-letters BAD.jsonl\n"),
        (b"", NOTHING),
        (b"\n \n", NOTHING),
    ],
)  # fmt: skip
def test_a_file_without_a_valid_trace_is_an_error(run: Run, tmp_path: Path, content: bytes, error: str) -> None:
    result = run(content)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.endswith(error.format(file=tmp_path / "in.jsonl"))


def test_an_output_that_cannot_be_written_is_an_error(run: Run) -> None:
    result = run(GOOD, "--output", "no/such/directory")
    assert (result.exit_code, "no/such/directory" in result.stderr) == (1, True)


def test_samples_are_the_traces_of_the_demo(run: Run) -> None:
    done = run("samples")
    assert (done.exit_code, done.stderr[:10]) == (0, "74 traces:")


@pytest.mark.parametrize(
    ("lines", "warning"),
    [
        ([WEAK], "highest score 0.100, threshold 0.75: nothing passed; kp-worker report FILE shows what would"),
        ([WEAK] * 199 + [GOOD], "highest score 0.800, threshold 0.75: 1 of 200 passed; kp-worker report FILE"),
        ([WEAK] * 99 + [GOOD], ""),  # 1 % is a choice
        ([GOOD], ""),
        ([b"{"], ""),
    ],
)
def test_a_threshold_that_nothing_reaches_is_told(run: Run, lines: list[bytes], warning: str) -> None:
    result = run("-", input=b"\n".join(lines))
    assert result.stderr.splitlines()[-1].startswith(warning) if warning else "highest score" not in result.stderr


def test_ctrl_c_says_that_the_output_is_partial(tmp_path: Path) -> None:
    output = tmp_path / "scored.jsonl"
    command = [sys.executable, "-m", "worker", "score", "-", "--embedder", "none", "-o", str(output)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write((GOOD + b"\n") * 5000)
    process.stdin.flush()
    until = time.monotonic() + 30
    while not (output.is_file() and output.stat().st_size) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr.decode().strip()) == (130, f"interrupted: {output} is partial")


@pytest.mark.parametrize(
    ("env", "code", "message"),
    [
        ({"KP_THRESHOLD": "7"}, 2, "KP_THRESHOLD='7' is wrong"),
        ({"KP_TRESHOLD": "1"}, 0, "warning: KP_TRESHOLD is not a setting; did you mean KP_THRESHOLD?"),
        ({"KP_THRESHOLD": "1", "KP_EMBEDDER": "sentence-transformers"}, 0, "1 trace: 0 accepted, 1 rejected"),
    ],
)
def test_settings_come_from_the_environment_and_the_option_wins(
    run: Run, env: dict[str, str], code: int, message: str
) -> None:
    result = run(GOOD, env=env)
    assert (result.exit_code, message in result.stderr) == (code, True), result.stderr


def test_a_file_is_scored_without_loading_a_model_or_kafka() -> None:
    arguments = ["score", "samples", "--embedder", "none", "--output", "/dev/null"]
    loaded = loaded_after(f"from worker.cli import cli\ncli({arguments}, standalone_mode=False)")
    assert "numpy" in loaded
    assert not loaded & {*MODEL_RUNTIMES, "faust", "aiokafka"}


def test_a_model_elsewhere_scores_as_the_worker_does() -> None:
    with EmbeddingService() as service:
        env = {"KP_EMBEDDER": "http", "KP_EMBEDDER_URL": service.url, "KP_MODEL": MODEL, "KP_OUTPUT_EMBEDDING": "true"}
        service.fault = lambda texts: (400, b"", {}) if any("too long" in text for text in texts) else None
        lines = [GOOD, trace_bytes(objective="too long"), WEAK]
        result = CliRunner().invoke(cli, ["score", "-"], input=b"\n".join(lines), env=env)
        assert result.exit_code == 0, result.stderr
        assert "1 accepted, 1 rejected, 1 dead letter" in result.stderr
        documents = [json.loads(line) for line in result.stdout.splitlines()]
        assert [it["scoring"]["embedder"]["runtime"] for it in documents] == ["http", "http"]
        found = np.frombuffer(base64.b64decode(documents[0]["scoring"]["embedding"]["data"]), "<f4")
        assert found.tolist() == vector(embedding_text(parse_trace(GOOD)))
        service.stop()
        result = CliRunner().invoke(cli, ["score", "-"], input=GOOD, env=env)
        assert result.exit_code == 1
        assert "no connection" in result.stderr


# -- what --redact replaced, by type, with an example of each, masked


SECRETS = ("hunter2x", "abcDEF123", "bob@example.com", "2001:db8::7")
TRACE = json.loads(trace_bytes())
STEP = {
    **TRACE["steps"][0],
    "content": f"export DB_PASSWORD={SECRETS[0]} && mail {SECRETS[2]}; [REDACTED:ip] and {SECRETS[3]}\nhere",
    "input": {"client_secret": SECRETS[1]},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "traces.jsonl"
    TRACE["metadata"]["privacy_level"] = "aggregated"
    path.write_text(f"{json.dumps({**TRACE, 'steps': [STEP]})}\n\n{trace_bytes().decode()}\n", "utf-8")
    return path


def redacted(file: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["score", str(file), "--redact", "all", "--embedder", "none", *options])


def test_what_was_replaced_is_listed_by_type_with_an_example_of_each_masked(file: Path) -> None:
    done = redacted(file, "--set", "redact_rules=strict")
    assert done.exit_code == 0, done.output
    around = "ORD=[REDACTED:password] && mail"
    assert done.stderr.splitlines()[1:] == [
        "  1 email redacted",
        f"    line 1: steps[0].content: {around} «aaa@aaaaaaa.aaa»; [REDACTED:ip] and [REDACTED:ip",
        "  2 password redacted",
        "    line 1: steps[0].content: export DB_PASSWORD=«aaaaaa9a» && mail [REDACTED:email]; [REDA",
        "  1 ip redacted",
        "    line 1: steps[0].content: ACTED:email]; [REDACTED:ip] and «9999:aa9::9» here",
    ]
    assert not any(secret in done.output for secret in SECRETS)


def test_a_member_and_the_reference_rules(file: Path) -> None:
    file.write_text(json.dumps({**TRACE, "steps": [{**STEP, "content": "x"}]}), "utf-8")
    assert redacted(file).stderr.splitlines()[1:3] == [
        "  1 password redacted",
        "    line 1: steps[0].input.client_secret: «aaaAAA999»",
    ]


def test_patterns_of_a_team_and_a_wrong_one(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = tmp_path / "patterns.toml"
    patterns.write_text(
        "[[pattern]]\nname = 'word'\npattern = 'mail'\n"
        "[[pattern]]\nname = 'other'\npattern = 'here'\nreplacement = '(gone)'\n",
        "utf-8",
    )
    monkeypatch.setenv("KP_REDACT_PATTERNS_FILE", str(patterns))
    stderr = redacted(file).stderr
    assert re.search(r"\n  1 word redacted\n    line 1: steps\[0\].content: .*&& «aaaa» ", stderr)
    assert "\n  1 other redacted\n" in stderr  # its replacement is no marker, so it has no example
    patterns.write_text("[[pattern]]\nname = 'word'\npattern = '('\n", "utf-8")
    done = redacted(file)
    assert done.exit_code == 2
    assert "pattern 1 ('word')" in done.output
