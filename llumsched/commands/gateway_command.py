# SPDX-License-Identifier: Apache-2.0
"""`llumnix gateway`: the OpenAI API in front of all engines."""

from __future__ import annotations

from typing import Final

from llumlet.process.credentials import Credentials
from llumsched.console.exit_codes import ExitCode
from llumsched.gateway.config import Config, prepare

__all__ = ["DESCRIPTION", "SETTINGS", "prepare", "run"]

DESCRIPTION = """Serve the OpenAI API in front of all engines.

  llumnix gateway --scheduler-endpoints 127.0.0.1:8002
  llumnix gateway --scheduling-policy round-robin --llm-backend-endpoints 10.0.0.1:8000,10.0.0.2:8000

Every field of a request reaches the engine unchanged. If an engine fails before the first token, the request is sent to
another one. If it disappears later, the stream continues on another engine from the last delivered token, unless the
client sent `X-Llumnix-Continuation: off`. SIGTERM ends the gateway after its streams; behind a load balancer,
--shutdown-delay gives the balancer time to notice."""
SETTINGS: Final = (Config,)


def run(config: Config, _: Credentials) -> int:
    from llumsched.gateway import workers

    return workers.run(config) or ExitCode.OK
