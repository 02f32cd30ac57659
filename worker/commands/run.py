"""`kp-worker run`, `contribute` and `assemble`: they run until they are stopped.

1. listen: metrics and health answer from here on;
2. prepare: check settings and topics, load the model;
3. run the group member until SIGTERM, SIGINT or a failure;
4. stop: finish what is in flight, for at most KP_SHUTDOWN_TIMEOUT_SECONDS;
5. exit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NoReturn, Protocol

import click

from worker.commands.shared.console import Command, SettingsError, require_extra
from worker.commands.shared.options import read_settings, settings_options
from worker.version import __version__

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from worker.config import Settings
    from worker.observe.http_server import Page

log = logging.getLogger(__name__)


class SettingsHelp(Command):
    """Lists the settings at the end of its help, because they are the command's real options."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the name, default and meaning of each setting."""
        from worker.config import describe

        with formatter.section(
            "Settings (environment variables; in the config file and for --set in lower case without KP_)"
        ):
            formatter.write_dl([(f"{name}={default}", text) for name, default, text in describe()])


def stop_at_once() -> None:
    """Exit with code 0 on a signal until the process installs its own handlers (its imports take a second)."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


@click.command(cls=SettingsHelp)
@settings_options
def run() -> None:
    """Run the worker until SIGTERM or Ctrl-C.

    Exit codes: 0 stopped on request, everything taken is committed; 1 failed, a restart reads uncommitted records
    again; 2 wrong settings, topics or model.
    """
    stop_at_once()
    settings = read_settings()
    from worker.stream.worker import WorkerProcess

    run_service(settings, WorkerProcess(settings))


@click.command(cls=SettingsHelp)
@settings_options
def contribute() -> None:
    """Post accepted traces to the registry until SIGTERM or Ctrl-C, redacted, each once.

    Needs KP_REGISTRY_URL, and KP_REGISTRY_KEY_FILE or KP_REGISTRY_KEY. Exit codes: 0 stopped on request, everything
    sent is recorded; 1 failed, a restart continues; 2 wrong settings or topics, or the registry rejects the key.
    """
    stop_at_once()
    settings = read_settings()
    from worker.contribute.contributor import ContributeProcess

    run_service(settings, ContributeProcess(settings))


@click.command(cls=SettingsHelp)
@click.option("--try", "sample", metavar="FILE|TOPIC", help="Show the traces of a topic's newest runs, or of a file "
              "with one OTLP/JSON record per line, and what they lack; write nothing.")  # fmt: skip
@click.option("--records", type=click.IntRange(1), default=200, show_default=True, metavar="N",
              help="With --try: records per partition.")  # fmt: skip
@settings_options
def assemble(sample: str | None, records: int) -> None:
    """Make traces from OpenTelemetry spans until SIGTERM or Ctrl-C, one for each run of an agent.

    Needs KP_ASSEMBLE_CONFIDENCE, KP_ASSEMBLE_DOMAIN, KP_ASSEMBLE_VISIBILITY and KP_ASSEMBLE_PRIVACY. Exit codes: 0
    stopped on request, everything taken is committed; 1 failed, a restart continues; 2 wrong settings or topics. With
    --try: 0 a trace would come out, 1 none.
    """
    stop_at_once()
    settings = read_settings()
    require_extra("otlp", SettingsError)
    if sample is not None:
        from worker.commands.shared.preview import run_preview

        sys.exit(run_preview(settings, sample, records))
    from worker.assemble.assembler import AssembleProcess

    run_service(settings, AssembleProcess(settings))


# -- start and end of the three processes


class _Member(Protocol):
    """A member of a consumer group."""

    failed: asyncio.Event  # set together with `failure`

    @property
    def failure(self) -> BaseException | None: ...  # the first error

    async def run(self) -> None: ...  # until `stop` or a failure; finishes what is in flight, and leaves the group

    def stop(self) -> None: ...

    def stuck(self) -> str | None: ...  # what hangs, for liveness

    def not_ready(self) -> str | None: ...  # why no work gets done, for readiness


class _Service(Protocol):
    """The differences between the processes."""

    name: str  # of the command; empty for the worker
    registry: CollectorRegistry  # metrics
    pages: Mapping[str, Page]  # of the HTTP port, besides metrics and health
    phase: str  # what it does before it is a group member, for readiness
    finished: str  # what is true after a stop, for the log
    unfinished: str  # what becomes of uncommitted records, for the log
    wrong: tuple[type[BaseException], ...]  # failures of the member that mean exit code 2

    async def prepare(self, until_end: AsyncExitStack) -> _Member:
        """Return the member, not yet running; `until_end` closes its resources at the end. Raises ConfigError."""
        ...


def run_service(settings: Settings, service: _Service) -> NoReturn:
    """Run the service, and exit with its exit code."""
    from worker.observe import logs

    logs.configure(settings.log_level, settings.log_format)
    asyncio.run(_run(settings, service))


async def _run(settings: Settings, service: _Service) -> NoReturn:
    code = await _serve(settings, service)
    logging.shutdown()
    # Not sys.exit, and inside the loop: the exit must not wait for a thread, in which a model may hang.
    os._exit(code)


async def _serve(settings: Settings, service: _Service) -> int:
    from worker.config import ConfigError
    from worker.observe.http_server import HttpServer

    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_stop.set)
    member: _Member | None = None
    http = HttpServer(
        settings.http_host,
        settings.http_port,
        service.registry,
        healthy=lambda: None if member is None else member.stuck(),
        ready=lambda: service.phase if member is None else member.not_ready(),
        pages=service.pages,
        names=settings.status_hosts.split(","),
    )
    try:
        port = await http.start()  # 1
    except OSError as error:
        log.error("%s", http.cannot_listen(error))
        return 2
    program = f"kp-worker {__version__} {service.name}".rstrip()
    log.info("%s: metrics and health on http://%s:%d/metrics", program, settings.http_host, port)
    stop = asyncio.create_task(asked_to_stop.wait())
    async with AsyncExitStack() as until_end:
        until_end.push_async_callback(http.stop)
        preparing = asyncio.create_task(service.prepare(until_end))  # 2
        await asyncio.wait({preparing, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not preparing.done():
            preparing.cancel()
            return 0
        try:
            member = preparing.result()
        except ConfigError as error:
            log.error("%s", error)
            return 2
        return await _run_member(member, service, stop, settings.shutdown_timeout_seconds)


async def _run_member(member: _Member, service: _Service, stop: asyncio.Task[bool], timeout_seconds: float) -> int:
    from worker.kafka.errors import error_text

    running = asyncio.create_task(member.run())  # 3
    failing = asyncio.create_task(member.failed.wait())
    await asyncio.wait({running, failing, stop}, return_when=asyncio.FIRST_COMPLETED)
    failing.cancel()
    failure = member.failure or (running.exception() if running.done() else None)
    if failure is None:
        log.info("stopping: finishing the records taken")
    elif isinstance(failure, service.wrong):
        log.error("stopping: %s", failure)
    else:
        log.error("stopping: %s; %s", error_text(failure), service.unfinished)
    member.stop()
    await asyncio.wait({running}, timeout=timeout_seconds)  # 4
    if not running.done():
        if failure is None:
            log.error("stopping took longer than KP_SHUTDOWN_TIMEOUT_SECONDS; %s", service.unfinished)
        running.cancel()
        await asyncio.wait({running}, timeout=1.0)  # to leave the group: others then get the partitions at once
        return 1
    late = failure or member.failure or running.exception()
    if late is None:
        log.info("stopped: %s", service.finished)
        return 0
    if late is not failure:
        log.error("stopping: %s; %s", error_text(late), service.unfinished)
    return 2 if isinstance(late, service.wrong) else 1
