# SPDX-License-Identifier: Apache-2.0
"""Plans moves: one pure pass over a snapshot."""
