# SPDX-License-Identifier: Apache-2.0
"""Measurements of the real thing: real vLLM processes, timed from the client's side.

`python -m benchmarks.downtime` and `python -m benchmarks.overhead` are the entry points; `model`,
`harness`, `client`, `moves` and `stats` are what they, the demo and the integration tests are made
of. Nothing here is installed.
"""
