# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API in front of all engines.

`clients` are the connections that others open, `admission` says who may ask, `server` answers. `exchange` takes one
request from its first byte to its last, `tokens` has it read and counted (by processes: `reading`), `placement` says
where it goes, `upstream` speaks with an engine. `sse` and `continuation` are pure: what a stream holds, and how it goes
on elsewhere.
"""
