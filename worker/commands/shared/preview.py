"""`kp-worker assemble --try`: the traces that some runs would yield, and what they lack. Writes nothing."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from worker.assemble.steps import UnreadContent, rules_from
from worker.commands.shared.console import ArgumentError, open_file, write_line
from worker.commands.shared.json_lines import read_lines
from worker.commands.shared.session import Session, SessionError, read_to, run_session
from worker.commands.shared.shown import shown_text
from worker.config import ConfigError, Settings
from worker.core.terminal import clean, number_of
from worker.core.trace import parse_trace
from worker.kafka.assignment import fault_of
from worker.runs.fields import fault
from worker.runs.otlp.mapping import LACKS, Assembled, assembled
from worker.runs.otlp.rules import Rules
from worker.runs.otlp.spans import InvalidSpans, LogEvent, Span, decoded, is_complete

_LACKS = {**LACKS, "mapping_failed": "a bug in kp-worker; please report it, with the spans"}
"""Why a run yields no trace, in words."""


class Preview:
    """The records of a preview, and their runs. `lines` sets `traces` and `unread`."""

    def __init__(self, rules: Rules) -> None:
        self.traces = 0
        self.unread = UnreadContent()
        self._rules = rules
        self._records: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()
        self._keyed = True
        self._spans: dict[str, list[Span]] = defaultdict(list)
        self._logs: dict[str, list[LogEvent]] = defaultdict(list)

    def add(self, key: bytes | None, value: bytes) -> None:
        """Add a record."""
        try:
            record = decoded(value)
        except Exception as error:
            why = f"{error.reason}: {shown_text(error.message)}" if isinstance(error, InvalidSpans) else fault(error)
            self.add_unreadable(str(why))
            return
        self._records["otlp_json" if value.lstrip()[:1] == b"{" else "otlp_proto"] += 1
        if (bad := record.refused) is not None:
            self._bad[f"bad spans ({bad.error.reason}: {shown_text(bad.error.message)})"] += bad.count
        for span in record.spans:
            self._spans[span.trace_id].append(span)
        for log in record.logs:
            self._logs[log.trace_id].append(log)
        ids = {span.trace_id for span in record.spans} | {log.trace_id for log in record.logs}
        self._keyed &= ids <= {(key or b"").decode("ascii", "replace")}

    def add_unreadable(self, why: str) -> None:
        """Count a record that cannot be read."""
        self._records[f"unreadable ({why})"] += 1

    def lines(self) -> Iterator[str]:
        """Yield the lines to show: the runs, newest first, then totals."""
        lacking, hints = Counter[str](), set[str]()
        newest = sorted(
            self._spans.items(), key=lambda of_trace: max(span.end_ns for span in of_trace[1]), reverse=True
        )
        shown = unfinished = 0
        for trace_id, spans in newest:
            try:
                runs = assembled(spans, self._logs[trace_id], self._rules)
            except Exception as error:
                lacking["mapping_failed"] += 1
                yield f"{trace_id}: {number_of(len(spans), 'span')}: {fault(error)}"
                continue
            ended = is_complete((span.span_id, span.parent_id) for span in spans)
            unfinished += not ended
            for run in runs:
                hints.update(run.hints)
                if run.unread:
                    self.unread.add(run.unread)
                self.traces += run.value is not None
                if run.missing is not None:
                    lacking[run.missing] += 1
                if shown < 10 and run.missing != "not_a_run":
                    shown += 1
                    yield from _about(trace_id, len(spans), run, ended=ended)
        yield f"{number_of(sum(self._records.values()), 'record')}: " + (
            ", ".join(f"{number} {what}" for what, number in self._records.most_common()) or "none"
        )
        yield from (f"{number} {what}" for what, number in self._bad.most_common())
        traces = number_of(len(self._spans), "OpenTelemetry trace")
        yield f"{traces}, {unfinished} of them without their root or a parent"
        yield f"{number_of(self.traces, 'reasoning trace')} would come out"
        yield from (
            f"no trace for {number_of(number, 'run')}: {_LACKS[reason]}" for reason, number in lacking.most_common()
        )
        yield from (f"more could be captured: {shown_text(hint)}" for hint in sorted(hints))
        yield from self.unread.lines()
        if self._keyed and self._spans:
            yield "each record's key is its trace id; with KP_SPANS_KEYED=true assemble needs no intermediate topic"


def _about(trace_id: str, spans: int, run: Assembled, *, ended: bool) -> Iterator[str]:
    conventions = ", ".join(sorted(run.conventions)) or "no convention"
    state = "" if ended else ", not ended"
    yield f"{trace_id}: {number_of(spans, 'span')}, {conventions}, agent {shown_text(run.key)}{state}"
    if run.value is None:
        why = _LACKS.get(str(run.missing), str(run.missing))
        if run.unread and run.missing in ("no_content", "no_objective", "no_steps"):
            why = "its content seems to be in attributes that nothing reads, see below"
        yield f"  no trace: {why}"
        return
    trace = parse_trace(run.value)
    steps = Counter(step.type for step in trace.steps)
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(steps.items()))
    yield f"  objective: {shown_text(trace.task.objective)}"
    yield f"  steps: {kinds}; {'success' if trace.metadata.success else 'no success'}"
    yield f"  result: {shown_text(trace.outcome.result_summary) or 'none'}"
    if run.cut:
        yield f"  cut: {run.cut} characters of its longest texts, to fit KP_MAX_MESSAGE_BYTES"


def run_preview(settings: Settings, sample: str, records: int) -> int:
    """Preview a file or a topic; return the exit code. Raises ConfigError, CommandError, ArgumentError."""
    preview = Preview(rules_from(settings))
    try:
        if sample != "-" and "/" not in sample and not Path(sample).is_file():
            run_session(read_newest(settings, sample, records, preview))
        else:
            with open_file(sample) as file:
                for line in read_lines(file, settings.max_message_bytes):
                    if line.problem is not None:
                        preview.add_unreadable(line.problem)
                    elif not line.blank:
                        preview.add(None, line.data)
    except OSError as error:
        raise ArgumentError("--try", f"{sample}: {error.strerror}; a topic's name has no slash") from None
    except SessionError as error:
        error.message = f"{sample}: {error.message}"
        raise
    for text in preview.lines():
        write_line(clean(text))
    return 0 if preview.traces else 1


async def read_newest(settings: Settings, name: str, records: int, preview: Preview) -> None:
    """Add the newest records of each partition of a topic. Raises SessionError."""
    session = Session(settings)
    async with session.admin() as admin:
        topic = (await session.topics(admin, name)).get(name)
    if topic is None:
        raise ConfigError(
            f"{settings.bootstrap_servers} has no topic {name} yet, and there is no file {name}: let the Collector "
            "write to it, or create it with kp-worker topics --create; or correct the name"
        )
    async with session.connected(session.reader(tolerant=True)) as reader:
        oldest, ends = await reader.beginning_offsets(topic.tps), await reader.end_offsets(topic.tps)
        starts = {tp: max(oldest[tp], end - records) for tp, end in ends.items()}
        async for record in read_to(reader, starts, ends):
            if fault_of(record) is None:
                preview.add(record.key, record.value or b"")
