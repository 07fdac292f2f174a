# SPDX-License-Identifier: Apache-2.0
"""The contents of all instances' prefix caches, and the cached part of a prompt."""
