# SPDX-License-Identifier: Apache-2.0
"""The API server's half: relay socket, gate and abort route of every stream that began here.

Imported by API server processes only, never by an engine.
"""
