"""The conversation of one run, from its model calls and the tools' own records, without repetition.

Every model call repeats the whole history. So a turn of the agent is taken from the output of its own call, and the
input of a call adds only what is new: results of tools, later texts of the user, and messages that no earlier call had.
"""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import groupby, takewhile
from typing import Any, Final

from worker.runs.fields import json_value, plain
from worker.runs.messages import Message, Reasoning, Text, ToolCall, ToolResult, Transcript

FINAL_TOOLS: Final = frozenset({"final_answer", "final_result"})
"""With these tools the model answers in smolagents and pydantic-ai, so their calls are not steps."""


@dataclass(frozen=True, slots=True)
class ToolRun:
    """A tool's record of one call, such as its span."""

    name: str
    call_id: str
    arguments: Any  # None if the record lacks them
    result: str | None  # None if the record lacks it
    is_error: bool
    start_ns: int  # since 1970
    end_ns: int
    no_result: bool = False  # the tool failed, and `result` is the reason

    @property
    def latency_ms(self) -> float:
        """The duration in milliseconds."""
        return max(0, self.end_ns - self.start_ns) / 1e6


@dataclass(slots=True)
class _Call:
    """A call of a tool."""

    call: ToolCall
    received: ToolResult | None = None  # the result as the model received it
    run: ToolRun | None = None  # the tool's own record

    def result(self) -> ToolResult | None:
        """Return the result that the model received, or the tool's record of it if only that is JSON."""
        run, received = self.run, self.received
        text = None if run is None else run.result
        is_error = (run is not None and run.is_error) or (received is not None and received.is_error)
        if received is not None:
            is_better = received.call_id and (_is_json(received.text) or not _is_json(text or ""))
            text = received.text if is_better or run is None or run.result is None or run.no_result else text
        return None if text is None else ToolResult(text, is_error=is_error)


@dataclass(slots=True)
class _Turn:
    """One step of the conversation: texts and calls of the agent, a text of the user, or a tool that code called."""

    time_ns: int
    user: str = ""
    reasons: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    known_texts: set[str] = field(default_factory=set)  # the same
    calls: list[_Call] = field(default_factory=list)
    ids: dict[str, _Call] = field(default_factory=dict)
    names: dict[str, list[_Call]] = field(default_factory=dict)
    by_code: bool = False  # no model called the tool


@dataclass(slots=True)
class Conversation:
    """The turns of a run in order."""

    turns: list[_Turn] = field(default_factory=list)
    objective: str | None = None  # the first text of the user; None: no call has it
    _known: dict[str, list[int]] = field(default_factory=dict)  # turns by `_keys`
    _contents: dict[str, list[int]] = field(default_factory=dict)  # turns by calls without ids, and texts next to calls
    _new: list[tuple[Message, int]] = field(default_factory=list)  # messages with calls that are not in _contents yet
    _calls: dict[str, list[_Call]] = field(default_factory=dict)  # by call id
    _reasons: set[str] = field(default_factory=set)
    _users: set[str] = field(default_factory=set)
    _since: set[str] = field(default_factory=set)  # texts of the user since the agent's last turn

    def add(self, inputs: Sequence[Message], outputs: Sequence[Message], start_ns: int = 0, end_ns: int = 0) -> None:
        """Add the new parts of a model call: the end of its input, and its output. Times in ns since 1970.

        First the messages of the input are matched with turns. What follows the last match is new, and is appended.
        """
        places = self._places(inputs)
        matched = [index for index, place in enumerate(places) if place is not None]
        has_result = any(isinstance(part, ToolResult) for message in inputs for part in message.parts)
        if self.turns and not any(message.parts for message in outputs) and not matched and not has_result:
            return  # a failed call outside the run, such as one for a summary of it
        known = matched[-1] + 1 if matched else 0  # number of messages that are history
        count = len(self.turns)
        turn: _Turn | None = None
        reasons: list[str] = []  # of messages of the history, for the turn that comes after them
        for is_agent, group in groupby(range(len(inputs)), key=lambda index: inputs[index].role == "assistant"):
            indexes = list(group)
            if not is_agent:
                results: Counter[str] = Counter()  # by tool name: those without an id
                others = _with_ids(turn, [inputs[index] for index in indexes])
                for index, message in zip(indexes, others, strict=True):
                    self._add_answers(message, turn, results, start_ns, known=index < known, goes_on=bool(matched))
                continue
            for index in indexes:
                message, place = inputs[index], places[index]
                if index >= known:
                    turn = self._add_missed(message, turn if index > max(known, indexes[0]) else None, start_ns)
                else:
                    reasons += [part.text for part in message.parts if isinstance(part, Reasoning)]
                    if place is None:
                        continue
                    turn = self.turns[place]
                    self._add_ids(turn, message)
                self._add_reasons(turn, reasons)
                reasons = []
        last = max((place for place in places if place is not None), default=-1)
        if len(self.turns) > count or not self._is_repeated(outputs, last):
            self._add_turn(outputs, end_ns)

    def _places(self, inputs: Sequence[Message]) -> list[int | None]:
        """Return the turn of each message of the agent, in the order of turns; None for a message that is new."""
        after, places = 0, list[int | None]()
        before = ""
        for message in inputs:
            index = None
            if message.role == "assistant":
                for key in _keys(message):
                    if turns := self._known.get(key):
                        index = turns[min(bisect_left(turns, after), len(turns) - 1)]
                        # a turn may come in parts, with its text before its calls
                        is_last = bool(message.calls()) or not key.startswith("text:")
                        after = max(after, index + is_last)
                        break
                else:
                    same = places[-1] if before == "assistant" and places else None
                    index = self._repeated_turn(message, after, same)
                    after = after if index is None else index + 1
            places.append(index)
            before = message.role
        return places

    def _repeated_turn(self, message: Message, after: int, same: int | None) -> int | None:
        """Return the turn that a message repeats with other call ids, or without them, as some frameworks do.

        `same`: the turn of the message just before it, of which it may be another part.
        """
        for earlier, number in self._new:
            calls = [_name_and_arguments(call.name, call.arguments) for call in earlier.calls()]
            for key in (*calls, *(text.strip() for text in _texts(earlier))):
                _append(self._contents.setdefault(key, []), number)
        self._new.clear()
        keys = [_name_and_arguments(call.name, call.arguments) for call in message.calls()] or _texts(message)
        for key in keys:
            turns = self._contents.get(key.strip(), [])
            if same in turns:
                return same
            if (index := bisect_left(turns, after)) < len(turns):
                return turns[index]
        return None

    def _is_repeated(self, outputs: Sequence[Message], after: int) -> bool:
        """Return whether a turn after `after`, the input's last one, already says this: the call is recorded twice."""
        keys = [key for message in outputs for key in _keys(message)]
        return bool(keys) and all(self._known.get(key, [-1])[-1] > after for key in keys)

    def _add_ids(self, turn: _Turn, message: Message) -> None:
        """Give the calls of a turn the ids that only a later message has."""
        for each in message.calls():
            if each.call_id and each.call_id not in turn.ids:
                key = _name_and_arguments(each.name, each.arguments)
                for call in turn.names.get(each.name, []):
                    if not call.call.call_id and _name_and_arguments(each.name, call.call.arguments) == key:
                        call.call = each
                        turn.ids[each.call_id] = call
                        self._calls.setdefault(each.call_id, []).append(call)
                        break

    def _add_reasons(self, turn: _Turn, reasons: Iterable[str]) -> None:
        new = [
            text
            for text in dict.fromkeys(reasons)
            if text.strip() and text not in turn.known_texts and text not in self._reasons
        ]
        self._reasons.update(new)
        turn.reasons += new

    def _add_missed(self, message: Message, turn: _Turn | None, time_ns: int) -> _Turn:
        """Add a message of the agent whose own call is missing: to `turn`, if the turn arrives in parts.

        If the last answer had the same text and no call, the message has its calls, which some libraries leave out.
        """
        last = self.turns[-1] if turn is None and self.turns else None
        if last is not None and last.texts and not last.calls and message.calls() and last.texts == _texts(message):
            turn, message = last, Message("assistant", tuple(message.calls()))
        if turn is None or (turn.calls and not all(isinstance(part, ToolCall) for part in message.parts)):
            turn = _Turn(time_ns)
            self.turns.append(turn)
        self._fill(turn, message, len(self.turns) - 1)
        return turn

    def _add_answers(
        self, message: Message, turn: _Turn | None, results: Counter[str], time_ns: int, *, known: bool, goes_on: bool
    ) -> None:
        """Add results, which belong to `turn` if they have no id, and a text of the user if it is new."""
        texts: list[str] = []
        for part in message.parts:
            if isinstance(part, ToolResult):
                call = self._called(part, turn, results[part.name])
                if call is None and message.role == "user" and not part.call_id:
                    if turn is not None and turn.calls:
                        call = turn.calls[-1]  # one text with the results of all calls
                    else:
                        texts.append(part.text)  # the result of code, not of a call
                results[part.name] += not part.call_id
                if call is not None and call.received is None:
                    call.received = part
        text = "\n".join([*texts, *_texts(message)])
        if message.role == "user" and text and not known:
            self._add_user(text, time_ns, goes_on=goes_on)
        elif message.role == "user" and text and turn is None and self.objective is None:
            self.objective = text  # missing in the first call

    def _called(self, result: ToolResult, turn: _Turn | None, number: int) -> _Call | None:
        """Return the call of a result: in `turn`, as servers reuse ids, or before. `number`: of those without an id."""
        if result.call_id:
            own = None if turn is None else turn.ids.get(result.call_id)
            return own or next(iter(self._calls.get(result.call_id, [])[-1:]), None)
        if turn is None:
            return None
        same = turn.names.get(result.name, []) if result.name else turn.calls if len(turn.calls) == 1 else []
        return same[number] if number < len(same) else None

    def _add_user(self, text: str, time_ns: int, *, goes_on: bool) -> None:
        if self.objective is None and not self.turns:
            self.objective = text
        elif text not in self._since and (goes_on or text not in self._users):
            self.turns.append(_Turn(time_ns, user=text))
        self._users.add(text)
        self._since.add(text)

    def _add_turn(self, outputs: Sequence[Message], time_ns: int) -> None:
        turn = _Turn(time_ns)
        for message in outputs:
            self._add_reasons(turn, [part.text for part in message.parts if isinstance(part, Reasoning)])
            self._fill(turn, message, len(self.turns))
        if turn.reasons or turn.texts or turn.calls:
            self.turns.append(turn)
            self._since = set()

    def _fill(self, turn: _Turn, message: Message, number: int) -> None:
        texts = _texts(message)
        turn.texts += texts
        turn.known_texts.update(texts)
        for call in message.calls():
            if call.call_id == "" or call.call_id not in turn.ids:
                added = _Call(call)
                turn.calls.append(added)
                turn.ids[call.call_id] = added
                turn.names.setdefault(call.name, []).append(added)
                self._calls.setdefault(call.call_id, []).append(added)
        if message.calls():
            self._new.append((message, number))
        for key in _keys(message):
            _append(self._known.setdefault(key, []), number)

    def add_tools(self, runs: Sequence[ToolRun]) -> None:
        """Match the records of tools with calls: by id, else by name and arguments, else by name, in order.

        A record of a tool that no model called becomes a separate turn, at its time.
        """
        calls = [call for turn in self.turns for call in turn.calls]
        rest = [run for run in runs if not self._match_id(run)]
        for key in (_name_and_arguments, lambda name, _: name):
            waiting: dict[str, list[_Call]] = {}
            for call in reversed(calls):
                if call.run is None:
                    waiting.setdefault(key(plain(call.call.name), call.call.arguments), []).append(call)
            left = []
            for run in rest:
                same = waiting.get(key(plain(run.name), run.arguments))
                if same:
                    same.pop().run = run
                else:
                    left.append(run)
            rest = left
        called = {plain(call.call.name) for call in calls} | {plain(name) for name in FINAL_TOOLS}
        own = [
            _Turn(run.start_ns, calls=[_Call(ToolCall(run.name, run.arguments, run.call_id), run=run)], by_code=True)
            for run in rest if plain(run.name) not in called
        ]  # fmt: skip
        self.turns = list(merge(self.turns, own, key=lambda turn: turn.time_ns))

    def _match_id(self, run: ToolRun) -> bool:
        """Match a record by its id and return whether a call has that id; the first of two records of a call counts."""
        calls = self._calls.get(run.call_id, []) if run.call_id else []
        waiting = next((call for call in calls if call.run is None), None)
        if waiting is not None:
            waiting.run = run
        return bool(calls)

    def take_answer(self) -> str | None:
        """Remove and return the answer: the last turn's text if it calls nothing, or the answer tool's arguments."""
        last = next((turn for turn in reversed(self.turns) if not turn.by_code), None)
        if last is None or last.user:
            return None
        if not last.calls and last.texts:
            texts, last.texts = last.texts, []
            return "\n".join(texts)
        final = next((call for call in last.calls if call.call.name in FINAL_TOOLS), None)
        if final is None:
            return None
        last.calls.remove(final)
        arguments = json_value(final.call.arguments)
        if isinstance(arguments, dict) and len(arguments) == 1:
            arguments = next(iter(arguments.values()))
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=repr)

    def has_text(self) -> bool:
        """Return whether anything was recorded besides the names of tools."""
        return any(
            turn.user or turn.reasons or turn.texts or any(call.received for call in turn.calls) for turn in self.turns
        )

    def has_calls(self) -> bool:
        """Return whether the agent called a tool."""
        return any(turn.calls for turn in self.turns)

    def write(self, transcript: Transcript) -> None:
        """Add the turns to a transcript: each turn's reasoning, texts, calls, and results."""
        for turn in self.turns:
            if turn.user:
                transcript.add_user(turn.user)
            for text in (*turn.reasons, *turn.texts):
                transcript.add_thought(text)
            for call in turn.calls:
                run, arguments = call.run, call.call.arguments
                if run is not None and isinstance(run.arguments, dict) and arguments in (None, "", "{}", {}):
                    arguments = run.arguments  # a streamed call, of which only the name was recorded
                latency = None if run is None else run.latency_ms
                transcript.add_call(call.call.name, arguments, call.call.call_id, latency)
            for call in turn.calls:
                if (result := call.result()) is not None:
                    transcript.add_result(result.text, call.call.call_id, call.call.name, is_error=result.is_error)


def _with_ids(turn: _Turn | None, others: list[Message]) -> list[Message]:
    """Return the messages after a turn; results without id and name, as many as its calls, get the calls' ids."""
    if turn is None or len(turn.calls) < 2:
        return others
    results = list(takewhile(lambda each: each.role == "tool", others))
    parts = [message.parts[0] for message in results if len(message.parts) == 1]
    bare = [part for part in parts if isinstance(part, ToolResult) and not part.call_id and not part.name]
    if not len(bare) == len(results) == len(turn.calls):
        return others
    named = (replace(part, call_id=call.call.call_id) for part, call in zip(bare, turn.calls, strict=True))
    return [*(Message("tool", (part,)) for part in named), *others[len(results) :]]


def _append(numbers: list[int], number: int) -> None:
    if number not in numbers[-1:]:
        numbers.append(number)


def _keys(message: Message) -> list[str]:
    """Return the keys that identify a message of the agent: its calls, or its texts if it calls nothing."""
    if calls := message.calls():
        return [
            f"id:{call.call_id}" if call.call_id else _name_and_arguments(call.name, call.arguments) for call in calls
        ]
    return [f"text:{text.strip()}" for text in _texts(message)]


def _is_json(text: str) -> bool:
    return text[:1] in ("{", "[") and not isinstance(json_value(text), str)


def _texts(message: Message) -> list[str]:
    return [part.text for part in message.parts if isinstance(part, Text) and part.text.strip()]


def _name_and_arguments(name: str, arguments: Any) -> str:
    return json.dumps([name, json_value(arguments) or {}], sort_keys=True, default=repr)
