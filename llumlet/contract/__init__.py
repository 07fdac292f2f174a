# SPDX-License-Identifier: Apache-2.0
"""The llumlet's gRPC surface: messages, server and client.

`proto/llumlet.proto` is the contract. An engine implements `agent.Agent` and hands it to `server.serve`; schedulers,
peers and the command line use `client.LlumletClient`.
"""
