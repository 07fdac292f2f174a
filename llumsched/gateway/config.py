# SPDX-License-Identifier: Apache-2.0
"""Everything that can be set of a gateway. Each default is written here only."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from llumlet.types import Address
from llumsched.gateway.endpoints import Endpoint


class AccessLog(enum.StrEnum):
    OFF = "off"
    LINE = "line"
    JSON = "json"


ROUND_ROBIN = "round-robin"
MOST_WORKERS = 256


@dataclass(frozen=True, slots=True)
class Config:
    """All times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8001
    """0: any free one."""
    workers: int = 1

    scheduling_policy: str = "load-balance"
    """`round-robin` is done here; with any other the scheduler is asked, which applies its own."""
    backend_endpoints: tuple[Endpoint | Address, ...] = ()
    scheduler_endpoints: tuple[Address, ...] = ()
    scheduler_ca_file: str = ""
    """Of those whose certificates schedulers show, who are asked over https then; empty: in clear."""
    backend_api_key: str = field(default="", repr=False)
    """Sent to engines; empty: clients' own."""
    backend_https: bool = False
    """Instances of which only the address is known are asked over https."""
    backend_ca_file: str = ""
    """Of those whose certificates engines show; empty: the system's."""
    full_mode: bool = True
    schedule_timeout_s: float = 2.0
    wait_scheduling_timeout_s: float = 5.0
    wait_scheduling_retry_interval_s: float = 1.0
    max_queue_size: int = 512
    """Requests that wait for an instance; more are refused."""
    max_requests: int = 8192
    """Requests in flight; more are refused."""
    requests_report_duration_s: float = 1.0
    """Lite mode only; 0: no reports."""
    service_token: str = field(default="", repr=False)
    """Sent to schedulers as `Authorization`."""

    retry_max_count: int = 2
    """Other instances tried before a request's first byte has come, and continuations after."""
    retry_budget: float = 0.2
    """Requests that may be sent again, as a share of those that come."""
    retry_patience_s: float = 10.0
    """How long a request that lost its instance without an answer waits for that."""
    max_ejected: float = 0.5
    """Share of the instances that may get no requests for a while because they fail."""
    continuation: bool = True
    connect_timeout_s: float = 3.0
    response_timeout_s: float = 900.0
    """Until the first byte of an answer."""
    read_timeout_s: float = 300.0
    """Between two bytes of a stream."""
    stall_s: float = 5.0
    """Silence after which an instance's health is asked for."""
    health_timeout_s: float = 3.0
    engine_stall_s: float = 60.0
    """An instance that streams, and sends nothing on any stream for so long, is hung whatever its health says. If no
    stream has begun, it is asked for a token then, and is hung if it computes nothing for as long again."""
    models_refresh_s: float = 10.0

    tokenizers: Mapping[str, str] = field(default_factory=dict)
    """Path or hub name by model; the model "" is any other."""
    chat_template: str = ""
    count_timeout_s: float = 0.5
    """Of a processor's time, for one request; after it the count is an estimate."""
    reader_processes: int = 2
    """For each worker: they count tokens, and read what is large."""

    max_body_bytes: int = 64 << 20
    client_timeout_s: float = 60.0
    """For the next KiB of a client's request, or with nothing taken by it of its answer."""
    header_timeout_s: float = 10.0
    """For a request's head, or a connection's first."""
    keep_alive_timeout_s: float = 75.0
    """Between two requests on a connection."""
    sse_keepalive_s: float = 15.0
    """Silence of a stream after which its client gets a comment; 0: never."""
    api_key_file: str = ""
    """Empty: nobody is asked for a key."""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    insecure: bool = False
    """Listens elsewhere than at loopback without keys and TLS."""
    shutdown_delay_s: float = 0.0
    """How long requests are accepted after SIGTERM, while `/ready` says that none should come."""
    shutdown_timeout_s: float = 30.0
    """How long streams may go on after that."""
    access_log: AccessLog = AccessLog.LINE

    @property
    def asks_https(self) -> bool:
        """Whether an engine may be."""
        endpoints = self.backend_endpoints
        return self.backend_https or any(isinstance(one, Endpoint) and one.is_tls for one in endpoints)

    @property
    def is_guarded(self) -> bool:
        """Whether clients need a key, and what they say is encrypted."""
        return bool(self.api_key_file and self.ssl_certfile and self.ssl_keyfile)

    @property
    def is_local(self) -> bool:
        return self.scheduling_policy == ROUND_ROBIN
