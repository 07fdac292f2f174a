# SPDX-License-Identifier: Apache-2.0
"""The origin's side, in the API server process: `streams` is the gate for every live request, `client` the sockets."""
