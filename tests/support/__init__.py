# SPDX-License-Identifier: Apache-2.0
"""What several test packages share."""
