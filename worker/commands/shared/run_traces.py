"""The ReasoningTrace of a run, and of a conversation whose calls are logged one by one.

The values that logs lack come from options of `kp-worker convert`, as constants or as fields of each run.
"""

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

import msgspec

from worker.core.trace import CONTEXT, InvalidTrace, Limits, ReasoningTrace, parse_trace
from worker.runs.conversation import Conversation
from worker.runs.fields import (
    Counts,
    FieldPath,
    RunRefused,
    as_confidence,
    as_nonblank,
    as_privacy,
    as_success,
    as_time,
    as_visibility,
    find_field,
    shown,
    unused_fields,
)
from worker.runs.forms import agents, form_of, messages_of, read_atif
from worker.runs.messages import Transcript
from worker.runs.sessions.session import Request
from worker.runs.shorten import shortened

RESERVED: Final = frozenset(info.encode_name for info in msgspec.structs.fields(ReasoningTrace)) | {"scoring"}
"""Fields that --keep may not set."""


@dataclass(frozen=True, slots=True)
class RunField:
    """The value of one option."""

    option: str
    check: Callable[[Any], Any]
    constant: Any = None  # the same for every run
    path: FieldPath | None = None  # or a field of each run

    def value(self, run: Any, above: Any = None) -> Any:
        """Return the value for a run; `above`: the parent run, whose field counts if this one lacks it.

        Raises RunRefused if there is no such field, or a wrong value in it.
        """
        if self.path is None:
            return self.constant
        entry = find_field(run, self.path) or find_field(above, self.path)
        if entry is None or entry[1] is None:
            name = ".".join(self.path)
            raise RunRefused("missing_value", f"the run has no field {name}, which {self.option} names")
        try:
            return self.check(entry[1])
        except ValueError as error:
            why = f"{'.'.join(self.path)}: {shown(entry[1])} {error} ({self.option})"
            raise RunRefused("invalid_value", why) from None


@dataclass(frozen=True, slots=True)
class Options:
    """The options: where each value comes from that a log lacks, and how steps are made."""

    fields: Mapping[str, RunField]
    """By option without dashes: success, confidence, domain, visibility, privacy, and if given agent_id, framework,
    created_at, objective, result_summary."""
    keep: Mapping[str, RunField]
    form: str  # "auto", or the form of every run
    max_content: int | None
    limits: Limits
    error_prefixes: tuple[str, ...] = ()
    messages: FieldPath | None = None  # path of a run's messages
    append: FieldPath | None = None  # path of a response
    group_by: FieldPath | None = None  # path of a conversation's name

    def form_of(self, run: Any) -> str:
        """Return the form of a run. Raises RunRefused if it has none."""
        return form_of(run, self.messages, self.append) if self.form == "auto" else self.form


CHECKS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "success": as_success,
    "confidence": as_confidence,
    "domain": as_nonblank,
    "visibility": as_visibility,
    "privacy": as_privacy,
    "created_at": as_time,
    "agent_id": as_nonblank,
    "framework": as_nonblank,
    "objective": as_nonblank,
    "result_summary": as_nonblank,
}


def parse_options(
    values: Mapping[str, str | None], keep: Iterable[str], form: str, max_content: int | None, limits: Limits,
    error_prefixes: tuple[str, ...] = (), paths: Mapping[str, str | None] | None = None,
) -> Options:  # fmt: skip
    """Parse the options. Raises ValueError, with the option's name.

    `values` has the names of CHECKS, `paths` has messages, append and group_by.
    """
    fields = {name: _field(option_name(name), text, CHECKS[name]) for name, text in values.items() if text is not None}
    kept = dict(map(_kept, keep))
    parsed = {name: _path(option_name(name), text) for name, text in (paths or {}).items() if text is not None}
    if "" in error_prefixes:
        raise ValueError("--error-prefix must not be empty: every result begins with an empty text")
    return Options(fields, kept, form, max_content, limits, error_prefixes, **parsed)


def option_name(name: str) -> str:
    """Return the option that sets a parameter."""
    return f"--{name.replace('_', '-')}"


def _path(option: str, text: str) -> FieldPath:
    """Return the parts of `@path.to.field`. Raises ValueError."""
    path = tuple(text[1:].split("."))
    if not text.startswith("@"):
        raise ValueError(f"{option}: {text!r} is not a path; begin it with @")
    if not all(path):
        raise ValueError(
            f"{option}: {text} is not a path; write the names of the fields, joined by dots: @metadata.domain"
        )
    return path


def _field(option: str, text: str, check: Callable[[Any], Any]) -> RunField:
    """Parse an option: `@path.to.field`, or a constant; `@@` begins a constant with @. Raises ValueError.

    `--success @path=TEXT` is true if the field is TEXT.
    """
    constant = text.removeprefix("@")
    try:
        text.encode()  # an argument may be bytes that are not UTF-8
        if text == constant or constant.startswith("@"):
            return RunField(option, check, check(constant))
    except UnicodeEncodeError as error:
        raise ValueError(f"{option}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{option}: {constant!r} {error}") from None
    path, equals, wanted = text.partition("=")
    if option == "--success" and equals:
        return RunField(option, lambda value: as_nonblank(value) == wanted, path=_path(option, path))
    return RunField(option, check, path=_path(option, text))


def _kept(text: str) -> tuple[str, RunField]:
    name, equals, path = text.partition("=")
    if not name or not equals or not path.startswith("@"):
        raise ValueError(f"--keep: {text!r} is not NAME=@path")
    if name in RESERVED:
        raise ValueError(f"--keep: {name} is a field of every trace; choose another name, such as x_{name}")
    return name, RunField("--keep", lambda value: value, path=_path("--keep", path))


ID_NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_URL, CONTEXT)

KEY_ROOM: Final = 1024
"""Bytes reserved for a record's key, which counts towards the limit of a trace."""


def traces_of(run: Any, options: Options) -> Iterator[tuple[bytes, Counts]]:
    """Yield the trace of a run as JSON, and what became of its parts; then those of subagents. Raises RunRefused."""
    form = options.form_of(run)
    for agent, above in agents(run) if form == "atif" else [(run, None)]:
        transcript = _transcript(options, agent)
        if form == "atif":
            read_atif(agent, transcript)
        else:
            messages, answer, used = messages_of(agent, form, options.messages, options.append, transcript.counts)
            transcript.used |= used
            for message in (*messages, *answer):
                transcript.add(message)
        transcript.finish()
        if transcript.counts.dropped["role 'exit', which is not known"] and transcript.last_text is None:
            transcript.last_text = ""  # the agent's last word was the call that ended the run
        document = _document_of(agent, above, transcript, options, _canonical(agent))
        trace = _checked(_as_json(document), options.limits)
        _count_unused(agent, transcript.used, options, transcript.counts)
        yield trace, transcript.counts


def trace_of_request(request: Request, options: Options, most: int | None = None) -> tuple[bytes, Counts]:
    """Return the trace of a closed session request as JSON, and what became of its parts. Raises RunRefused.

    An option's `@name` is a fact of the session, such as `@cwd`. A session cannot be logged differently, so the long
    texts of a trace of more than `most` bytes are cut (by default the options' limit, minus room for a key).
    """
    transcript = _transcript(options, request.facts)
    transcript.counts = deepcopy(request.counts)
    transcript.framework, transcript.agent, transcript.created_at = request.format, request.agent, request.created_at
    transcript.success = request.success
    if request.success is None and "success" not in options.fields:
        raise RunRefused("missing_value", "a line that may have the answer cannot be read: give --success")
    for message in request.messages:
        transcript.add(message)
    transcript.finish()
    if request.summary is not None or transcript.last_text is None:
        transcript.last_text = request.summary or ""
    trace = _as_json(_document_of(request.facts, None, transcript, options, request.key))
    trace, cut = fitted(trace, options.limits.max_bytes - KEY_ROOM if most is None else most)
    if cut:
        transcript.counts.change("characters cut, since the trace would be too large", cut)
    return _checked(trace, options.limits), transcript.counts


def fitted(trace: bytes, most: int) -> tuple[bytes, int]:
    """Return a trace of at most `most` bytes with its long texts cut, and the number of characters cut.

    If cutting is not enough, the trace is returned unchanged.
    """
    if len(trace) <= most:
        return trace, 0
    document = json.loads(trace)
    cut = shortened(document, len(trace), most) if document["steps"] else None
    return (trace, 0) if cut is None else (_as_json(cut[0]), cut[1])


def _transcript(options: Options, run: Any) -> Transcript:
    """Return an empty transcript; `run` may have the objective. Raises RunRefused."""
    transcript = Transcript(options.error_prefixes, options.max_content, frozenset(options.fields))
    if "objective" in options.fields:
        transcript.objective = options.fields["objective"].value(run)
    return transcript


def _count_unused(run: Any, used: set[FieldPath], options: Options, counts: Counts) -> None:
    if isinstance(run, dict):
        paths = [options.group_by, *(field.path for field in (*options.fields.values(), *options.keep.values()))]
        named = {entry[0] for path in paths if path is not None and (entry := find_field(run, path)) is not None}
        for name in unused_fields(run, used | named):
            counts.drop(name)


@dataclass
class Group:
    """A conversation in a log with one call per line."""

    options: Options
    last: Any = None  # its last line, whose fields the trace gets
    line: int = 0  # number of that line
    _counts: Counts = field(default_factory=Counts)
    _used: set[FieldPath] = field(default_factory=set)
    _conversation: Conversation = field(default_factory=Conversation)
    _digest: bytes = b""

    def add(self, run: Any, line: int) -> None:
        """Add a call. Raises RunRefused."""
        options, counts = self.options, Counts()
        form = options.form_of(run)
        if form == "atif":
            raise RunRefused("not_a_run", "a trajectory is a whole run; leave out --group-by")
        inputs, outputs, used = messages_of(run, form, options.messages, options.append, counts)
        canonical = _canonical(run)
        self._counts.dropped.update(counts.dropped)
        self._used |= used
        self._digest = sha256(self._digest + canonical.encode()).digest()
        self._conversation.add(inputs, outputs)
        _count_unused(run, self._used, options, self._counts)
        self.last, self.line = run, line

    def trace(self) -> tuple[bytes, Counts]:
        """Return the trace of the whole conversation as JSON, and what became of its parts. Raises RunRefused."""
        transcript = _transcript(self.options, self.last)
        transcript.counts = self._counts
        if self._conversation.objective is not None:
            transcript.add_user(self._conversation.objective)
        self._conversation.write(transcript)
        transcript.finish()
        document = _document_of(self.last, None, transcript, self.options, self._digest.hex())
        return _checked(_as_json(document), self.options.limits), transcript.counts


def group_name(run: Any, path: FieldPath) -> str:
    """Return the name of a call's conversation. Raises RunRefused."""
    entry = find_field(run, path)
    if entry is None or not isinstance(entry[1], str | int | float) or entry[1] == "":
        raise RunRefused("missing_value", f"the run has no text or number {'.'.join(path)}, which --group-by names")
    return str(entry[1])


def _document_of(run: Any, above: Any, transcript: Transcript, options: Options, content: str) -> dict[str, Any]:
    """Return the trace of a run. Raises RunRefused if a value is missing.

    `above`: the parent run, which provides the values that this one lacks. `content`: the input of its id's hash.
    """
    given = {name: value.value(run, above) for name, value in options.fields.items()}
    metadata = {
        "created_at": _required(given, "created_at", transcript.created_at, "no time"),
        "agent_id": given.get("agent_id", transcript.agent),
        "framework": given.get("framework", transcript.framework),
        "task_domain": given["domain"],
        "success": given.get("success", transcript.success),
        "quality_score": 0,
        "visibility": given["visibility"],
        "privacy_level": given["privacy"],
    }
    return {
        "@context": CONTEXT,
        "@type": "ReasoningTrace",
        "id": f"kp:trace:{uuid.uuid5(ID_NAMESPACE, content)}",
        "metadata": {name: value for name, value in metadata.items() if value is not None},
        "task": {"objective": _required({}, "objective", transcript.objective, "no text of a user")},
        "steps": transcript.steps,
        "outcome": {
            "result_summary": _required(given, "result_summary", transcript.last_text, "no text of the agent"),
            "confidence": given["confidence"],
        },
        **{name: value.value(run, above) for name, value in options.keep.items()},
    }


def _required(given: Mapping[str, Any], name: str, logged: str | None, missing: str) -> Any:
    value = given.get(name, logged)
    if value is None:
        raise RunRefused("missing_value", f"the run has {missing}: give {option_name(name)}")
    return value


def _canonical(run: Any) -> str:
    try:
        text = json.dumps(run, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except RecursionError:
        raise RunRefused("too_deep", "the run is nested too deeply") from None
    except UnicodeEncodeError:
        raise RunRefused("not_utf8", "a text has half of a surrogate pair (\\ud800 to \\udfff) alone") from None
    return text


def _as_json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _checked(raw: bytes, limits: Limits) -> bytes:
    """Return the trace unchanged. Raises RunRefused if it is invalid."""
    try:
        parse_trace(raw, limits)
    except InvalidTrace as error:
        hint = "; --max-content cuts long steps" if error.reason == "too_large" else ""
        raise RunRefused(str(error.reason), f"{error}{hint}") from None
    return raw
