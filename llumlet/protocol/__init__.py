# SPDX-License-Identifier: Apache-2.0
"""The migration protocol as pure state machines.

Nothing in this package does I/O, reads a clock, or imports asyncio, sockets, torch or vLLM: events go in, effects
come out, and time is an event. The shells that carry the effects out live in `vllm_llumnix.engine` and
`vllm_llumnix.frontend`.
"""
