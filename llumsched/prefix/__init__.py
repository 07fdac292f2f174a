# SPDX-License-Identifier: Apache-2.0
"""What the prefix caches of the instances hold, and how much of a prompt that is."""
