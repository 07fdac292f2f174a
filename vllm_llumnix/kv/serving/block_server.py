# SPDX-License-Identifier: Apache-2.0
"""Serves blocks of this worker's KV memory over TCP to peers who may have them: sends them, the source's end of the
`tcp` transport, or puts them where a network can read them.

A thread waits for connections and each connection has one; all are daemons. A peer shows the capability of its
migration with every request and gets the blocks that the engine has granted under it, straight from where they lie.
With credentials, both ends show a certificate of the same authority first.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Mapping

import msgspec

from vllm_llumnix.errors import TransferFailed
from vllm_llumnix.kv.memory.block_memory import BlockMemory
from vllm_llumnix.kv.mover.messages import (
    BlockAnswer,
    BlockRequest,
    NetworkName,
    StageAnswer,
    StageRequest,
    decode_request,
)
from vllm_llumnix.kv.mover.process import name_thread, yield_cores
from vllm_llumnix.kv.networks.staging import StagingArea
from vllm_llumnix.kv.serving.block_stage import Stage
from vllm_llumnix.kv.serving.grants import Grants
from vllm_llumnix.kv.transport.blocks_tcp import receive_frame, send_frame

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""A further one takes the place of the one that has been idle for longest."""
HANDSHAKE_SECONDS = 5.0
"""Time for the certificates, and for the first request."""
IDLE_SECONDS = 600.0
"""Time after which a connection without requests is closed."""
STAGED_SECONDS = 30.0
"""Time after which it is closed while buffers that others wait for are kept for it."""
STALL_SECONDS = 10.0
"""Seconds for which a peer may take nothing of what it is sent, or take to finish a request that it has begun."""
GRANT_SECONDS = 1.0
"""Seconds by which a request may come before its grant."""
ANOTHER_PROCESS = "this is another process than was advertised"
SEND_BYTES = 1 << 20
"""Sent between two looks at the grant."""


class BlockServer:
    """Listens from `start` on; `close` ends all connections."""

    def __init__(
        self,
        memory: BlockMemory,
        nonce: bytes,
        grants: Grants,
        host: str,
        tls: ssl.SSLContext | None = None,
        staging: Mapping[NetworkName, StagingArea] | None = None,
        at_start: Callable[[], None] = lambda: None,
    ) -> None:
        """`staging`: what each network reads that runs. `at_start`: what each serving thread does before anything else.
        Raises OSError if `host` cannot be listened at."""
        self._memory = memory
        self._nonce = nonce
        self._grants = grants
        self._tls = tls
        self._staging = staging or {}
        self._at_start = at_start
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._idle: dict[socket.socket, None] = {}
        """Between two requests: who has been for longest comes first."""
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="llumnix-blocks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Returns when nothing is accepted any more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            _cut(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                full = len(self._connections) >= MAX_CONNECTIONS and not self._end_idle()
                if not full:
                    self._connections.add(connection)
            if full:
                logger.warning("blocks: no more than %d connections; %s is turned away", MAX_CONNECTIONS, address)
                connection.close()
                continue
            name = f"llumnix-blocks-{address[1]}"
            threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True).start()

    def _end_idle(self) -> bool:
        """Ends a connection that nobody needs now, and returns False if there is none: its peer makes a new one. The
        lock is held."""
        connection = next(iter(self._idle), None)
        if connection is None:
            return False
        del self._idle[connection]
        self._connections.discard(connection)
        _cut(connection)
        return True

    def _serve(self, accepted: socket.socket) -> None:
        name_thread("llumnix-blocks")
        connection, stage = accepted, None
        try:
            self._at_start()
            accepted.settimeout(HANDSHAKE_SECONDS)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._tls.wrap_socket(accepted, server_side=True)
                with self._lock:
                    self._connections.discard(accepted)
                    self._connections.add(connection)
            idle_s = HANDSHAKE_SECONDS
            while True:
                request = receive_frame(connection, decode_request, STALL_SECONDS, idle_s)
                with self._lock:
                    self._idle.pop(connection, None)
                connection.settimeout(STALL_SECONDS)
                yield_cores(not request.final)
                if isinstance(request, BlockRequest):
                    self._send(connection, request)
                else:
                    stage = stage or self._new_stage(request.network)
                    self._stage(connection, request, stage)
                busy = stage is not None and stage.holds_buffers
                idle_s = STAGED_SECONDS if busy else IDLE_SECONDS
                if not busy:
                    with self._lock:
                        self._idle[connection] = None
        except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
            logger.debug("blocks: connection ended: %s", error)
        except Exception:
            logger.exception("blocks: unexpected error")
        finally:
            if stage is not None:
                stage.clear()
            with self._lock:
                self._connections -= {accepted, connection}
                self._idle.pop(connection, None)
            connection.close()

    def _new_stage(self, network: NetworkName) -> Stage:
        """Raises ValueError."""
        if network not in self._staging:
            raise ValueError(f"a peer asks for {network}, which does not run here")
        return Stage(self._memory, network, self._staging[network], self._grants, GRANT_SECONDS)

    def _stage(self, connection: socket.socket, request: StageRequest, stage: Stage) -> None:
        """Raises OSError, ValueError."""
        if request.network != stage.network:
            raise ValueError(f"a connection is for {stage.network} or for {request.network}")
        if request.nonce != self._nonce:
            send_frame(connection, StageAnswer(ANOTHER_PROCESS))
        elif request.blocks:
            send_frame(connection, stage.fill(request, lambda: _cut(connection)))
        else:
            stage.clear()

    def _send(self, connection: socket.socket, request: BlockRequest) -> None:
        """Raises OSError when the peer is gone, or a grant ended while it was used."""
        if request.nonce != self._nonce:
            send_frame(connection, BlockAnswer(ANOTHER_PROCESS))
            return
        if not request.blocks:
            send_frame(connection, BlockAnswer())
            return
        try:
            memory = self._memory.cut(request.cut)
            reading = self._grants.reading(
                request.capability, request.blocks, lambda: _cut(connection), patience_s=GRANT_SECONDS
            )
            # Within the grant: on a GPU's worker the transfer allocates, which nothing may while grants are
            # suspended; and it collects nothing ahead any more when the grant is given back.
            with (
                reading as current,
                contextlib.closing(memory.transfer(request.blocks, request.layers_outermost)) as span,
            ):
                send_frame(connection, BlockAnswer(), more=True)
                while span.left and not current.revoked:
                    span.send(connection, SEND_BYTES)
        except (TransferFailed, ValueError) as error:
            send_frame(connection, BlockAnswer(str(error)))
            return
        if span.left:
            raise ConnectionAbortedError("the grant has ended")
        send_frame(connection, BlockAnswer("the grant ended meanwhile" if current.revoked else None))


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Not the method of `ssl.SSLSocket`: before it shuts anything down, that has its socket send in clear.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
