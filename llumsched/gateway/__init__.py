# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API in front of all engines.

`server` answers, `paths` says how. `exchange` takes a request from its first byte to its last: `attempts` at as many
instances as it takes, `continuing` (completions, chats) or `passing` (all other paths) hand the answer on. `placement`
says where it goes, `upstream` speaks with an engine; `sse` and `continuation` are pure: what a stream holds, and how it
goes on elsewhere.
"""
