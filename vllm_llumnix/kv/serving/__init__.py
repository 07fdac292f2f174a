# SPDX-License-Identifier: Apache-2.0
"""Blocks of this worker that peers may read, and the server that sends them."""
