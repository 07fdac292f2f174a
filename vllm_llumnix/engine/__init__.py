# SPDX-License-Identifier: Apache-2.0
"""The engine side of a migration, inside the EngineCore process.

`attach` builds everything, `loop` is what may be asked of the engine's loop (vLLM calls it `engine.kvconn`), `thread`
runs the llumlet beside it, `context` is what its parts share. The folders follow a request:

    requests       how a request is checked and built from what travels of it
    queue          whose turn it is on the scheduler's queue
    blocks         KV blocks and batch slots: pinned, reserved, copied; `scheduler_port` is the way to vLLM's scheduler
    load           how loaded the engine is, and what its steps do
    compatibility  which requests and engines may exchange requests, with or without KV cache
    moves          the shells around the machines of both sides of a move: source_*, destination_*
    recovery       requests whose engine died or hangs
    service        what operators, peers and origins can ask for: lists, aborts, drains, status, the relay
"""
