# SPDX-License-Identifier: Apache-2.0
"""Settings that an engine gives to its workers' movers."""

from __future__ import annotations

import msgspec


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """Limit on the rate of pulls: at most `bytes_per_s`, or at most a `share` of what the link gives when it is not
    limited."""

    bytes_per_s: float | None = None
    share: float | None = None

    def of_one_in(self, count: int) -> Limit:
        """The part of each of several workers, whose links are the same."""
        return self if self.bytes_per_s is None else Limit(bytes_per_s=self.bytes_per_s / count)


UNLIMITED = Limit()


class MooncakeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """host: the address that peers' Mooncake connects to. devices: RDMA devices to be used, separated by commas; all
    by default. gpu_direct: whether they may read and write memory of a GPU. required: whether a worker without Mooncake
    must not start. max_in, max_out: how many moves there are buffers for.
    """

    host: str
    protocol: str
    devices: str = ""
    gpu_direct: bool = True
    required: bool
    max_in: int
    max_out: int


class NixlSettings(msgspec.Struct, frozen=True, kw_only=True):
    """devices: network devices that UCX may use, in its words, separated by commas. required: whether a worker without
    NIXL must not start. max_in, max_out: how many moves there are buffers for.
    """

    devices: str
    required: bool
    max_in: int
    max_out: int


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sent as msgpack.

    instance: the engine's id. transports: those to be used, in order of preference. host: where blocks are served.
    tls: paths of certificate, key and authority, or none. mooncake, nixl: if they are among the transports.
    allow_readers: see `process.allow_readers`. directory: where the endpoint's private directory is made; default: the
    system's.
    """

    instance: str
    transports: tuple[str, ...] = ("local",)
    host: str = "127.0.0.1"
    tls: tuple[str, str, str] | None = None
    mooncake: MooncakeSettings | None = None
    nixl: NixlSettings | None = None
    allow_readers: bool = True
    directory: str | None = None
