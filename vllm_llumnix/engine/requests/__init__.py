# SPDX-License-Identifier: Apache-2.0
"""Requests as they travel: read, checked, and built again here with their history."""
