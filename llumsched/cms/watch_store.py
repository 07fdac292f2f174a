# SPDX-License-Identifier: Apache-2.0
"""Watches the embedded CMS of another scheduler, for commands and further schedulers.

The other end finds silent instances and announces those that leave. A lost connection is made anew; its first messages
replace the former state.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from grpc import aio

from llumlet.contract.channels import open_channel
from llumlet.contract.client import failure_of
from llumlet.contract.cms.links import LinkLost
from llumlet.contract.proto.llumlet_pb2_grpc import CmsStub
from llumlet.contract.types import ViewChange, WatchRequest
from llumlet.process.addresses import Address
from llumlet.process.credentials import NONE, Credentials
from llumsched.cms.followed import FollowedStore

SILENCE_S: Final = 5.0
"""Time without a change or a beat after which the connection is given up."""


class WatchStore(FollowedStore):
    """A watched CMS."""

    def __init__(self, address: Address, credentials: Credentials = NONE) -> None:
        super().__init__(str(address))
        self._address = address
        self._credentials = credentials

    async def _follow(self) -> None:
        channel = open_channel(self._address, self._credentials)
        try:
            await self._watch(channel)
        except aio.AioRpcError as error:
            raise LinkLost(failure_of(error, self._name).detail) from error
        except TimeoutError:
            raise LinkLost(f"nothing was heard for {SILENCE_S:g} s") from None
        finally:
            await channel.close(None)
        raise LinkLost("the stream has ended")

    async def _watch(self, channel: aio.Channel) -> None:
        loop = asyncio.get_running_loop()
        missing: set[str] | None = set(self.view)
        async with asyncio.timeout(SILENCE_S) as silence:
            async for change in CmsStub(channel).Watch(WatchRequest(), metadata=self._credentials.call_metadata):
                silence.reschedule(loop.time() + SILENCE_S)
                if not self.view.connected:
                    self._reached()
                self.view.heard_s = time.monotonic()
                missing = self._apply(change, missing)

    def _apply(self, change: ViewChange, missing: set[str] | None) -> set[str] | None:
        """Applies a change. `missing`: known instances that have not been repeated yet; None after the first part."""
        match change.WhichOneof("change"):
            case "instance":
                state = change.instance
                self.view.put_metadata(state.metadata)
                if state.HasField("status"):
                    self.view.put_status(state.status, state.age_s)
                if missing is not None:
                    missing.discard(state.metadata.instance_id)
            case "left" if change.fell_silent:
                self.view.lose(change.left)
            case "left":
                self.view.remove(change.left)
            case "complete":
                for instance_id in missing or ():
                    self.view.remove(instance_id)
                missing = None
                self.complete.set()
        return missing
