"""The checks of `kp-worker doctor`, in order; this module checks this machine, and `contribute` and `assemble`."""

import asyncio
import contextlib
import http.client
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

from aiokafka.errors import KafkaError
from prometheus_client import CollectorRegistry

from worker.commands.doctor.finding import Check, Exam, Finding, fail, ok, reading, warn
from worker.commands.doctor.kafka import check_kafka
from worker.commands.doctor.model import check_model
from worker.commands.doctor.traces import check_memory, check_outputs, check_verdicts
from worker.commands.shared.console import CommandError, require_extra
from worker.commands.shared.options import load_settings
from worker.config import ConfigError, Settings
from worker.config.keys import Token
from worker.contribute.registry import (
    Absent,
    Denied,
    Doubtful,
    HttpAnswer,
    Limited,
    RegistryClient,
    judge_look_up,
    registry_key,
    stated_rate,
)
from worker.embed.embedder import OFFICIAL_NAME, OFFICIAL_SHA256
from worker.embed.openvino_embedder import default_directory
from worker.kafka.connections import connected_admin, prepare_clients
from worker.kafka.errors import error_text
from worker.kafka.topics import CODECS, codec_problems, deleted_early
from worker.observe.metrics import ContributeMetrics
from worker.observe.tracing import start_tracing
from worker.stream.worker import START_CHECKS


async def examine(report: Callable[[Finding], None]) -> None:
    """Report the findings as they become known. Takes at most some 3 minutes, if nothing answers at all."""
    try:
        exam = Exam(load_settings(), report)
    except ConfigError as error:
        remedy = "correct it (kp-worker run --help lists all settings); nothing else was checked"
        for line in str(error).splitlines():
            report(fail("settings", line, remedy))
        return
    for check in CHECKS:
        await check(exam)


async def check_settings(exam: Exam) -> None:
    """Check the settings, and what else would make a worker exit with code 2 at startup."""
    loaded = exam.loaded
    for text in loaded.warnings:
        exam.warn("settings", text, "correct or remove it: it has no effect")
    given = [name if origin in loaded.files else origin for name, origin in loaded.given().items()]
    read = f" ({', '.join(loaded.files)} was read)" if loaded.files else ""
    exam.ok("settings", f"{len(given)} set: {', '.join(given)}{read}" if given else f"none set, all defaults{read}")
    if (problem := next(codec_problems(), None)) is not None:
        exam.warn("codecs", problem.message, problem.remedy)
    else:
        exam.ok("codecs", f"records compressed with {', '.join(CODECS)} can be read")
    for name, check in {**START_CHECKS, "tracing": start_tracing}.items():
        try:
            check(loaded.settings)
        except ConfigError as error:
            exam.fail(name, str(error), "kp-worker run exits with code 2 until this is corrected")


async def check_disks(exam: Exam) -> None:
    """Check the free space: an exported model takes 90 to 180 MB, logs and temporary files some more."""
    cache = default_directory(OFFICIAL_NAME, OFFICIAL_SHA256)
    for name, path in (("model cache", cache), ("temporary files", Path(tempfile.gettempdir()))):
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        try:
            free = shutil.disk_usage(there).free
        except OSError as error:
            exam.warn(name, f"{there}: {error.strerror}", "check the mount")
            continue
        message = f"{free / 2**30:.1f} GiB free at {path}"
        exam.add(warn(name, message, "free at least 500 MiB") if free < 500 << 20 else ok(name, message))


async def check_port(exam: Exam) -> None:
    """Check that a worker can listen."""
    host, port = exam.settings.http_host, exam.settings.http_port
    where = f"{host}:{port}"
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like the worker's HTTP server
        try:
            probe.bind((host, port))
        except OSError as error:
            if _is_worker(host, port):
                exam.ok("port", f"a kp-worker already listens on {where}; a second one needs another KP_HTTP_PORT")
                return
            remedy = "set KP_HTTP_PORT to a free port (0: any), or KP_HTTP_HOST to another address of this machine"
            exam.fail("port", f"cannot listen on {where}: {error.strerror}", remedy)
            return
    exam.ok("port", f"{where} is free" if port else "KP_HTTP_PORT=0: the system chooses a free one")


def _is_worker(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1" if host == "0.0.0.0" else host, port, timeout=2)  # noqa: S104
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/healthz")
        return connection.getresponse().getheader("Server") == "kp-worker"
    return False


# -- `kp-worker contribute` (its registry) and `assemble` (rules, extra, topics)


async def check_registry(exam: Exam) -> None:
    """Check the registry and its key; nothing if KP_REGISTRY_URL is not set.

    The registry is only asked for an id. Look-ups are allowed without a key, so the answer alone does not show whether
    the key is valid. The rate limit does: the registry states a different one for a known key.
    """
    settings = exam.settings
    if settings.registry_url is None:
        return
    try:
        key = registry_key(settings)
    except ConfigError as error:
        exam.fail("registry key", str(error), "contribute exits with code 2 without it")
        return
    known = await _ask(settings, settings.registry_url, key)
    if isinstance(known, Finding):
        exam.add(known)
        return
    exam.ok("registry", "it answers")
    nobody = await _ask(settings, settings.registry_url, None)
    exam.add(nobody if isinstance(nobody, Finding) else _about_key(known, nobody, key.source))


async def _ask(settings: Settings, url: str, key: Token | None) -> HttpAnswer | Finding:
    """Look up a random id; return the answer, or the problem."""
    trace_id = f"kp:trace:{uuid.uuid4()}"
    seconds = min(10.0, settings.contribute_timeout_seconds)
    async with RegistryClient(url, key, seconds, ContributeMetrics(CollectorRegistry())) as client:
        answer = await client.look_up(trace_id)
    if isinstance(answer, Doubtful):
        return fail("registry", answer.words, "check KP_REGISTRY_URL, the network and the registry")
    match judge_look_up(answer, trace_id):
        case Absent():
            return answer
        case Denied(status):
            return fail("registry key", f"the registry denies it ({status})", "get a new one (docs/contribute.md)")
        case Limited():
            return fail("registry", "it answers 429", "wait for an hour: the third 429 within an hour revokes the key")
        case Doubtful(_, words):
            return fail("registry", words, "check KP_REGISTRY_URL: it is the address before /v1")
    return fail("registry", "it says that it has a unit with a new, random id", "check KP_REGISTRY_URL")


def _about_key(known: HttpAnswer, nobody: HttpAnswer, source: str) -> Finding:
    check, ours, anybodys = "registry key", stated_rate(known), stated_rate(nobody)
    if ours is None or anybodys is None:
        message = "the registry states no limits: the first POST will show whether it knows the key"
        return warn(check, message, "read the log of kp-worker contribute")
    if ours.limit == anybodys.limit:
        rate = f"it allows {ours.limit} requests a minute, as without a key"
        message = f"the registry does not know the key of {source}: {rate}"
        return fail(check, message, "the key is wrong or revoked: get a new one (docs/contribute.md)")
    return ok(check, f"the registry knows it, and allows {ours.limit} look-ups a minute")


async def check_assemble(exam: Exam) -> None:
    """Check rules, extra and topics; nothing if no setting of `assemble` is set."""
    settings, check, remedy = exam.settings, "assemble", "assemble exits with code 2 (docs/opentelemetry.md)"
    if not (settings.assembles and exam.reachable):
        return
    try:
        require_extra("otlp")
        from worker.assemble.steps import rules_from
        from worker.assemble.topics import assemble_problems, look_for_assemble, missing_topics, small_topics

        rules_from(settings)
        async with connected_admin(settings, prepare_clients(settings)) as admin:
            observed = await look_for_assemble(admin, settings)
    except (CommandError, ConfigError, KafkaError) as error:
        exam.fail(check, error_text(error) if isinstance(error, KafkaError) else str(error), remedy)
        return
    missing, problems = missing_topics(settings, observed), assemble_problems(settings, observed)
    for problem in problems:
        exam.fail(check, problem, remedy)
    for name in settings.span_topics:
        for early in deleted_early(observed, name, "assembled"):
            exam.warn(check, early.message, early.remedy)
    for small, larger in small_topics(settings, observed):
        exam.warn(check, small, f"{larger} (docs/opentelemetry.md)")
    if missing and not settings.create_topics:
        exam.fail(check, f"missing: {', '.join(missing)}", "create them: kp-worker topics --create")
    elif not problems:
        exam.ok(check, f"reads {settings.spans_topic}, writes {settings.source_topic}")
        if not missing:
            await reading(_unread_content, check, "the newest spans", 10.0, "run this again")(exam)


async def _unread_content(exam: Exam) -> None:
    """Report each scope whose newest spans have content in attributes that nothing reads."""
    from worker.assemble.steps import rules_from
    from worker.commands.shared.preview import Preview, read_newest

    preview = Preview(rules_from(exam.settings))
    for topic in exam.settings.span_topics:
        await read_newest(exam.settings, topic, 50, preview)  # of each partition
    await asyncio.to_thread(lambda: list(preview.lines()))
    for line in preview.unread.lines():
        exam.warn("assemble", line, "their runs lack it: report the library (docs/opentelemetry.md)")


CHECKS: Final[tuple[Check, ...]] = (
    check_settings,
    check_kafka,
    reading(
        check_memory, "cache", "the changelog", 20.0,
        "look at kp_cache_entries, and at scoring.confidence of the agents' traces",
    ),
    reading(check_outputs, "domains", "the last scored traces", 10.0),
    reading(check_verdicts, "verdicts", "the verdicts", 20.0),
    check_model,
    check_registry,
    check_assemble,
    check_disks,
    check_port,
)  # fmt: skip
