# SPDX-License-Identifier: Apache-2.0
"""Conditions under which two engines exchange requests, and under which KV caches come along."""
