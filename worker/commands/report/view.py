"""A report for people: a short text for a terminal of 80 columns, and one HTML page with plots.

The page is a single file that loads nothing, and depends only on the numbers. It needs the extra `report`, whose
libraries are imported only for a page. Colours are names of CSS variables, with values for light, dark and print.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from worker.commands.report.numbers import (
    CHANCE,
    NEAR,
    THRESHOLDS,
    Basis,
    Bin,
    Domain,
    Interval,
    LeftOut,
    Outcomes,
    Proposal,
    ProposedThreshold,
    Report,
    Scores,
    Trace,
)
from worker.commands.shared.console import text_console
from worker.commands.shared.shown import (
    columns,
    cut_text,
    duration,
    fixed,
    percent,
    shown_name,
    shown_score,
    shown_text,
    shown_threshold,
)
from worker.commands.shared.thresholds import FEW_TRACES, LEAST_TRACES, interval_text, too_few
from worker.core.records import ACCEPTED
from worker.core.scoring import DEFAULT_PROFILE
from worker.core.terminal import clean, number_of
from worker.version import __version__

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes

SHOWN: Final = 20
"""Domains without a profile, and files, that are listed; the others are counted."""

DECISIONS: Final = 10
"""Changed decisions that are listed."""

TABLE: Final = range(20, 36, 2)
"""The places of the thresholds in the table: 0.5 to 0.85 in steps of 0.05."""

_BARS: Final = " ▁▂▃▄▅▆▇█"


def left_out(it: Report) -> Iterator[str]:
    """Yield lines about the skipped documents."""
    if it.repeated:
        yield f"repeated documents (identical bytes), counted once: {it.repeated:,}"
    for what, documents in _left_out(it):
        yield f"skipped, since {what}: {documents.count:,}"
        yield from (f"  {where}: {reason}" for where, reason in documents.first)
        if documents.count > len(documents.first):
            yield f"  and {documents.count - len(documents.first):,} more"


def _left_out(it: Report) -> list[tuple[str, LeftOut]]:
    """Return why documents were skipped, for each reason that there is."""
    reasons = (
        ("they cannot be read", it.unreadable),
        ("their score does not follow from their own figures", it.inconsistent),
    )
    return [(what, documents) for what, documents in reasons if documents.count]


# -- in a terminal


def print_report(it: Report) -> None:
    """Print the report; the lines of the config file are not wrapped, so that they can be pasted."""
    console = text_console()
    for part in _parts(it, bars=not console.options.ascii_only):
        console.print(part)
    if it.config:
        console.print("\nTo use it, paste this into the config file (--config FILE, KP_CONFIG):", style="bold")
        console.print(Text(it.config), soft_wrap=True)
    elif it.config is not None:
        console.print("\nThese are the built-in threshold and profiles: there is nothing to set.", style="bold")


def _parts(it: Report, *, bars: bool) -> Iterator[Any]:
    yield Text(headline(it), "bold")
    yield from (Text(f"{note}.", "yellow") for note in warnings(it))
    rows = [it.total, *it.domains]
    if changes(it):
        yield from _changed(it, rows)
    elif it.share is None and it.outcome is None:
        yield from _scores(rows, bars=bars)
    if it.other_domains and (changes(it) or (it.share is None and it.outcome is None)):
        yield Text(f"{number_of(it.other_domains, 'smaller domain is', 'smaller domains are')} in one row.", "dim")
    if it.share is not None:
        yield Text(f"\n{share_headline(it.share, it.total.traces)}", "bold")
        yield _table(("domain", "traces", "threshold", "95% interval", "accepted"), (
            [_domain(row.domain), f"{row.traces:,}", _arrow(f"{row.threshold_before!r}", f"{row.threshold!r}"),
             "" if row.interval is None else interval_text(row.interval),
             _arrow(*(percent(count / row.traces) for count in (row.accepted_before, row.accepted)))]
            for row in it.share.domains
        ))  # fmt: skip
        yield from (Text(f"  {note}.") for note in share_notes(it))
    yield from _names(it) if it.outcome is None else _outcome_parts(it.outcome)


def _scores(rows: Sequence[Domain], *, bars: bool) -> Iterator[Any]:
    heads = ("domain", "traces", "threshold", "accepted", "median", *(["scores, 0 to 1"] if bars else []))
    yield ""
    yield _table(heads, (
        [_domain(row.domain), f"{row.traces:,}", _threshold(row.before), percent(row.before.accepted / row.traces),
         shown_score(row.before.quantiles[2], row.before.threshold), *([_bars(row.before.histogram)] if bars else [])]
        for row in rows
    ))  # fmt: skip
    yield Text("\nShare that reaches a threshold", "bold")
    yield _table(("domain", *(f"{THRESHOLDS[place]:.2f}" for place in TABLE)), (
        [_domain(row.domain), *(percent(row.before.reaching[place]) for place in TABLE)] for row in rows
    ))  # fmt: skip


def _names(it: Report) -> Iterator[Text]:
    without = [
        (f"{shown_name(each.name)}: {number_of(each.traces, 'trace')}", each.near) for each in it.without_profile
    ]
    unused = [(shown_name(each.name), each.near) for each in it.unused_profiles]
    for title, named in (
        ("Domains without a profile (they take default)", without),
        ("Profiles that no trace takes", unused),
    ):
        if named:
            yield Text(f"\n{title}", "bold")
            for line, near in named[:SHOWN]:
                yield Text(f"  {line}" + ("" if near is None else f"; did you mean {shown_name(near)}?"))
            if len(named) > SHOWN:
                yield Text(f"  and {len(named) - SHOWN:,} more")


def headline(it: Report) -> str:
    """Return what there is, in two lines."""
    near, total = it.near_duplicates, it.total
    return (
        f"{number_of(total.traces, 'trace')} of {shown_text(it.source)}, {_period(it)}\n"
        f"accepted: {total.before.accepted:,} ({percent(total.before.accepted / total.traces)}); near-duplicates "
        f"(similarity {NEAR} or more): {near.traces:,}, {near.accepted:,} of them accepted"
    )


def _period(it: Report) -> str:
    """Return the stream times of the first and last trace."""
    first, last = (time[:16].replace("T", " ") for time in (it.first, it.last))
    return f"{first} UTC" if first == last else f"{first} to {last.removeprefix(first[:11])} UTC"


def warnings(it: Report) -> Iterator[str]:
    """Yield what a reader of the figures must know."""
    if len(it.embedders) > 1:
        made = "; ".join(f"{maker}: {count:,}" for maker, count in it.embedders)
        yield f"scored in {len(it.embedders)} ways: {made}. Scores of different models are not comparable"
    if it.changed_within:
        names = ", ".join(map(shown_name, it.changed_within))
        yield f"threshold or weights changed within: {names}. The threshold shown is the last one"
    if it.hidden_text:
        marks = ", ".join(f"{rule} {count:,}" for rule, count in it.hidden_text.items())
        yield f"traces with hidden text, by the screen's rule: {marks}"


def changes(it: Report) -> str:
    """Return what the settings change, in a sentence; "" if nothing was tried, or a share alone changes nothing."""
    total = it.total
    if it.changes is None or (it.share is not None and not total.to_accepted + total.to_rejected):
        return ""
    before, after = (
        f"{side.accepted:,} ({percent(side.accepted / total.traces)})" for side in (total.before, total.after)
    )
    return f"Accepted with these settings: {before} -> {after}"


def _changed(it: Report, rows: Sequence[Domain]) -> Iterator[Any]:
    total, changed_by = it.total, it.changes
    changed = total.to_accepted + total.to_rejected
    yield Text(f"\n{changes(it)}" if changed else "\nWith these settings no decision changes.", "bold")
    if changed_by is None or not changed:
        return
    if changed_by.same_share is not None and total.before.accepted != total.after.accepted:
        yield Text(f"one threshold for all, {changed_by.same_share!r}, would accept as many as now")
    yield ""
    yield _table(("domain", "traces", "threshold", "accepted", "become\naccepted", "become\nrejected"), (
        [_domain(row.domain), f"{row.traces:,}", _arrow(_threshold(row.before), _threshold(row.after)),
         _arrow(*(percent(side.accepted / row.traces) for side in (row.before, row.after))),
         Text(f"{row.to_accepted:,}", "green" if row.to_accepted else "dim"),
         Text(f"{row.to_rejected:,}", "red" if row.to_rejected else "dim")]
        for row in rows
    ))  # fmt: skip
    more = f", the first {DECISIONS} (--json has more)" if changed > DECISIONS else ""
    yield Text(f"\nDecisions that change: {changed:,}{more}", "bold")
    yield _table(("trace", "domain", "score", "decision"), (
        [cut_text(shown_text(each.id.removeprefix("kp:trace:")), 36), cut_text(shown_name(each.domain), 12),
         score_change(each),
         Text(each.after.decision, "green" if each.after.decision == ACCEPTED else "red")]
        for each in changed_by.decisions[:DECISIONS]
    ))  # fmt: skip


def score_change(it: Trace) -> str:
    """Return a trace's score before and after; an unchanged one with the digits that both thresholds need."""
    before, after = (shown_score(side.score, side.threshold) for side in (it.before, it.after))
    return max(before, after, key=len) if it.before.score == it.after.score else _arrow(before, after)


def share_headline(it: Proposal, traces: int) -> str:
    """Return what is proposed."""
    before, after = (percent(count / traces) for count in (it.accepted_before, it.accepted))
    return f"Thresholds for the best {it.share * 100:g}% of each domain; accepted of all: {before} -> {after}"


def share_notes(it: Report) -> Iterator[str]:
    """Yield notes on the proposed thresholds."""
    if it.share is None:
        return
    for row in it.share.domains:
        yield from _about_domain(row)
    proposed = [row for row in it.share.domains if row.interval is not None]
    named = [shown_name(row.domain) for row in proposed if row.profile == DEFAULT_PROFILE != row.domain]
    if named:
        more = f" and {len(named) - SHOWN:,} more" if len(named) > SHOWN else ""
        yield (
            f"without a profile: {', '.join(named[:SHOWN])}{more}. Such domains share the threshold of default; the "
            "config gives each its own profile, with the weights of default"
        )
    if any(row.domain == DEFAULT_PROFILE for row in it.share.domains):
        yield "default: its threshold also applies to every domain without a profile"
    yield from (
        f"{shown_name(name)}: the name is too long for a profile; this domain keeps its threshold"
        for name in it.share.cut
    )
    if it.share.other_domains:
        smaller = number_of(it.share.other_domains, "smaller domain keeps its", "smaller domains keep their")
        yield f"{smaller} threshold: fewer than {FEW_TRACES} traces"


def _about_domain(row: ProposedThreshold) -> Iterator[str]:
    name = shown_name(row.domain)
    if row.traces < LEAST_TRACES:
        yield f"{name}: {too_few(row.traces)}; it keeps its threshold"
    elif row.traces < FEW_TRACES:
        yield f"{name}: {row.traces} traces are few; the threshold may accept another share of the next ones"
    if row.wanted is not None and row.above is not None and row.accepted > row.wanted:
        yield (
            f"{name}: {row.accepted - row.above:,} traces tie, so {row.accepted:,} are accepted, not {row.wanted:,}; "
            f"a threshold above the tie accepts {row.above:,}"
        )


def _outcome_parts(it: Outcomes) -> Iterator[Any]:
    yield Text(f"\n{outcome_headline(it)}", "bold")
    yield ""
    if len(it.files) > 1:
        yield _table(("file", "runs", "succeeded", "claims", "of them true"), (
            [cut_text(shown_name(part.name), 32), f"{part.runs:,}", percent(part.succeeded), f"{part.claims:,}",
             "-" if part.true is None else percent(part.true)]
            for part in it.files
        ))  # fmt: skip
        yield ""
    bases = _bases(it)
    yield _table(("confidence", "AUC of the score", "of the confidence", "best fifth", "novelty"), (
        [f"{basis.name}, {scope.name}", _cell(scope.auc_score), _cell(scope.auc_confidence), _cell(scope.best_fifth),
         f"{scope.best_novelty:.2f}" if scope is basis.scopes[0] else ""]
        for basis in [*bases, *([it.weighted] if it.weighted else [])] for scope in basis.scopes
    ))  # fmt: skip
    yield ""
    yield _table(("", "accepted", "of them succeeded", "Brier", "constant", "ECE"), (
        [basis.name, _cell(basis.accepted), _cell(basis.succeeded), _cell(basis.brier), f"{basis.scopes[0].base:.3f}",
         f"{basis.ece:.3f}"]
        for basis in bases
    ))  # fmt: skip
    yield ""
    yield from (Text(clean(sentence)) for sentence in sentences(it))


def _bases(it: Outcomes) -> list[Basis]:
    return [it.stated] if it.record is None else [it.stated, it.record]


def outcome_headline(it: Outcomes) -> str:
    """Return what was recorded."""
    tasks = f"{it.tasks:,} tasks ({shown_text(it.task)})" if it.task else "each run a task"
    return f"{it.runs:,} runs, {percent(it.succeeded)} succeeded by {shown_text(it.outcome)}; {tasks}"


def sentences(it: Outcomes) -> Iterator[str]:
    """Yield sentences on what the figures show, and what they do not."""
    if it.judging is not None:
        yield (
            f"record: verdicts on {it.judging.share * 100:g}% of the runs, drawn at random, {it.judging.late} runs "
            f"late. All files are mixed; means over {it.orders} random orders, of each the last {it.measured:,} runs."
        )
    elif it.record is not None:
        yield "record: the verdicts on KP_JUDGED_TOPIC that stand before each run."
    yield _about_score(it.stated, "With the stated confidence")
    if it.record is not None:
        yield _about_score(it.record, "By the record")
        if it.gain is not None:
            shown = "no difference is shown" if it.gain.low <= 0 <= it.gain.high else "a difference is shown"
            yield f"The record changes the AUC of the score by {_signed(it.gain)}; {shown}."
        for scope in it.record.scopes[1:]:
            if scope.auc_confidence is not None and scope.auc_confidence.low <= CHANCE:
                yield (
                    f"{scope.name.capitalize()}, the record's AUC is {scope.auc_confidence}: it tells agents and "
                    "fleets apart rather than runs."
                )
    if it.weighted is not None and it.record is not None and it.weighted_gain is not None:
        now, then = it.record.scopes[0], it.weighted.scopes[0]
        pays = "; docs/verdicts.md has such weights" if it.weighted_gain.low > 0 else "; no difference is shown"
        yield (
            f"Weights where the outcome has 0.6 change the successes in the best fifth by {_signed(it.weighted_gain)}, "
            f"and its novelty from {now.best_novelty:.2f} to {then.best_novelty:.2f}{pays}."
        )
    yield from map(_about_threshold, _bases(it))
    if it.admissions:
        yield f"Admissions of failure: {it.admissions:,}, of which {percent(it.admissions_true or 0)} failed."
    yield "Intervals are 95 %, over tasks: other agents may differ by more. ECE has none, since resampling raises it."
    if it.runs < 50:  # with fewer runs, an AUC's interval is wider than .3: it shows nothing
        yield f"{it.runs} runs are few, so the intervals themselves are rough."


def _about_score(basis: Basis, how: str) -> str:
    auc = basis.scopes[0].auc_score
    if auc is None:
        return f"{how}, there is nothing to compare."
    start = f"{how}, the score's AUC is {auc}: "
    if auc.low > CHANCE:
        return start + f"better than chance ({CHANCE})."
    if auc.high < CHANCE:
        return start + f"worse than chance ({CHANCE}): runs that failed score higher."
    return start + f"the interval holds {CHANCE}, so it is not shown to tell success from failure."


def _about_threshold(basis: Basis) -> str:
    now = "" if basis.succeeded is None else f" ({percent(basis.succeeded.value)} of them succeeded)"
    start, it = f"{basis.name}: {percent(basis.accepted.value)} are accepted{now}. ", basis.better
    if it is None or it.gain is None or it.gain.low <= 0:
        why = "" if it is None or it.gain is None else f" (on other tasks, {_signed(it.gain)})"
        return start + f"No threshold reliably separates successes from failures{why}."
    succeeded = "-" if it.succeeded is None else it.succeeded
    return (
        start + f"{it.threshold:.3f} would have been better: chosen on other tasks, such a threshold accepts "
        f"{percent(it.accepted.value)}, of which {succeeded} succeeded."
    )


def _signed(it: Interval) -> str:
    value, low, high = (round(number, 3) + 0.0 for number in (it.value, it.low, it.high))  # no -0.000
    return f"{value:+.3f} ({low:+.3f} to {high:+.3f})"


def _cell(it: Interval | None) -> str:
    return "-" if it is None else f"{it.value:.3f} {it.low:.3f}-{it.high:.3f}"


_LEFT: Final = {"", "domain", "trace", "decision", "file", "confidence", "scores, 0 to 1"}
"""Columns of text."""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Any:
    table = columns(*heads, right={*heads} - _LEFT)
    for row in rows:
        table.add_row(*(Text(clean(cell)) if isinstance(cell, str) else cell for cell in row))
    return table


def _domain(name: str) -> str:
    return cut_text(shown_name(name), 16)


def _threshold(it: Scores) -> str:
    return "" if it.threshold is None else shown_threshold(it.threshold)


def _arrow(before: str, after: str) -> str:
    """Return `before -> after`, or just `before` if they are equal or one of them is missing."""
    return before if before == after or not (before and after) else f"{before} -> {after}"


def _bars(counts: Sequence[int]) -> str:
    """Draw a histogram in half as many characters."""
    pairs = [one + other for one, other in zip(counts[::2], counts[1::2], strict=True)]
    most = max(pairs) or 1
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // most)] for count in pairs)


# -- the page

SERIES: Final = 8
"""Number of colours for curves and rows; a ninth would be hard to distinguish."""

# matplotlib accepts only real colours: each variable has one that is used for nothing else.
_VARIABLES: Final = {f"#0101{index:02x}": f"var(--{name})" for index, name in enumerate(
    ("ink", "muted", "line", "yes", "no", "mark", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7")
)}  # fmt: skip
COLOURS: Final = {variable[6:-1]: colour for colour, variable in _VARIABLES.items()}
STYLE: Final[dict[Any, Any]] = {  # matplotlib's type is a Literal of all its 300 names
    "svg.fonttype": "none",  # text stays text: small and searchable
    "svg.hashsalt": "kp-worker",  # the same input gives the same bytes
    "font.size": 9,
    "axes.edgecolor": COLOURS["line"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": COLOURS["line"],
    "grid.linewidth": 0.6,
    "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"],
    "xtick.labelcolor": COLOURS["muted"],
    "ytick.labelcolor": COLOURS["muted"],
    "text.color": COLOURS["ink"],
    "path.simplify": False,
}


def render(it: Report) -> str:
    """Return the page; it depends only on the numbers."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=lambda value: clean(value, "\n") if type(value) is str else value,
    )  # fmt: skip
    environment.filters |= {
        "n": lambda value: f"{value:,}", "pct": percent, "f2": lambda value: fixed(value, 2),
        "f3": lambda value: fixed(value, 3), "duration": duration, "text": shown_text, "name": shown_name,
        "score": shown_score, "threshold": shown_threshold, "score_change": score_change,
    }  # fmt: skip
    template = environment.from_string(files("worker").joinpath("data/report.html.j2").read_text("utf-8"))
    curves = [it.total] if len(it.domains) == 1 else it.domains[: SERIES if not it.other_domains else -1][:SERIES]
    bases = [] if it.outcome is None else _bases(it.outcome)
    outcome = it.outcome
    return template.render(
        r=it, version=__version__, shown=SHOWN, decisions=DECISIONS, near=NEAR, period=_period(it), curves=curves,
        table=[(THRESHOLDS[place], place) for place in TABLE], warnings=list(warnings(it)), left_out=_left_out(it),
        changed=changes(it), notes=list(share_notes(it)), bases=bases, plots=_plots(it, curves, bases),
        share_headline="" if it.share is None else share_headline(it.share, it.total.traces),
        outcome_headline="" if outcome is None else outcome_headline(outcome),
        told=[] if outcome is None else list(sentences(outcome)),
    )  # fmt: skip


def _plots(it: Report, curves: Sequence[Domain], bases: Sequence[Basis]) -> dict[str, Any]:
    sides = ("before", "after") if changes(it) else ("before",)
    plots: dict[str, Any] = {
        side: _histogram(getattr(it.total, side).histogram, getattr(it.total, side).threshold) for side in sides
    }
    plots["rows"] = [
        [_histogram(row.histogram, row.threshold, small=True) for row in (getattr(domain, side) for side in sides)]
        for domain in it.domains
    ]
    plots["curves"] = _curves(curves)
    if it.share is not None and any(row.interval for row in it.share.domains):
        plots["thresholds"] = _intervals(
            [None if row.interval is None else (row.threshold, *row.interval) for row in it.share.domains],
            (1, 0), [row.threshold_before for row in it.share.domains],
        )  # fmt: skip
    if bases:
        aucs = [scope.auc_score for basis in bases for scope in basis.scopes]
        plots["auc"] = _intervals([None if auc is None else (auc.value, auc.low, auc.high) for auc in aucs], (0.3, 0.7))
        plots["calibration"] = [_calibration(basis.bins) for basis in bases]
    return plots


class _Plot:
    """One plot, as an SVG element that needs no escaping; the same figures give the same text."""

    def __init__(self, width: float, height: float) -> None:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        self._context = mpl.rc_context(STYLE)
        self._context.__enter__()
        self._figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02))
        self._figure.patch.set_visible(False)
        self.axes: Axes = self._figure.subplots()
        self.axes.patch.set_visible(False)
        self.svg: Markup

    def __enter__(self) -> _Plot:
        return self

    def __exit__(self, *_: object) -> None:
        from markupsafe import Markup

        out = io.StringIO()
        self._figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        self._context.__exit__(None, None, None)
        text = out.getvalue()
        text = text[text.index("<svg") :].strip()
        text = re.sub(r"<!--.*?-->\s*", "", text)
        text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
        # Only clip paths and markers are referenced, and their ids are hashes of their content; other ids repeat.
        text = re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", text)
        text = re.sub(r"font: [^;]*px [^;\"]*", lambda match: match[0].split("'")[0] + "system-ui, sans-serif", text)
        self.svg = Markup(re.sub("#0101[0-9a-f]{2}", lambda match: _VARIABLES[match[0]], text))  # noqa: S704 our own SVG


def _histogram(counts: Sequence[int], threshold: float | None, *, small: bool = False) -> Markup:
    """Draw the distribution of scores, in bars of equal width.

    Bars at or above the threshold have another colour; a bar belongs to the side of its middle, which is exact if the
    threshold falls between two bars.
    """
    from matplotlib.ticker import MaxNLocator

    edges = [edge / len(counts) for edge in range(len(counts) + 1)]
    with _Plot(*((2.4, 0.5) if small else (4.4, 2.2))) as plot:
        axes = plot.axes
        for side, chosen in (("no", False), ("yes", True)):
            bars = [count if ((edge + 0.5 / len(counts) >= (2 if threshold is None else threshold)) is chosen) else 0
                    for count, edge in zip(counts, edges, strict=False)]  # fmt: skip
            axes.stairs(bars, edges, fill=True, color=COLOURS[side])
        if threshold is not None:
            axes.axvline(threshold, color=COLOURS["mark"], linewidth=1, linestyle="--")
        axes.set_xlim(0, 1)
        axes.set_ylim(bottom=0)
        if small:
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines["left"].set_visible(False)
        else:
            axes.grid(axis="y")
            axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    return plot.svg


def _curves(domains: Sequence[Domain]) -> Markup:
    """Draw the share that reaches each threshold, one line per domain."""
    from matplotlib.ticker import PercentFormatter

    with _Plot(4.4, 2.2) as plot:
        axes = plot.axes
        for index, domain in enumerate(domains):
            axes.plot(THRESHOLDS, domain.before.reaching, color=COLOURS[f"s{index}"], linewidth=1.3)
        for threshold in sorted({it.before.threshold for it in domains if it.before.threshold is not None}):
            axes.axvline(threshold, color=COLOURS["mark"], linewidth=1, linestyle="--")
        axes.set_xlim(0.2, 1)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.grid()
    return plot.svg


def _intervals(
    intervals: Sequence[tuple[float, float, float] | None], limits: tuple[float, float], marks: Sequence[float] = ()
) -> Markup:
    """Draw figures with their intervals (value, low, high) on one axis, the first one at the top.

    `limits`: the least range of the axis. `marks`: a value to compare with for each row, drawn as a dash.
    """
    shown = [it for it in intervals if it is not None]
    with _Plot(4.4, 0.5 + 0.28 * len(intervals)) as plot:
        axes = plot.axes
        for place, interval in enumerate(intervals):
            if interval is not None:
                value, low, high = interval
                colour = COLOURS[f"s{place % SERIES}"]
                axes.plot([low, high], [-place, -place], color=colour, linewidth=2)
                axes.plot([value], [-place], "o", color=colour, markersize=5)
        for place, mark in enumerate(marks):
            axes.plot([mark, mark], [-place - 0.3, -place + 0.3], color=COLOURS["mark"], linewidth=2)
        axes.set_xlim(
            min([limits[0], *(low for _, low, _ in shown), *marks]) - 0.01,
            max([limits[1], *(high for _, _, high in shown), *marks]) + 0.01,
        )
        axes.set_ylim(0.6 - len(intervals), 0.6)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
    return plot.svg


def _calibration(bins: Sequence[Bin]) -> Markup:
    """Draw the share of successes over confidence; on the diagonal the confidence is right."""
    with _Plot(3.2, 3.0) as plot:
        axes = plot.axes
        axes.plot([0, 1], [0, 1], color=COLOURS["mark"], linewidth=1, linestyle="--")
        for each in bins:
            it = each.succeeded
            axes.plot([each.confidence, each.confidence], [it.low, it.high], color=COLOURS["s0"], linewidth=2)
            axes.plot([each.confidence], [it.value], "o", color=COLOURS["s0"], markersize=4 + 8 * each.share)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.grid()
        axes.set_xlabel("confidence")
        axes.set_ylabel("succeeded")
    return plot.svg
