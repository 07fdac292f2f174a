# SPDX-License-Identifier: Apache-2.0
"""Who may connect to an origin's relay: libzmq asks about each connection, in the ZAP protocol (ZMQ RFC 27)."""

from __future__ import annotations

import hmac
from collections.abc import Callable

import zmq
import zmq.asyncio

from vllm_llumnix.wire.relay_keys import ZAP_DOMAIN, OriginKeys

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
