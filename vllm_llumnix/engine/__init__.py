# SPDX-License-Identifier: Apache-2.0
"""The engine side of a migration, inside the EngineCore process. The only package here that imports vLLM internals.

`attach` builds everything; `loop` is what may be asked of the engine's loop (vLLM calls it `engine.kvconn`),
`scheduler_port` the operations on vLLM's scheduler and block pool, `request_state` what travels of a request, `thread`
where the rest runs: the state machines in their shells, the llumlet's gRPC service and the token relay.
"""
