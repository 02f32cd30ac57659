"""`kp-worker registry`: the stand-in for the registry alone, on loopback, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aiohttp import web

from worker.commands.shared.console import ArgumentError, CommandError
from worker.core.terminal import clean
from worker.lab.registry.app import RegistryOptions, registry_app
from worker.lab.registry.faults import FaultKind
from worker.lab.registry.store import RegistryStore, Tier

HOST: Final = "127.0.0.1"
AGENT: Final = "kp:agent:stand-in"
READS_FOR_A_WRITE: Final = 5
"""As the registry's tiers have it; for a limit of one's own."""


@dataclass(frozen=True)
class StandIn:
    """How to start it: `key` None makes one, `port` None takes a free one, `data` None keeps nothing."""

    port: int | None = None
    data: Path | None = None
    key: str | None = None
    tier: str | Tier = "free"
    agent: str = AGENT
    options: RegistryOptions = field(default_factory=RegistryOptions)


def parse_faults(given: tuple[str, ...]) -> dict[FaultKind, float]:
    """Return the shares that KIND=SHARE options name. Raises ArgumentError."""
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


def checked_key(key: str | None) -> str | None:
    """Return a given key. Raises ArgumentError for one that the registry would not take for a key."""
    if key is not None and not key.startswith("kp_"):
        raise ArgumentError("--key", "a key of the registry starts with kp_; leave the option out for a new one")
    return key


def run_registry(stand_in: StandIn) -> int:
    """Run the stand-in until Ctrl-C or SIGTERM; return the exit code. Raises CommandError."""
    try:
        asyncio.run(_serve(stand_in))
    except sqlite3.Error as error:
        raise CommandError(f"{stand_in.data}: {error}; give a file that this command wrote, or a new one") from None
    except OSError as error:
        raise CommandError(f"port {stand_in.port}: {error.strerror or error}; choose another --port") from None
    return 0


async def _serve(stand_in: StandIn) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with contextlib.closing(RegistryStore(stand_in.data, stand_in.options.clock)) as store:
        key = store.register(stand_in.agent, stand_in.tier, key=stand_in.key)
        runner = web.AppRunner(registry_app(store, stand_in.options), access_log=None, shutdown_timeout=1)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, stand_in.port or 0).start()
            _print_addresses(f"http://{HOST}:{runner.addresses[0][1]}", key, stand_in.data)
            await stop.wait()
        finally:
            await runner.cleanup()


def _print_addresses(url: str, key: str, data: Path | None) -> None:
    kept = "in memory, lost on exit" if data is None else str(data)
    for line in (
        f"registry    {url}",
        f"key         {key}",
        f"data        {kept}",
        f"contribute  KP_REGISTRY_URL={url} KP_REGISTRY_KEY={key} kp-worker contribute",
        f"state       curl -s {url}/_stand-in/state",
        f"units       curl -s {url}/_stand-in/units",
        "stop        Ctrl-C",
    ):
        print(clean(line), flush=True)
