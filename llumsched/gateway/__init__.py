# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API in front of all engines.

`server` answers, `exchange` takes one request from its first byte to its last, `placement` says where it goes,
`upstream` speaks with an engine, `sse` and `continuation` are pure: what a stream holds, and how it goes on elsewhere.
"""
