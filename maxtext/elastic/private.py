"""The private names of JAX and Orbax that re-forming a job in process needs, all here, with a test that they exist.

`jax.distributed.initialize` fixes the members of a job for good, and its process 0 hosts the coordination service. So
the service is made by itself, outside of the workers, one for each generation; and a worker that changes generation
drops its client without a word to the other side, because a member that died would never answer. Tested with jax 0.10.2
and 0.12.0.
"""

from __future__ import annotations

import inspect
import itertools
import socket
from typing import Any

import jax

# A dead member is the supervisor's to find. The service's own heartbeats would end the processes that are alive.
_NEVER = 7 * 24 * 3600
_left: list[Any] = []  # clients of former generations: destroying one would wait for members that are gone


class PrivateNamesGone(RuntimeError):
    """This version of JAX lacks what elastic training is built on; the message says which names."""


def missing_names() -> list[str]:
    """The private names that these versions of JAX and Orbax lack."""
    from jax._src import compiler, distributed
    from jax._src.lib import _jax
    from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

    wanted = {
        "_jax.get_distributed_runtime_service": ("recoverable", "heartbeat_timeout", "shutdown_timeout"),
        "_jax.get_distributed_runtime_client": ("missed_heartbeat_callback", "init_timeout", "shutdown_on_destruction"),
    }
    missing = []
    for name, arguments in wanted.items():
        function = getattr(_jax, name.removeprefix("_jax."), None)
        text = inspect.getdoc(function) or ""
        missing += [name] if function is None else [f"{name}({one})" for one in arguments if one not in text]
    state = getattr(distributed, "global_state", None)
    missing += [f"distributed.global_state.{name}" for name in ("client", "process_id", "num_processes",
                                                               "coordinator_address") if not hasattr(state, name)]
    missing += [] if hasattr(compiler, "_cache_write") else ["compiler._cache_write"]
    missing += [f"orbax OperationIdGenerator.{name}" for name in ("_operation_id_counter", "next_operation_id")
                if not hasattr(OperationIdGenerator, name)]
    client = getattr(_jax, "DistributedRuntimeClient", None)
    missing += [f"DistributedRuntimeClient.{name}" for name in ("connect", "key_value_set", "blocking_key_value_get")
                if not hasattr(client, name)]
    return missing


def check_names() -> None:
    """Raises PrivateNamesGone when this version of JAX has changed."""
    if missing := missing_names():
        raise PrivateNamesGone(f"jax {jax.__version__} has no {', '.join(missing)}, which elastic training needs; use "
                               f"jax 0.10.2 to 0.12.0, or train without maxtext launch")


def cache_every_rank() -> None:
    """Lets every rank write what it compiles to the persistent cache: on CPU ranks have programs of their own.

    JAX lets rank 0 alone do so. Here all ranks are on one machine, and any of them may be another rank tomorrow.
    """
    from jax._src import compiler, distributed

    write, state = compiler._cache_write, distributed.global_state

    def write_as_rank_0(*arguments: Any, **named: Any) -> None:
        rank, state.process_id = state.process_id, 0
        try:
            write(*arguments, **named)
        finally:
            state.process_id = rank

    compiler._cache_write = write_as_rank_0


def host_service(members: int) -> tuple[Any, int]:
    """A coordination service for so many processes on a free port of this machine; keep the first, it lives with it."""
    from jax._src.lib import _jax

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    service = _jax.get_distributed_runtime_service(f"127.0.0.1:{port}", members, heartbeat_timeout=_NEVER,
                                                   shutdown_timeout=1, recoverable=True)
    return service, port


def join(address: str, rank: int, members: int, timeout_seconds: int) -> None:
    """Makes this process member `rank` of a new group. Blocks until all have come.

    Raises RuntimeError when they do not.
    """
    from jax._src import distributed
    from jax._src.lib import _jax

    state = distributed.global_state
    assert state.client is None, "leave the former group first"
    # With a callback of one's own, a join that fails is an exception here; without, it ends the process.
    client = _jax.get_distributed_runtime_client(
        address, rank, init_timeout=timeout_seconds, heartbeat_timeout=_NEVER, shutdown_timeout=1,
        shutdown_on_destruction=False, use_compression=True, missed_heartbeat_callback=lambda *_: None)
    _left.append(client)
    client.connect()
    state.process_id, state.num_processes, state.coordinator_address = rank, members, address
    state.client = client


def leave() -> None:
    """Makes this process a member of no group, without devices; arrays and compiled programs of before are void."""
    import jax.extend as jex
    from jax._src import distributed

    state = distributed.global_state
    state.client, state.process_id, state.num_processes, state.coordinator_address = None, 0, 1, None
    jex.backend.clear_backends()
    jax.clear_caches()


def count_saves_from(number: int) -> None:
    """Sets Orbax's count of saves, which processes of one group must have alike, however long each has lived."""
    from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

    OperationIdGenerator._operation_id_counter = itertools.count(number)
    OperationIdGenerator.next_operation_id()


def tell(key: str, value: str) -> None:
    """Publishes a value to the group."""
    from jax._src import distributed

    distributed.global_state.client.key_value_set(key, value)


def hear(key: str, timeout_seconds: float) -> str:
    """What another member has published or will publish. Raises RuntimeError when it does not."""
    from jax._src import distributed

    return distributed.global_state.client.blocking_key_value_get(key, int(1000 * timeout_seconds))
