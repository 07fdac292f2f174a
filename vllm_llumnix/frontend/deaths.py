# SPDX-License-Identifier: Apache-2.0
"""Whether an engine's process is gone, as far as its port tells."""

from __future__ import annotations

import asyncio
import time

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed, LlumletUnreachable, NotALlumlet
from llumlet.process.credentials import Credentials

GONE_SECONDS = 1.0
GONE_PAUSE_SECONDS = 0.05


async def is_gone(address: str, credentials: Credentials) -> bool:
    """Whether nobody listens any more where a silent engine's llumlet did: then it need not be waited for.

    A process that ends gives up its connections one by one, and the port on which it listens is one of them. So one
    that breaks a connection off is asked again for a while, and each time by a new connection: one that is kept says
    nothing of the port.
    """
    deadline = time.monotonic() + GONE_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        client = LlumletClient(address, credentials=credentials)
        try:
            await client.get_instance_metadata(deadline_s=left)
        except LlumletUnreachable as error:
            if error.nobody_listens or isinstance(error, NotALlumlet):
                return True
        except LlumletCallFailed:
            return False
        else:
            return False
        finally:
            await client.close()
        await asyncio.sleep(GONE_PAUSE_SECONDS)
    return False
