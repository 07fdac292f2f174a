# SPDX-License-Identifier: Apache-2.0
"""The relay's end at the origin: a ROUTER socket on which engines report the requests that began here.

With tokens, only engines that have one of them can connect: `KeyCheck` answers libzmq's question about each connection
(ZAP, ZMQ RFC 27).

One socket per API server process. A peer can send anything: messages are bounded before they are decoded into structs
of our own, and a wrong one is counted, logged at a limited rate, and changes nothing for others. Sending never waits:
an answer that a peer does not take is dropped, and the peer's next message brings another one.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable

import zmq
import zmq.asyncio

from llumlet.process.tasks import post
from llumlet.protocol import wire
from vllm_llumnix.frontend.vllm_client_types import ClientVllmConfig
from vllm_llumnix.wire.addresses import RelayAddress, reachable_host
from vllm_llumnix.wire.relay_convert import ExpertsForm, OutputForm
from vllm_llumnix.wire.relay_keys import ZAP_DOMAIN, OriginKeys

logger = logging.getLogger("vllm.llumnix")

REPORT_SECONDS = 10.0
MESSAGES_IN_A_ROW = 32
"""Receiving from a socket that has more does not suspend: after so many messages other tasks get their turn."""

Receive = Callable[[bytes, wire.ToOrigin], None]


class Complaints:
    """Counts what goes wrong, by kind; logs each kind at most once in `REPORT_SECONDS`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._reported: dict[str, tuple[float, int]] = {}

    def note(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        now = self._clock()
        last, count = self._reported.get(kind, (float("-inf"), 0))
        if now - last < REPORT_SECONDS:
            return
        self._reported[kind] = (now, self.counts[kind])
        more = self.counts[kind] - count - 1
        logger.warning("relay: %s: %.300s%s", kind, text, f" ({more} more before)" if more else "")


class RelaySocket:
    """Binds at construction; receives once `start` was called on the event loop. Holds no reference to the client."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        host: str,
        receive: Receive,
        complaints: Complaints,
        keys: OriginKeys | None = None,
    ) -> None:
        self._receive = receive
        self._complaints = complaints
        self._tasks: list[asyncio.Task[None]] = []
        self._key_check: KeyCheck | None = None
        self._socket: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        try:
            if keys is not None:
                self._key_check = KeyCheck(context, keys, lambda peer: complaints.note("stranger", peer))
                keys.secure(self._socket)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
            self.address = str(RelayAddress(_bind(self._socket, host), keys.public if keys else b""))
            """The address for engines."""
        except BaseException:
            self._close()
            raise

    def start(self) -> None:
        """Receive from now on. Needs the running event loop; again is nothing."""
        if self._tasks:
            return
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(_read(self._socket, self._receive, self._complaints), name="llumnix-relay")]
        if self._key_check is not None:
            self._tasks.append(loop.create_task(self._key_check.run(), name="llumnix-key-check"))

    def send(self, identity: bytes, message: wire.ToEngine) -> None:
        """Send at once or not at all."""
        if self._socket.closed:
            return
        sent = self._socket.send_multipart([identity, wire.encode(message)])
        assert isinstance(sent, asyncio.Future)
        if not sent.done():
            sent.cancel()
        elif (error := sent.exception()) is not None:
            self._complaints.note("send", str(error))

    def close(self) -> None:
        """End the tasks and close the sockets, from any thread. Again is nothing."""
        loop = self._tasks[0].get_loop() if self._tasks else None
        if loop is None or loop.is_closed() or _is_running_here(loop):
            self._close()
        else:
            post(loop, self._close)

    def _close(self) -> None:
        for task in self._tasks:
            if not task.get_loop().is_closed():
                task.cancel()
        self._socket.close(linger=0)
        if self._key_check is not None:
            self._key_check.close()


async def _read(sock: zmq.asyncio.Socket, receive: Receive, complaints: Complaints) -> None:
    in_a_row = 0
    while True:
        try:
            frames = await sock.recv_multipart()
        except zmq.ZMQError as error:
            if not sock.closed:
                logger.error("relay: the socket has failed: %s", error)
            return
        try:
            _take(frames, receive, complaints)
        except Exception:
            # Outermost: whatever this message was, the next one is somebody else's.
            complaints.counts["internal"] += 1
            logger.exception("relay: a message could not be handled")
        in_a_row += 1
        if in_a_row >= MESSAGES_IN_A_ROW:
            in_a_row = 0
            await asyncio.sleep(0)


def _take(frames: list[bytes], receive: Receive, complaints: Complaints) -> None:
    if len(frames) != 2 or len(frames[1]) > wire.MAX_MESSAGE_BYTES:
        size = sum(map(len, frames[1:]))
        complaints.note("bad_message", f"{len(frames) - 1} frames of {size} bytes together")
        return
    try:
        message = wire.decode_to_origin(frames[1])
    except wire.MALFORMED as error:
        complaints.note("bad_message", str(error))
        return
    receive(frames[0], message)


def _bind(sock: zmq.asyncio.Socket, host: str) -> str:
    """Bind to a free port of `host`; returns the address under which engines reach it."""
    ip = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    version = ipaddress.ip_address(ip).version
    if version == 6:
        sock.setsockopt(zmq.IPV6, 1)
    sock.bind(f"tcp://[{ip}]:*" if version == 6 else f"tcp://{ip}:*")
    port = sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    ip = reachable_host(ip)
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class KeyCheck:
    """The ZAP handler of one context: accepts the engines' keys. There can be only one.

    `refused` is told the address of everybody else. libzmq holds connections back until `run` answers.
    """

    def __init__(self, context: zmq.asyncio.Context, keys: OriginKeys, refused: Callable[[str], None]) -> None:
        self._keys = keys
        self._refused = refused
        self._socket: zmq.asyncio.Socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            version, question, domain, address, _, mechanism, *proof = await self._socket.recv_multipart()
            known = (version, domain, mechanism, len(proof)) == (_VERSION, ZAP_DOMAIN, b"CURVE", 1)
            if known and any(hmac.compare_digest(proof[0], one) for one in self._keys.accepted):
                status, text = b"200", b"OK"
            else:
                status, text = b"400", b"not this cluster's key"
                self._refused(address.decode(errors="replace"))
            await self._socket.send_multipart([_VERSION, question, status, text, b"", b""])

    def close(self) -> None:
        self._socket.close(linger=0)


def output_form_of(vllm_config: ClientVllmConfig) -> OutputForm:
    model, experts = vllm_config.model_config, None
    if vllm_config.aux_output_config.enable_return_routed_experts:
        counts = (model.get_total_num_hidden_layers(), model.get_num_experts_per_tok(), model.get_num_experts())
        experts = ExpertsForm(*counts)
    return OutputForm(model.get_vocab_size(), model.return_sampling_mask, experts)
