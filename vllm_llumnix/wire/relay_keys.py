# SPDX-License-Identifier: Apache-2.0
"""Encryption and authentication of the relay: CurveZMQ.

Each origin has a key pair of its own, and its public key is part of the address that engines are told by their peers.
An engine connects to that key only: whoever else answers at the address learns nothing. An engine shows a key that is
derived from the token of instances, so nothing has to be handed out; an origin accepts those of all tokens that are
valid when it is asked, see `relay_socket.KeyCheck`. Each connection has session keys of its own, so a token does not
decrypt what was recorded.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from llumlet.process.credentials import Credentials
from vllm_llumnix.wire.addresses import RelayAddress

ZAP_DOMAIN = b"llumnix"
_PURPOSE = b"llumnix-relay-1"


class OriginKeys:
    """The key pair of one origin, and who may connect to it."""

    def __init__(self, credentials: Credentials) -> None:
        """`credentials` with tokens of peers. Raises `zmq.ZMQError` if libzmq was built without CURVE."""
        self._credentials = credentials
        public, self._secret = zmq.curve_keypair()
        self.public = z85.decode(public)

    @property
    def accepted(self) -> tuple[bytes, ...]:
        """Public keys of the engines that may connect now, 32 bytes each."""
        return tuple(z85.decode(_pair_of(token).public) for token in self._credentials.own_tokens)

    def secure(self, sock: zmq.Socket[Any]) -> None:
        """Before `sock` binds. Without a handler for `ZAP_DOMAIN` in its context it accepts nobody."""
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        sock.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def connect(sock: zmq.Socket[Any], address: RelayAddress, credentials: Credentials) -> None:
    """An engine's to an origin that has a key if, and only if, there are tokens."""
    own = credentials.own_tokens
    if own:
        pair = _pair_of(own[0])
        sock.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(address.key))
        sock.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    sock.connect(address.endpoint)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two keys as libzmq wants them, in Z85."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)


@functools.lru_cache(maxsize=8)
def _pair_of(token: bytes) -> _Pair:
    secret = z85.encode(hashlib.blake2b(token, digest_size=32, person=_PURPOSE).digest())
    return _Pair(zmq.curve_public(secret), secret)
