# SPDX-License-Identifier: Apache-2.0
"""Requests whose owner died or hangs: started again here, or fetched with their KV cache."""
