# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API in front of all engines.

`clients` holds the clients' connections, `server` checks their keys (`api_keys`) and answers by `paths`. `exchange`
takes a request from its first byte to its last: `tokens` reads and counts it (in processes: `reading`), `attempts`
sends it to instances, `continuing` (completions, chats) or `passing` (other paths) hands the answer on. `placement`
chooses the instance and `upstream` speaks with it. `sse` and `continuation` are pure: the contents of a stream, and how
another engine continues it.
"""
