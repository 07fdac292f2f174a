# SPDX-License-Identifier: Apache-2.0
"""Whether an engine is dead, and what it was doing when it was lost, as far as an origin can know.

On the same machine the engine's record of its steps says it. Of one on another machine nothing can be read: if it died,
or says itself that it hangs, it may have been in a step of each of its requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

from llumlet.client import LlumletClient
from llumlet.credentials import Credentials
from llumlet.errors import LlumletCallFailed, LlumletUnreachable, NotALlumlet
from llumlet.protocol.wire import Health
from vllm_llumnix import step_record
from vllm_llumnix.frontend.owners import Owner
from vllm_llumnix.step_record import UNKNOWN, LastSteps

STUCK_SECONDS = 1.5
"""A silent engine whose step is older hangs in it; if it is younger, the engine gets on and was cut off."""
GONE_SECONDS = 1.0
GONE_PAUSE_SECONDS = 0.05


async def is_gone(address: str, credentials: Credentials) -> bool:
    """Whether nobody listens any more where a silent engine's llumlet did: then it need not be waited for.

    A process that ends gives up its connections one by one, and the port on which it listens is one of them. So one
    that breaks a connection off is asked again for a while.
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


def steps_of(owner: Owner, now: float, ends: bool = False) -> LastSteps | None:
    """The steps in which `owner` died or hangs. None: it is on its way out, or as far as is known it only is cut off,
    or stands still outside of any step. `ends`: it has just said that it does, if not why.
    """
    if owner.dead:
        if owner.last_steps is None:
            # Once: the next engine that starts there removes the record.
            owner.last_steps = step_record.read(owner.incarnation) or UNKNOWN
        return None if owner.last_steps.leaving else owner.last_steps
    hangs = owner.health is Health.HUNG
    steps = step_record.read(owner.incarnation)
    if steps is None:
        return UNKNOWN if hangs else None
    stuck = hangs or ends or (bool(steps.under_way) and now - steps.began > STUCK_SECONDS)
    counts = stuck and not steps.leaving and (steps.under_way or steps.anybody)
    return dataclasses.replace(steps, compiling=frozenset()) if counts else None
