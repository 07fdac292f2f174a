# SPDX-License-Identifier: Apache-2.0
"""`llumnix gateway`: the OpenAI API in front of all engines."""

from __future__ import annotations

from typing import Final

from llumlet.process.credentials import Credentials
from llumsched.exit_codes import ExitCode
from llumsched.gateway.config import Config, prepare

__all__ = ["DESCRIPTION", "SETTINGS", "prepare", "run"]

DESCRIPTION = """Serve the OpenAI API in front of all engines.

  llumnix gateway --scheduler-endpoints 127.0.0.1:8002
  llumnix gateway --scheduling-policy round-robin --llm-backend-endpoints 10.0.0.1:8000,10.0.0.2:8000

Every field of a request reaches the engine as it came. A request whose engine fails before its first token goes to
another one; a stream whose engine disappears goes on at another one from the tokens that its client has, unless the
client sent `X-Llumnix-Continuation: off`. SIGTERM ends it once its streams have ended; behind a load
balancer give it time to notice first, with --shutdown-delay."""
SETTINGS: Final = (Config,)


def run(config: Config, _: Credentials) -> int:
    from llumsched.gateway import workers

    return workers.run(config) or ExitCode.OK
