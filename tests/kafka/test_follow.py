"""`kp-worker publish --follow` on real Kafka: each request of a session once, whatever ends the process."""

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.kafka_fixtures import WorkerProcess, wait_until
from tests.support.sessions import VALUES, claude_line, claude_request, codex_session
from tests.support.stage import Desk
from worker.lab.broker.embedded_kafka import EmbeddedKafka


class Following(Desk):
    """A folder of sessions, and processes that follow it."""

    def __init__(self, kafka: EmbeddedKafka, tmp_path: Path, form: str = "claude-code") -> None:
        super().__init__(kafka)
        self.folder = tmp_path / "sessions"
        self.folder.mkdir()
        self.log = tmp_path / "follow.log"
        self.arguments = ("publish", "--from", form, "--follow", str(self.folder), *VALUES)

    def follow(self, *args: str) -> WorkerProcess:
        return WorkerProcess(self.env, (*self.arguments, *args), log_path=self.log)

    def traces(self) -> list[dict[str, Any]]:
        return [json.loads(record.value) for record in self.read()]

    def objectives(self) -> Counter[str]:
        return Counter(trace["task"]["objective"] for trace in self.traces())

    def wait(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        assert wait_until(condition, seconds, 0.2), self.log.read_text()

    def follow_until(self, count: int, *args: str) -> None:
        """Follow until so many requests are published, and stop in order."""
        process = self.follow(*args)
        self.wait(lambda: len(self.objectives()) == count)
        process.finish()


def write(path: Path, lines: list[bytes]) -> None:
    with path.open("ab") as file:
        file.writelines(lines)


def test_a_request_is_published_when_the_next_one_begins_and_when_nothing_follows(
    kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    desk = Following(kafka, tmp_path)
    (desk.folder / "a").mkdir()
    now = time.time()
    write(desk.folder / "a" / "one.jsonl", [*claude_request("one", 1, at=now), *claude_request("one", 2, at=now)])
    desk.follow_until(1)
    assert desk.objectives() == {"Task 1 of one": 1}
    desk.follow_until(2, "--idle-minutes", "0.02")
    assert desk.objectives() == {"Task 1 of one": 1, "Task 2 of one": 1}
    trace = desk.traces()[0]
    assert trace["metadata"]["agent_id"] == "claude-code"
    assert [step["type"] for step in trace["steps"]] == ["tool_call", "observation", "thought"]
    assert "stopped: 1 request published" in desk.log.read_text()


def test_codex_too(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    desk = Following(kafka, tmp_path, "codex")
    write(desk.folder / "rollout-1.jsonl", codex_session("0199-a", 3))
    desk.follow_until(3, "--idle-minutes", "0.02")
    assert desk.objectives() == {f"Task {number} of 0199-a": 1 for number in range(3)}


def test_a_long_request_is_cut_again_where_markers_make_it_longer(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    desk = Following(kafka, tmp_path)
    lines = claude_request("one", 1)
    result = {"type": "tool_result", "tool_use_id": "call-1-0", "content": "ann@x.org said so\n" * 200_000}
    lines[2] = claude_line("one", "1r0", "user", [result])
    write(desk.folder / "one.jsonl", lines)
    desk.follow_until(1, "--idle-minutes", "0.02")
    (record,) = desk.read()
    assert 1_000_000 < len(record.value) < 1_048_576
    assert b"[REDACTED:email] said so" in record.value
    assert b"ann@" not in record.value


def test_killed_again_and_again_it_publishes_each_request_exactly_once(
    kafka: EmbeddedKafka, tmp_path: Path, seed: int, long: bool
) -> None:
    rng = random.Random(seed)
    desk = Following(kafka, tmp_path)
    expected: dict[str, int] = {}
    sessions = [f"s{number}" for number in range(4)]
    written = dict.fromkeys(sessions, 0)
    process = desk.follow("--idle-minutes", "0.03")
    kills = 0
    end = time.monotonic() + (40 if long else 8)
    while time.monotonic() < end or not kills:
        session = rng.choice(sessions)
        for _ in range(rng.randint(1, 20)):
            written[session] += 1
            number = written[session]
            data = b"".join(claude_request(session, number, rng.randint(0, 3), time.time()))
            expected[f"Task {number} of {session}"] = 1
            with (desk.folder / f"{session}.jsonl").open("ab") as file:  # half a line at a time
                cut = rng.randrange(len(data))
                file.write(data[:cut])
                file.flush()
                time.sleep(rng.random() / 50)
                file.write(data[cut:])
        if rng.random() < (0.1 if long else 0.2):
            process.kill()
            kills += 1
            process = desk.follow("--idle-minutes", "0.03")
        time.sleep(rng.random() / 2)
    desk.wait(lambda: desk.objectives().keys() >= expected.keys(), 90)
    process.finish()
    print(kills, "kills,", len(expected), "requests")
    assert desk.objectives() == expected
    for trace in desk.traces():
        assert trace["outcome"]["result_summary"] == f"{trace['task']['objective']} is done."


def test_of_two_that_follow_one_folder_the_later_one_goes_on_alone(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    desk = Following(kafka, tmp_path)
    first = desk.follow("--idle-minutes", "0.02")
    write(desk.folder / "one.jsonl", claude_request("one", 1))
    desk.wait(lambda: len(desk.objectives()) == 1)
    first.stop()
    second = desk.follow("--idle-minutes", "0.02")
    write(desk.folder / "two.jsonl", claude_request("two", 1))
    desk.wait(lambda: len(desk.objectives()) == 2)
    first.cont()
    assert first.wait(60) == 1, desk.log.read_text()
    assert "has taken over; this one stops" in desk.log.read_text()
    second.finish()
    assert set(desk.objectives().values()) == {1}
