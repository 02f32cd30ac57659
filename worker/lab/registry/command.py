"""`kp-worker registry`: the stand-in for the registry alone, on loopback, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from worker.commands.shared.console import ArgumentError, Command, CommandError, program
from worker.commands.shared.options import read_settings
from worker.core.terminal import clean
from worker.lab.registry.faults import FaultKind, Faults

if TYPE_CHECKING:
    from worker.lab.registry.app import RegistryOptions
    from worker.lab.registry.store import RegistryStore

HOST: Final = "127.0.0.1"
READS_FOR_A_WRITE: Final = 5
"""As in the registry's tiers; for `--limit`."""


@click.command(cls=Command)
@click.option("--port", type=click.IntRange(0, 65_535), metavar="N", help="Port to listen on [a free one].")
@click.option("--data", type=click.Path(dir_okay=False, path_type=Path),
              help="Keep units, keys and 429s in this SQLite file [in memory].")  # fmt: skip
@click.option("--key", metavar="kp_...", help="The agent's key [a new one].")
@click.option("--agent", metavar="NAME", default="kp:agent:stand-in",
              help="The agent that has the key [kp:agent:stand-in].")  # fmt: skip
@click.option("--tier", type=click.Choice(["free", "pro", "enterprise"]), default="free", show_default=True,
              help="Rate limit: 30, 200 or 2000 POSTs a minute.")  # fmt: skip
@click.option("--limit", type=click.IntRange(1), metavar="N",
              help="N POSTs and 5 N GETs a minute, instead of a tier's limits.")  # fmt: skip
@click.option("--idempotency/--no-idempotency", default=True, show_default=True,
              help="Whether to honour Idempotency-Key.")  # fmt: skip
@click.option("--latency", type=click.FloatRange(0), default=0.0, metavar="S", help="Seconds that each answer takes.")
@click.option("--fault", "faults", multiple=True, metavar="KIND=SHARE", help="Share of faulty answers: error, slow, "
              "reset, html, truncated or redirect; may be repeated.")  # fmt: skip
@click.option("--faults-after", type=click.FloatRange(0, 1), default=0.5, show_default=True, metavar="SHARE",
              help="Share of the faults that come after the request took effect.")  # fmt: skip
@click.option("--slow-seconds", type=click.FloatRange(0), default=30.0, show_default=True, metavar="S",
              help="Delay of a slow answer.")  # fmt: skip
@click.option("--seed", type=int, metavar="N", help="Seed of the random faults.")
def registry(
    port: int | None, data: Path | None, key: str | None, agent: str, tier: str, limit: int | None, idempotency: bool,
    latency: float, faults: tuple[str, ...], faults_after: float, slow_seconds: float, seed: int | None,
) -> None:  # fmt: skip
    """Run a stand-in for the KnowledgePulse registry on loopback until Ctrl-C, to try things out.

    It answers as the registry does, with its rate limits, and revokes a key on the third 429 within an hour.
    """
    try:
        chosen = Faults(_shares(faults), faults_after, slow_seconds, seed)
    except ValueError as error:
        raise ArgumentError("--fault", str(error)) from None
    if key is not None and not key.startswith("kp_"):
        raise ArgumentError("--key", "a key of the registry starts with kp_; leave the option out for a new one")
    brokers = read_settings().bootstrap_servers
    from worker.lab.registry.app import RegistryOptions
    from worker.lab.registry.store import RegistryStore, Tier

    options = RegistryOptions(idempotency, latency, chosen)
    limits = tier if limit is None else Tier(limit, READS_FOR_A_WRITE * limit)
    try:
        with contextlib.closing(RegistryStore(data, options.clock)) as store:
            asyncio.run(_serve(store, options, port or 0, store.register(agent, limits, key=key), data, brokers))
    except sqlite3.Error as error:
        raise CommandError(f"{data}: {error}; give a file that this command wrote, or a new one") from None


def _shares(given: tuple[str, ...]) -> dict[FaultKind, float]:
    """Return the shares given by KIND=SHARE options. Raises ArgumentError."""
    shares: dict[FaultKind, float] = {}
    for text in given:
        kind, _, share = text.partition("=")
        try:
            shares[FaultKind(kind)] = float(share)
        except ValueError:
            kinds = ", ".join(FaultKind)
            message = f"{text!r}: give KIND=SHARE, with a share from 0 to 1 and one of the kinds {kinds}"
            raise ArgumentError("--fault", message) from None
    return shares


async def _serve(
    store: RegistryStore, options: RegistryOptions, port: int, key: str, data: Path | None, brokers: str
) -> None:
    from aiohttp import web

    from worker.lab.registry.app import registry_app

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(registry_app(store, options), access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, HOST, port).start()
        except OSError as error:
            raise CommandError(f"port {port}: {error.strerror or error}; choose another --port") from None
        _print_addresses(f"http://{HOST}:{runner.addresses[0][1]}", key, data, brokers)
        await stop.wait()
    finally:
        await runner.cleanup()


def _print_addresses(url: str, key: str, data: Path | None, brokers: str) -> None:
    """Print the addresses, and a `contribute` command to run beside a worker: on a free port, creating its topics."""
    settings = {"BOOTSTRAP_SERVERS": brokers, "REGISTRY_URL": url, "REGISTRY_KEY": key, "CREATE_TOPICS": "true",
                "HTTP_PORT": "0"}  # fmt: skip
    variables = " ".join(f"KP_{name}={shlex.quote(value)}" for name, value in settings.items())
    for what, text in {
        "registry": url,
        "key": key,
        "data": "in memory, lost on exit" if data is None else str(data),
        "contribute": f"{variables} {program()} contribute",
        "state": f"curl -s {url}/_stand-in/state",
        "units": f"curl -s {url}/_stand-in/units",
        "stop": "Ctrl-C",
    }.items():
        print(clean(f"{what:<12}{text}"), flush=True)
