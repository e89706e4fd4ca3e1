"""Exports in processes of their own that end by SIGKILL at a chosen step: of those that others can see.

A step is whatever changes what a directory or a bucket shows: a file that is renamed or removed, a request
that writes. The interpreter's own audit events tell of the first kind, the clients' calls of the others.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_DRIVER = """
import asyncio, json, os, signal, sys, time
# All that an export takes, so that no child need import it.
import dcp.exporting.ties, dcp.storage.gcs, dcp.storage.s3_filesystem, dcp.wire.parser, dcp.wire.reader
import google_crc32c, s3fs, tenacity, xxhash
from dcp.exporting import export
from dcp.storage.http import HttpClient
from tasks.export_shards import export_in_shards

def at_step(number):
    left = [number]
    def step():
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
    return step

def trace(step):
    changes = {"os.rename", "os.remove", "os.rmdir", "os.link", "os.mkdir"}
    sys.addaudithook(lambda event, _: step() if event in changes else None)
    call = HttpClient.call
    def traced(self, method, *arguments, **options):
        if method != "GET":
            step()
        return call(self, method, *arguments, **options)
    HttpClient.call = traced
    from s3fs.core import S3FileSystem
    call_s3 = S3FileSystem._call_s3
    async def traced_s3(self, method, *arguments, **options):
        if not method.startswith(("list_", "head_", "get_")):
            step()
        return await call_s3(self, method, *arguments, **options)
    S3FileSystem._call_s3 = traced_s3
    S3FileSystem.call_s3 = __import__("fsspec").asyn.sync_wrapper(traced_s3)

def one_by_one(writer, count):
    return [writer(number) for number in range(count)]

def run(url, dest, size, sharded, step, hold):
    if step:
        trace(at_step(step))
    def progress(done, total):
        if hold:
            open(hold + ".reached", "w").close()
        while hold and os.path.exists(hold):
            time.sleep(0.02)
    if sharded:
        arguments = {"max_shard_size": size}
        return export_in_shards(url, dest, arguments, one_by_one, options={}, dest_options={})
    return export(url, dest, format="safetensors", max_shard_size=size, progress=progress)

print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if not child:
        try:
            run(**json.loads(line))
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(getattr(error, "exit_code", 99))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Exporter:
    """A process that exports in children of its own, one after another."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._readline() == "ready"

    def _readline(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def start(self, url: str, dest: str, size: int, **how: Any) -> None:
        """Begin an export.

        Args:
            url, dest: of `dcp.export`.
            size: bytes of tensors in a shard.
            how: ``sharded``, the ``step`` at which it is killed, counted from 1, and the path of a file to
                ``hold`` it: in the middle it makes ``hold.reached``, and waits while ``hold`` exists.
        """
        assert self._process.stdin is not None
        request = {"sharded": False, "step": 0, "hold": "", **how, "url": url, "dest": dest, "size": size}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def ended(self) -> int:
        """The exit code of what was started, -9 where it was killed."""
        return int(self._readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


@contextmanager
def exporters(count: int = 1) -> Iterator[list[Exporter]]:
    """Processes that are ready to export."""
    started: list[Exporter] = []
    try:
        for _ in range(count):
            started.append(Exporter())  # noqa: PERF401 - those that have started are closed if one does not
        yield started
    finally:
        for exporter in started:
            exporter.close()
