# SPDX-License-Identifier: Apache-2.0
"""Which requests and engines may exchange requests, and whether KV caches come along."""
