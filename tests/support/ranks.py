"""Run a function on N real gloo ranks: own processes, loopback only, and no way to hang or to stay behind.

The ranks are forked from a server process that has imported torch, what torch imports at its first collective
save, and what the tests import, and has done nothing else: these imports are paid for once, not once a rank.
"""

import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support.environment import wait_for_no_disk
from tests.support.web import free_port

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch._dynamo",
        "hypothesis.strategies",
        "pytest",
        "dcp.load",
        "dcp.save",
    ]
)


class RankError(AssertionError):
    """A rank raised, died or did not finish in time; the message holds the first failure's own traceback."""


def run_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 120, grouped: bool = True
) -> list[Any]:
    """Call `function(*args)` on `ranks` processes that form a gloo group; return its values in rank order.

    Those that are not `grouped` may form one by what torchrun's variables say. `function` must be importable
    by name (module level); it, `args` and the values must pickle. After `timeout` seconds, or as soon as one
    rank fails, all are killed.

    Raises:
        RankError: a rank failed, or the time is over.
    """
    with tempfile.TemporaryDirectory(prefix="ckpt-ranks-") as directory:
        rendezvous = Path(directory) / "rendezvous"
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        processes = []
        results: dict[Connection, int] = {}
        try:
            for rank in range(ranks):
                receiver, sender = _CONTEXT.Pipe(duplex=False)
                call = pickle.dumps((function, args))
                own = {**master, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                environment = {**os.environ, **({} if grouped else own)}
                group = (rendezvous.as_uri(), rank, ranks) if grouped else None
                process = _CONTEXT.Process(
                    target=_rank_main, args=(sender, environment, group, timeout, call), daemon=True
                )
                process.start()
                sender.close()
                processes.append(process)
                results[receiver] = rank
            values = _collect(results, time.monotonic() + timeout)
            for process in processes:
                process.join(timeout=10)
            return [values[rank] for rank in range(ranks)]
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for receiver in results:
                receiver.close()


def run_script(ranks: int, directory: Path, script: str, *args: str) -> None:
    """Run `script` in `directory` as `torchrun --nproc-per-node ranks` would, on processes as above.

    Raises:
        RankError: a rank failed.
    """
    run_ranks(_script, ranks, directory, script, args, grouped=False)


def _script(directory: Path, script: str, args: tuple[str, ...]) -> None:
    os.chdir(directory)
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")


def _collect(pending: dict[Connection, int], deadline: float) -> dict[int, Any]:
    values: dict[int, Any] = {}
    waiting = dict(pending)
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} did not finish in time")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = waiting.pop(receiver)
            try:
                ok, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if not ok:
                raise RankError(f"rank {rank} failed:\n{value}")
            values[rank] = value
    return values


def _rank_main(
    sender: Connection,
    environment: dict[str, str],
    group: tuple[str, int, int] | None,
    timeout: float,
    call: bytes,
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The server process was started with another environment: the caller's may have changed since.
    os.environ.clear()
    os.environ.update(environment)
    wait_for_no_disk()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        import torch.distributed as dist

        function, args = pickle.loads(call)
        if group is None:
            value = function(*args)
        else:
            rendezvous, rank, ranks = group
            dist.init_process_group(
                "gloo",
                init_method=rendezvous,
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=timeout),
            )
            value = function(*args)
            dist.barrier()
            dist.destroy_process_group()
        message = pickle.dumps((True, value))
    except BaseException:  # torch's CheckpointException is no Exception
        message = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(message)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
