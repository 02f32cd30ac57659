"""The output of `kp-worker cache`: tables of entries and statistics, cut only on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from worker.commands.cache.caches import NearestReport, RecordRow, Row, Stats
from worker.commands.shared.console import text_console
from worker.commands.shared.shown import duration, shown_text
from worker.commands.shared.table import PlainTable
from worker.core.capacity import megabytes
from worker.core.terminal import number_of


def print_entries(rows: Sequence[Row], total: int) -> None:
    """Print entries, newest first, and their number."""
    table = _table({"part": 4, "sequence": 8, "offset": 8, "stream time": 19, "age": 8}, "trace")
    for row in rows:
        table.add_row(
            str(row.partition), str(row.sequence), str(row.offset), _time(row.stream_time), _age(row.age_seconds),
            *_ids(row.agent_id, row.trace_id),
        )  # fmt: skip
    _print_listed(table, len(rows), total, "live entry", "live entries")


def print_records(rows: Sequence[RecordRow], total: int) -> None:
    """Print track records, and their number."""
    table = _table({"part": 4, "judged": 6, "succeeded": 9, "used": 6}, "domain")
    for row in rows:
        table.add_row(
            str(row.partition), str(row.judged), f"{row.succeeded:g}", f"{row.used:.4f}",
            *_ids(row.agent_id, row.task_domain),
        )  # fmt: skip
    _print_listed(table, len(rows), total, "track record", "track records")


def _print_listed(table: PlainTable, shown: int, total: int, one: str, many: str) -> None:
    console = text_console()
    if shown:
        console.print(table)
    more = "" if shown == total else f", {shown} shown (--limit 0: all)"
    console.print(f"{number_of(total, one, many)}{more}", soft_wrap=True)


def print_nearest(report: NearestReport) -> None:
    """Print novelty, and the nearest entries."""
    console = text_console()
    compared = number_of(report.compared, "live entry", "live entries")
    if not report.nearest:
        console.print(f"novelty {report.novelty:g}: there is no live entry to compare with")
        return
    cut = "; the text is longer than the model reads (KP_MAX_TOKENS)" if report.truncated else ""
    cut += "; the objective is longer than the model reads" if report.objective_truncated else ""
    told = f"novelty {report.novelty:.4f} = 1 - {report.nearest[0].similarity:.4f}, compared with {compared}{cut}"
    console.print(told, soft_wrap=True)
    table = _table({"similarity": 10, "part": 4, "offset": 8, "age": 8}, "trace")
    for row in report.nearest:
        table.add_row(
            f"{row.similarity:.4f}", str(row.partition), str(row.offset), _age(row.age_seconds),
            *_ids(row.agent_id, row.trace_id),
        )  # fmt: skip
    console.print(table)


def print_stats(rows: Sequence[Stats]) -> None:
    """Print the statistics of each partition, then skipped records, and advice."""
    names = ("partition", "entries", "evicted", "oldest", "stream time", "rate", "leave after")
    table = _table(dict.fromkeys(names, 0))
    for row in rows:
        rate, after = row.rate_per_second, row.leave_after_seconds
        table.add_row(
            str(row.partition),
            f"{row.entries}/{row.capacity}",
            str(row.evicted),
            "-" if row.oldest_age_seconds is None else _age(row.oldest_age_seconds),
            "-" if row.stream_time is None else _time(row.stream_time),
            "-" if rate is None else _rate(rate),
            "-" if after is None else f"{_age(after)}, {row.leave_by}",
        )
    console = text_console()
    console.print(table)
    for line in _notes(rows):
        console.print(Text(line), soft_wrap=True)


def _notes(rows: Sequence[Stats]) -> list[str]:
    size, records = sum(row.changelog_bytes for row in rows), sum(row.changelog_records for row in rows)
    memory = megabytes(rows[0].memory_bytes) if rows else ""
    stored = f"changelog: {number_of(records, 'record')}, {megabytes(size)}"
    lines = [f"{stored}; a full cache takes at most {memory} for each partition"]
    lines += [f"model: {shown_text(model)}" for model in sorted({row.model for row in rows if row.model})]
    for name, told in (("other_model", "another model"), ("other_pass", "another pass")):
        if count := sum(getattr(row, name) for row in rows):
            lines.append(f"skipped: {number_of(count, 'entry', 'entries')} of {told}")
    if count := sum(row.corrupt for row in rows):
        lines.append(f"skipped: {number_of(count, 'record that cannot be read', 'records that cannot be read')}")
    short = [row for row in rows if row.advice and row.leave_after_seconds is not None]
    for row in short:
        lines.append(
            f"partition {row.partition}: entries leave after {_age(row.leave_after_seconds or 0)}, the TTL is "
            f"{_age(row.ttl_seconds or 0)}: {row.advice}"
        )
    return lines


def _table(widths: Mapping[str, int], other: str = "") -> PlainTable:
    """Return a table with columns of these minimum widths; the agent and `other` share the rest of the line."""
    table = PlainTable(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name, width in widths.items():
        right = name not in ("stream time", "leave after")
        table.add_column(name, no_wrap=True, min_width=width or None, justify="right" if right else "left")
    if other:
        left = max(20, text_console().width - sum(widths.values()) - len(widths) - 1)
        table.add_column("agent", no_wrap=True, overflow="ellipsis", max_width=left // 3)
        table.add_column(other, no_wrap=True, overflow="ellipsis", max_width=left - left // 3)
    return table


def _ids(agent: str, trace: str) -> tuple[Text, Text]:
    """Return both without their common prefixes."""
    return Text(shown_text(agent.removeprefix("kp:agent:"))), Text(shown_text(trace.removeprefix("kp:trace:")))


def _rate(per_second: float) -> str:
    for factor, unit in ((1, "s"), (60, "min"), (3600, "h")):
        if per_second * factor >= 1 or unit == "h":
            break
    return f"{per_second * factor:.3g}/{unit}"


def _time(moment: str) -> str:
    return moment[:19].replace("T", " ")


def _age(seconds: float) -> str:
    return duration(1000 * seconds)
