# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API in front of all engines.

`clients` are the connections that others open, `admission` says who may ask, `server` answers, `paths` says how.
`exchange` takes a request from its first byte to its last: `tokens` has it read and counted (by processes: `reading`),
`attempts` sends it to as many instances as it takes, `continuing` (completions, chats) or `passing` (all other paths)
hand the answer on. `placement` says where it goes, `upstream` speaks with an engine; `sse` and `continuation` are pure:
what a stream holds, and how it goes on elsewhere.
"""
