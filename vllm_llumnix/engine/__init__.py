# SPDX-License-Identifier: Apache-2.0
"""The engine side of a migration, inside the EngineCore process. The only package here that imports vLLM internals.

`attach` builds everything; `kvconn` is the engine loop's view of it (`kvconn.step()`), `scheduler_port` the operations
on vLLM's scheduler and block pool, `request_state` what travels of a request, `bypass` the thread that runs the state
machines, the llumlet's gRPC service and the token relay.
"""
