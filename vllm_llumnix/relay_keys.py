# SPDX-License-Identifier: Apache-2.0
"""Encryption and authentication of the relay: CurveZMQ with one long-term key pair for the whole cluster.

The pair is derived from the token, so whoever has the token has the pair, and nothing has to be handed out. An engine
connects to that public key only: whoever answers at an origin's address without the secret key learns nothing. An
origin accepts that public key only, see `frontend.key_check`. Each connection has session keys of its own, so the
token does not decrypt what was recorded.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

ZAP_DOMAIN = b"llumnix"
_PURPOSE = b"llumnix-relay-1"


@dataclass(frozen=True, slots=True)
class RelayKeys:
    """Both keys as libzmq wants them, in Z85."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    @classmethod
    def from_token(cls, token: bytes) -> RelayKeys | None:
        """None without a token. Raises `zmq.ZMQError` if libzmq was built without CURVE."""
        if not token:
            return None
        secret = z85.encode(hashlib.blake2b(token, digest_size=32, person=_PURPOSE).digest())
        return cls(zmq.curve_public(secret), secret)

    def secure_origin(self, sock: zmq.Socket[bytes]) -> None:
        """Before `sock` binds. Without a handler for `ZAP_DOMAIN` in its context it accepts nobody."""
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        sock.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_engine(self, sock: zmq.Socket[bytes]) -> None:
        """Before `sock` connects."""
        sock.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
