"""Session files as they are followed: whatever happens to files and process, each request comes out whole."""

import os
import random
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.sessions import BEGAN, claude_line, claude_request, request_id
from worker.commands.publish.follow import mark_key
from worker.commands.shared.session_files import NO_POSITION, Closed, Position, SessionFiles, read_position
from worker.runs.messages import Text, ToolResult
from worker.runs.sessions.session import FORMATS, Request

IDLE = 600.0


def follow(folder: Path, *positions: Position, largest: int = 1 << 20) -> SessionFiles:
    files = SessionFiles(folder, FORMATS["claude-code"], IDLE, largest)
    files.start(positions)
    return files


def position(closed: Closed) -> Position:
    known = read_position(closed.position)
    assert known is not None
    return known


def polled(files: SessionFiles, now: float = BEGAN, clock: float | None = None) -> list[Closed]:
    return [each for closed in files.poll(now, now if clock is None else clock) for each in closed]


def put(path: Path, lines: Sequence[bytes], at: float = BEGAN, mode: str = "ab") -> None:
    with path.open(mode) as file:
        file.writelines(lines)
    os.utime(path, (at, at))


def texts(request: Request) -> list[str]:
    return [part.text for message in request.messages for part in message.parts if isinstance(part, Text | ToolResult)]


def keys(closed: Sequence[Closed]) -> list[str]:
    return [each.request.key for each in closed]


def key(session: str, number: int) -> str:
    return f"claude-code/{request_id(session, number)}"


# -- one thing at a time


def test_a_clock_that_is_behind_the_files_does_not_keep_a_request_open(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", claude_request("a", 1), BEGAN + 10 * 86_400)
    files = follow(tmp_path)
    assert polled(files) == []
    assert keys(polled(files, BEGAN + IDLE)) == [key("a", 1)]


@pytest.mark.parametrize("again", [False, True])
def test_while_the_machine_sleeps_no_request_closes(tmp_path: Path, *, again: bool) -> None:
    """The monotonic clock stands still; Kafka's connection may have to be made anew."""
    lines = claude_request("a", 1, 2)
    files = follow(tmp_path)
    for at, line in enumerate(lines[:3]):
        put(tmp_path / "a.jsonl", [line], BEGAN + at)
        assert polled(files, BEGAN + at, at) == []
    woken = BEGAN + 10 * IDLE
    if again:
        files.start([])
    assert polled(files, woken, 4) == []
    late = claude_line("a", "late", "assistant", [{"type": "text", "text": "Late."}], woken)
    put(tmp_path / "a.jsonl", [late], woken)
    assert polled(files, woken + 1, 5) == polled(files, woken + IDLE - 1, 3 + IDLE) == []
    (whole,) = polled(files, woken + IDLE, 5 + IDLE)
    assert texts(whole.request) == ["Task 1 of a", "done 1-0", "Late."]


def test_half_a_line_waits_for_its_end_and_a_last_line_needs_none(tmp_path: Path) -> None:
    data = b"".join(claude_request("a", 1))
    files = follow(tmp_path)
    for end in range(0, len(data), 100):
        put(tmp_path / "a.jsonl", [data[:end]], mode="wb")
        assert polled(files) == []
    put(tmp_path / "a.jsonl", [data[:-1]], mode="wb")
    (closed,) = polled(files, BEGAN + IDLE)
    assert texts(closed.request)[-1] == "Task 1 of a is done."
    put(tmp_path / "a.jsonl", [b'\n{"type": "user", "uuid'])
    assert polled(follow(tmp_path, position(closed)), BEGAN + 2 * IDLE) == []


def test_a_restart_reads_nothing_twice_that_a_position_covers(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", [line for number in range(5) for line in claude_request("a", number)])
    closed = polled(follow(tmp_path))
    assert keys(closed) == [key("a", number) for number in range(4)]
    for at, each in enumerate(closed):
        again = follow(tmp_path, position(each))
        assert keys(polled(again, BEGAN + IDLE)) == [key("a", number) for number in range(at + 1, 5)]
    (tmp_path / "moved").mkdir()
    (tmp_path / "a.jsonl").rename(tmp_path / "moved" / "a.jsonl")
    again = follow(tmp_path, position(closed[-1]))
    assert keys(polled(again, BEGAN + IDLE)) == [key("a", 4)]


def test_what_closes_together_has_one_position_at_its_end(tmp_path: Path) -> None:
    """A transaction may end between two requests, and a kill follow it."""
    spawn = {"type": "tool_use", "id": "t1", "name": "Task", "input": {"prompt": "Look", "subagent_type": "Explore"}}
    answer = [{"type": "text", "text": "Found."}]
    put(tmp_path / "a.jsonl", [
        claude_line("a", "1", "user", "Do it"), claude_line("a", "2", "assistant", [spawn]),
        claude_line("a", "3", "user", "Look", isSidechain=True, agentId="x"),
        claude_line("a", "4", "assistant", answer, isSidechain=True, agentId="x"),
        claude_line("a", "5", "assistant", [{"type": "text", "text": "Done."}]),
    ])  # fmt: skip
    closed = polled(follow(tmp_path), BEGAN + IDLE)
    assert [each.request.agent for each in closed] == ["claude-code/Explore", "claude-code"]
    assert closed[0].position == NO_POSITION
    assert read_position(NO_POSITION) is None
    assert read_position(b"noise") is None


def test_a_position_is_small_and_has_nothing_of_the_session(tmp_path: Path) -> None:
    """Two thousand sub-agents in a request, a long command, and a secret wherever a session has text."""
    secret = "ghp_" + "Zq7secretDabcdefghij" * 2
    more = {"cwd": f"/home/{secret}", "gitBranch": secret, "version": secret}
    command = f"<command-name>/deploy</command-name><command-args>--token {secret} {'x' * 1_200_000}</command-args>"
    lines = [*claude_request("a", 1), claude_line("a", "c", "user", command, **more)]
    for number in range(2000):
        side = {"isSidechain": True, "agentId": f"{secret}{number}", **more}
        spawn = {"type": "tool_use", "id": f"t{number}", "name": "Task", "input": {"prompt": f"{secret} {number}"}}
        lines += [
            claude_line("a", f"s{number}", "assistant", [spawn], **more),
            claude_line("a", f"u{number}", "user", f"{secret} {number}", **side),
            claude_line("a", f"a{number}", "assistant", [{"type": "text", "text": "Done."}], **side),
        ]
    put(tmp_path / f"{secret}.jsonl", [*lines, *claude_request("a", 2)])
    closed = polled(follow(tmp_path), BEGAN + IDLE)
    assert len(closed) == 2003
    assert not [each for each in closed if secret.encode() in each.position or len(each.position) > 120]
    marks = [mark_key(each.request.key.encode()) for each in closed]
    assert sum(map(len, marks)) + sum(len(each.position) for each in closed) < 200_000
    assert {len(mark) for mark in marks} == {32}
    assert keys(polled(follow(tmp_path, position(closed[0])), BEGAN + IDLE)) == keys(closed[1:])


def test_a_file_that_is_truncated_or_replaced_is_read_anew(tmp_path: Path) -> None:
    files = follow(tmp_path)
    put(tmp_path / "a.jsonl", claude_request("a", 1, 3))
    assert polled(files) == []
    put(tmp_path / "a.jsonl", claude_request("b", 1), mode="wb")
    assert keys(polled(files)) == [key("a", 1)]
    put(tmp_path / "new", claude_request("c", 1, 5))
    (tmp_path / "new").rename(tmp_path / "a.jsonl")  # longer than what was read
    assert keys(polled(files)) == [key("b", 1)]
    put(tmp_path / "same", claude_request("c", 1, 5))
    (tmp_path / "same").rename(tmp_path / "a.jsonl")
    assert polled(files) == []
    assert keys(polled(files, BEGAN + IDLE)) == [key("c", 1)]


def test_a_request_goes_on_in_a_file_whose_end_the_agent_has_taken_back(tmp_path: Path) -> None:
    """Claude Code takes lines back when it asks another model."""
    files = follow(tmp_path)
    lines = claude_request("a", 1, 2)
    put(tmp_path / "a.jsonl", [*claude_request("a", 0), *lines[:4]])
    assert keys(polled(files)) == [key("a", 0)]
    put(tmp_path / "a.jsonl", [*claude_request("a", 0), *lines[:3]], BEGAN + 1, mode="wb")
    assert polled(files, BEGAN + 1) == []
    put(tmp_path / "a.jsonl", lines[3:], BEGAN + 2)
    (whole,) = polled(files, BEGAN + 2 + IDLE)
    assert texts(whole.request) == ["Task 1 of a", "done 1-0", "done 1-1", "Task 1 of a is done."]


def test_what_a_fork_repeats_is_published_as_its_parents(tmp_path: Path) -> None:
    lines = [*claude_request("a", 1), *claude_request("a", 2)]
    forked = [line.replace(b'"isSidechain": false', b'"isSidechain": true, "agentId": "a17"') for line in lines]
    assert forked != lines
    put(tmp_path / "agent-a17.jsonl", forked)
    put(tmp_path / "z.jsonl", lines, BEGAN + 1)
    first = polled(follow(tmp_path))[0]
    assert (first.request.key, first.request.agent) == (key("a", 1), "claude-code")


def test_a_file_that_is_gone_closes_later_and_one_that_comes_back_goes_on(tmp_path: Path) -> None:
    files = follow(tmp_path)
    put(tmp_path / "a.jsonl", claude_request("a", 1))
    put(tmp_path / "b.jsonl", claude_request("b", 1))
    assert polled(files) == []
    (tmp_path / "a.jsonl").rename(tmp_path / "a")
    (tmp_path / "b.jsonl").unlink()
    assert polled(files, BEGAN + 1) == []
    (tmp_path / "a").rename(tmp_path / "a.jsonl")
    put(tmp_path / "a.jsonl", claude_request("a", 2), BEGAN + 2)
    assert keys(polled(files, BEGAN + 2)) == [key("a", 1)]
    assert keys(polled(files, BEGAN + IDLE)) == [key("b", 1)]
    assert list(files._files) == [str(tmp_path / "a.jsonl")]


def test_a_bad_line_costs_itself_alone_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = claude_request("a", 1, 2)
    noise = [b"\0" * 100 + b"\n", b"{}\n", b"[1]\n", b"not json\n"]
    put(tmp_path / "a.jsonl", [b"x" * (33 * 1000) + b"\n", *(part for line in lines for part in (*noise, line))])
    files = follow(tmp_path, largest=1000)
    (closed,) = polled(files, BEGAN + IDLE)
    assert len(texts(closed.request)) == 4
    assert len(caplog.messages) == len({message.split(": ", 1)[1] for message in caplog.messages}) == 3
    assert polled(files, BEGAN + IDLE) == []


def test_a_line_without_end_is_not_read_again_and_again(tmp_path: Path) -> None:
    files = follow(tmp_path, largest=1000)
    for _ in range(5):
        put(tmp_path / "a.jsonl", [b"x" * 40_000])
        assert polled(files) == []
    put(tmp_path / "a.jsonl", [b"\n", *claude_request("a", 1)])
    assert keys(polled(files, BEGAN + IDLE)) == [key("a", 1)]


def test_a_request_that_is_too_large_closes_early(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", [*claude_request("a", 1, 500), *claude_request("a", 2)])
    closed = polled(follow(tmp_path, largest=1000), BEGAN + IDLE)
    assert keys(closed) == [key("a", 1), key("a", 2)]
    assert len(texts(closed[0].request)) < 100


def test_lines_that_later_ones_may_take_back_are_kept_up_to_the_size_of_a_request(tmp_path: Path) -> None:
    header = b'{"sessionId": "g", "projectHash": "h"}'
    said = [b'{"id": "m%d", "type": "%s", "content": "x"}' % (it, (b"user", b"gemini")[it % 2]) for it in range(2000)]
    put(tmp_path / "g.jsonl", [line + b"\n" for line in (header, *said)])
    files = SessionFiles(tmp_path, FORMATS["gemini-cli"], IDLE, 1000)
    files.start(())
    assert len(polled(files)) > 500  # before anything closes the session


def test_what_is_no_file_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "nowhere.jsonl").symlink_to(tmp_path / "missing")
    put(tmp_path / "notes.txt", claude_request("a", 1))
    put(tmp_path / os.fsdecode(b"caf\xe9.jsonl"), claude_request("b", 1))
    files = follow(tmp_path)
    assert keys(polled(files, BEGAN + IDLE)) == [key("b", 1)]
    shutil.rmtree(tmp_path)
    assert polled(files, BEGAN + IDLE) == []
    assert "cannot be read" in caplog.text


# -- everything at once, against an oracle


@dataclass
class Wrote:
    """A request as the oracle knows it: the texts of its lines with their times, and whether lines of it were lost.

    `written`: when the last line was complete, which may be long after its time.
    """

    lines: list[tuple[float, list[str]]] = field(default_factory=list)
    damaged: bool = False
    written: float = 0.0

    def expected(self) -> list[str] | None:
        """What is published of it: up to the first pause after an answer; None without an answer."""
        said: list[str] = []
        last = 0.0
        answered = False
        for number, (at, more) in enumerate(self.lines):
            if answered and at - last >= IDLE:
                break
            answered |= number > 0
            said += more
            last = at
        return said if answered else None


def is_answered(contents: list[tuple[str, bytes]]) -> bool:
    """Return whether the last request in a file has an answer there; before that, more words belong to it."""
    return len(contents) > 1 and contents[-2][0] == contents[-1][0]


@dataclass
class World:
    """A folder with sessions, a process that follows it, and what is committed."""

    folder: Path
    rng: random.Random
    now: float = BEGAN
    serial: int = 0
    wrote: dict[str, Wrote] = field(default_factory=dict)
    contents: dict[str, list[tuple[str, bytes]]] = field(default_factory=lambda: defaultdict(list))
    rest: dict[str, bytes] = field(default_factory=dict)
    published: dict[str, list[str]] = field(default_factory=dict)
    positions: dict[str, Position] = field(default_factory=dict)
    files: SessionFiles | None = None
    batch: list[Closed] = field(default_factory=list)

    def write(self) -> None:
        """Write some lines, the last one perhaps only in part."""
        name = self.rng.choice(["a", "b", "c"])
        for _ in range(self.rng.randint(1, 6)):
            self.line(name)
            if self.rng.random() < 0.2:
                self.now += self.rng.choice([0.1, 1, IDLE / 3])

    def line(self, name: str) -> None:
        """Write one line, or the rest of one."""
        self.now += 0.001  # no two contents of a file have the same size and time
        path = self.folder / f"{name}.jsonl"
        contents = self.contents[name]
        if name in self.rest:
            put(path, [self.rest.pop(name)], self.now)
            request = self.wrote[contents[-1][0]]
            request.damaged |= self.now - request.lines[-1][0] >= IDLE  # closed while this was half a line
            request.written = self.now
            return
        self.serial += 1
        if not contents or (is_answered(contents) and self.rng.random() < 0.25):
            request, role = f"claude-code/{request_id('w', self.serial)}", "user"
            self.wrote[request] = Wrote()
            content: Any = f"text {self.serial}"
        else:
            request, role = contents[-1][0], "assistant"
            content = [{"type": "text", "text": f"text {self.serial}"}]
        line, wrote = claude_line("w", str(self.serial), role, content, self.now), self.wrote[request]
        contents.append((request, line))
        cut = self.rng.randrange(len(line)) if self.rng.random() < 0.3 else len(line)
        if wrote.lines and self.now - wrote.lines[-1][0] >= IDLE:
            # Of a line in two parts the time and the writes say differently whether there was a pause: either is right.
            wrote.damaged |= cut < len(line) or self.now - wrote.written < IDLE
        wrote.lines.append((self.now, [f"text {self.serial}"]))
        wrote.written = self.now
        if line[cut:]:
            self.rest[name] = line[cut:]
        put(path, [line[:cut]], self.now)

    def truncate(self) -> None:
        """Lose what a file holds: all of it, or the end."""
        if not self.contents:
            return
        name = self.rng.choice(sorted(self.contents))
        self.now += 0.001
        self.rest.pop(name, None)
        contents = self.contents[name]
        kept = contents[: self.rng.choice([0, 0, self.rng.randint(0, len(contents))])]
        for request, _ in (*kept[-1:], *contents[len(kept) :]):  # the agent goes on with what may be closed
            self.wrote[request].damaged = True
        path, data = self.folder / f"{name}.jsonl", b"".join(line for _, line in kept)
        if self.rng.random() < 0.5:
            put(path, [data], self.now, "wb")
        else:
            put(self.folder / "new", [data], self.now)
            (self.folder / "new").rename(path)
        if kept:
            self.contents[name] = kept
        else:
            del self.contents[name]

    def move(self) -> None:
        """Give a file another name; the agent goes on writing to it."""
        if not self.contents:
            return
        name = self.rng.choice(sorted(self.contents))
        self.serial += 1
        target = f"m{self.serial}"
        (self.folder / f"{name}.jsonl").rename(self.folder / f"{target}.jsonl")
        self.contents[target] = self.contents.pop(name)
        if name in self.rest:
            self.rest[target] = self.rest.pop(name)

    def copy(self) -> None:
        """Resume a session in another file, which begins with a copy."""
        whole = [
            name for name, contents in sorted(self.contents.items())
            if name not in self.rest and is_answered(contents)
        ]  # fmt: skip
        if not whole:
            return
        name = self.rng.choice(whole)
        self.serial += 1
        target = f"k{self.serial}"
        shutil.copy(self.folder / f"{name}.jsonl", self.folder / f"{target}.jsonl")
        os.utime(self.folder / f"{target}.jsonl", (self.now, self.now))
        # What is open goes on in both files, so whichever closes first is published.
        self.wrote[self.contents[name][-1][0]].damaged = True
        self.contents[target] = list(self.contents[name])
        self.serial += 1
        request = f"claude-code/{request_id('w', self.serial)}"
        line = claude_line("w", str(self.serial), "user", f"text {self.serial}", self.now)
        self.wrote[request] = Wrote([(self.now, [f"text {self.serial}"])])
        self.contents[target].append((request, line))
        put(self.folder / f"{target}.jsonl", [line], self.now)

    def pause(self) -> None:
        self.now += self.rng.choice([1.0, IDLE / 2, IDLE, 3 * IDLE])

    def poll(self) -> None:
        """Let the process look at the files, and commit now and then; it may be killed at any point."""
        if self.files is None:
            self.files, self.batch = follow(self.folder, *self.positions.values()), []
        for closed in self.files.poll(self.now, self.now):
            self.batch += closed
            if self.rng.random() < 0.02:
                self.files = None
                return
            if self.rng.random() < 0.3:
                self.commit(self.rng.randint(0, len(self.batch)))
        self.commit(len(self.batch))
        if self.rng.random() < 0.1:
            self.files = None

    def commit(self, count: int) -> None:
        for each in self.batch[:count]:
            if each.request.key not in self.published:
                self.published[each.request.key] = texts(each.request)
                if (position := read_position(each.position)) is not None:
                    self.positions[position.file] = position
        self.batch = self.batch[count:]

    def check(self) -> None:
        """Every request that is in a file comes out as it was written; what was lost may have come out in part."""
        assert self.published.keys() <= self.wrote.keys()
        in_files = {request for contents in self.contents.values() for request, _ in contents}
        for request, wrote in self.wrote.items():
            said = [text for _, more in wrote.lines for text in more]
            published = self.published.get(request)
            if wrote.damaged:
                assert published is None or published == [text for text in said if text in published]
            elif request in in_files:
                assert published == wrote.expected(), request


@pytest.mark.parametrize("case", range(20))
def test_whatever_happens_each_request_comes_out_once_and_whole(tmp_path: Path, seed: int, case: int) -> None:
    rng = random.Random(f"{seed} {case}")
    world = World(tmp_path, rng)
    steps = [world.write] * 8 + [world.poll] * 8 + [world.pause] * 2 + [world.truncate, world.move, world.copy]
    for _ in range(150):
        rng.choice(steps)()
    for name in [*world.rest]:
        world.line(name)
    for _ in range(4):
        world.now += IDLE
        world.files = None if rng.random() < 0.3 else world.files
        world.poll()
    while world.files is None:
        world.poll()
    world.check()
    assert len(world.published) > 5
    assert next(iter(world.positions.values())).next > 0
