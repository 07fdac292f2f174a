# SPDX-License-Identifier: Apache-2.0
"""Requests, outputs and addresses as they travel between processes, and the keys and connections for it."""
