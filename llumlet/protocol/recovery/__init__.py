# SPDX-License-Identifier: Apache-2.0
"""An engine's half of a replay."""
