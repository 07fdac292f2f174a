# SPDX-License-Identifier: Apache-2.0
"""Turns at vLLM's queue, for requests that enter or leave it in the middle of their lives."""
