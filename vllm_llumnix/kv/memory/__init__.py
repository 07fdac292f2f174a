# SPDX-License-Identifier: Apache-2.0
"""KV memory: the layout of its blocks, and how their bytes are read and written."""
