"""Terminal output shared by `kp-worker demo` and `broker`: steps with progress, lines to copy, Ctrl-C."""

import contextlib
import io
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from worker.core.terminal import clean
from worker.lab.broker.embedded_kafka import KAFKA_VERSION, EmbeddedKafka


def print_lines(console: Console, *lines: str) -> None:
    """Print lines for copying: neither wrapped nor styled."""
    for line in lines:
        console.print(f"  {line}", soft_wrap=True, markup=False, highlight=False)


def print_error(console: Console, error: Exception) -> None:
    """Print an error without wrapping it."""
    console.print(Text(clean(f"Error: {error}", "\n"), "red"), soft_wrap=True)


def wide_console() -> Console:
    """Return the console, wide enough for the tables if the output is not a terminal; silence Kafka's clients."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # traces are in all languages, terminals are not
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=100)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and a closed terminal stop everything in order, like Ctrl-C."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def step(console: Console, name: str) -> Iterator[Callable[[str], None]]:
    """Show a step while it runs, and one line when it is done; yield a function that sets the text."""
    began = time.monotonic()
    now = ""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name)

        def say(text: str) -> None:
            nonlocal now
            now = text
            progress.update(task, description=f"{name:<7} {text}")

        yield say
    done = Text(f"  {name:<7} {now}, {time.monotonic() - began:.1f} s")
    console.print(Text("ok", "green") + done, soft_wrap=True)


@contextlib.contextmanager
def running_kafka(console: Console, embedded: EmbeddedKafka) -> Iterator[EmbeddedKafka]:
    """Start the broker, showing its progress; stop it at the end."""
    with contextlib.ExitStack() as stack:
        with step(console, "kafka") as say, _LogAsProgress(console, say):
            say(f"starting Apache Kafka {KAFKA_VERSION}")
            stack.enter_context(embedded)
            say(f"Apache Kafka {KAFKA_VERSION} at {embedded.bootstrap_servers}")
        yield embedded


class _LogAsProgress(logging.Handler):
    """Shows the broker's log (the one download of the jars) as the step's progress; as lines in a pipe."""

    def __init__(self, console: Console, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say if console.is_terminal else lambda text: console.print(Text(text), soft_wrap=True)
        self._log = logging.getLogger("worker")

    def __enter__(self) -> None:
        self._log.setLevel(logging.INFO)
        self._log.addHandler(self)

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._say(clean(record.getMessage()))
