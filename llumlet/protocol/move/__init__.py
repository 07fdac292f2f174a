# SPDX-License-Identifier: Apache-2.0
"""A running request changes engines."""
