# SPDX-License-Identifier: Apache-2.0
"""The migration protocol as pure state machines.

    move        a running request changes engines: its source, its destination, and which requests are chosen
    origin      an API server's decisions about the requests whose clients it holds: streams, gates, replays
    recovery    what follows a loss: suspects, trials and retries, and an engine's half of a replay

Nothing in this package does I/O, reads a clock, or imports asyncio, sockets, torch or vLLM: events go in, effects come
out, and time is an event. The shells that carry the effects out live in `vllm_llumnix.engine` and
`vllm_llumnix.frontend`.
"""
