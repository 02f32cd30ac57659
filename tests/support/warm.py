"""Processes of the worker that begin where their imports have ended: forks of one process that only imports.

`python -m worker` imports for a second before it does anything, and the tests start hundreds. A fork is a process like
any other, with pipes, signals and an exit code of its own; what it shares with its siblings is what they have imported,
and the seed of their hashes. With `--long`, and where a test asks for it (`cold`), each process imports by itself.
"""

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

from tests.support.surroundings import ROOT, environment

MESSAGE_BYTES = 1 << 17

enabled = False
"""Whether WorkerProcess and the commands of a Desk are such forks; tests/conftest.py says it."""


class WarmProcess:
    """A fork of the warm process, with the methods of subprocess.Popen that tests use."""

    def __init__(
        self, module: str, args: Sequence[str], env: Mapping[str, str], cwd: Path, *,
        stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes],
    ) -> None:  # fmt: skip
        self.args = [module, *args]
        self.returncode: int | None = None
        self._ending = threading.Lock()  # a fleet is watched by one thread, and stopped by another
        # Messages, not a stream: of a command that ends at once, its number and its status would be read as one number.
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = json.dumps({"module": module, "args": list(args), "env": dict(env), "cwd": str(cwd)}).encode()
            assert len(request) < MESSAGE_BYTES
            files = [stdin.fileno(), stdout.fileno(), stderr.fileno(), theirs.fileno()]
            socket.send_fds(_server(), [request], files)
        self.pid = int(self._status.recv(16))

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        if self.returncode is None and self._has_ended(0):
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status when it has ended; raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            if not self._has_ended(timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self._end()
        assert self.returncode is not None
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        ready = select.poll()  # select.select takes no file numbers from 1024 on
        ready.register(self._status, select.POLLIN)
        return bool(ready.poll(None if timeout is None else 1000 * timeout))

    def _end(self) -> None:
        with self._ending:
            if self.returncode is None:
                said = self._status.recv(16)
                assert said, "the warm process has ended"
                self.returncode = int(said)

    def __del__(self) -> None:
        # Not before: another thread may wait for the status, and its file's number would be that of another file.
        self._status.close()

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended; its status is on the way
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_connection: socket.socket | None = None
_lock = threading.Lock()


def _server() -> socket.socket:
    """Start the warm process, once in each process of pytest; it ends with its end of the connection."""
    global _connection  # noqa: PLW0603
    with _lock:
        if _connection is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm", str(theirs.fileno())],
                cwd=ROOT, env=environment(OPENBLAS_NUM_THREADS="1"), pass_fds=[theirs.fileno()],
            )  # fmt: skip
            theirs.close()
            _connection = ours
            atexit.register(_stop, process, ours)
    return _connection


def _stop(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.wait(10)


def _import_all() -> None:
    import worker

    for module in pkgutil.walk_packages(worker.__path__, "worker."):
        # The runtimes start threads, and threads do not outlive a fork.
        if not module.name.startswith("worker.embed.") and not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # an extra that is not installed
                importlib.import_module(module.name)


def _serve(requests: socket.socket) -> None:
    """Fork for each request, and report the ends."""
    running: dict[int, socket.socket] = {}
    woken, wake = socket.socketpair()
    for each in (woken, wake):
        each.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    while True:
        ready = select.select([requests, woken], [], [])[0]
        if woken in ready:
            woken.recv(4096)
            while running:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                with running.pop(pid) as caller, contextlib.suppress(OSError):  # pytest may have ended
                    caller.send(b"%d" % os.waitstatus_to_exitcode(status))
        if requests in ready:
            request, files, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 4)
            if not request:
                return
            pid = os.fork()
            if pid == 0:
                _become(json.loads(request), files)
            caller = socket.socket(fileno=files[3])
            running[pid] = caller
            caller.send(b"%d" % pid)
            for file in files[:3]:
                os.close(file)


def _become(request: Mapping[str, object], files: Sequence[int]) -> NoReturn:
    """Be the process that was asked for, to its end."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, file in enumerate(files[:3]):
        os.dup2(file, target)
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(request["env"])  # type: ignore[call-overload]
    time.tzset()
    os.chdir(str(request["cwd"]))
    at_once = "PYTHONUNBUFFERED" in os.environ
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(os.fdopen(0, "rb"), encoding="utf-8")  # type: ignore[misc]
    output, errors = os.fdopen(1, "wb"), os.fdopen(2, "wb")
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(output, encoding="utf-8", write_through=at_once)  # type: ignore[misc]
    errors_as_text = io.TextIOWrapper(errors, encoding="utf-8", errors="backslashreplace", line_buffering=True)
    sys.stderr = sys.__stderr__ = errors_as_text  # type: ignore[misc]
    sys.argv = [str(request["module"]), *request["args"]]  # type: ignore[misc]
    code = _code_of(str(request["module"]))
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120  # as Python
    os._exit(code)


def _code_of(module: str) -> int:
    """Run a module as `python -m` does, and return the exit code."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    connection = socket.socket(fileno=int(sys.argv[1]))
    _import_all()
    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()
    _serve(connection)
