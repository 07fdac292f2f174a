# SPDX-License-Identifier: Apache-2.0
"""Networks that read staging buffers by themselves: NIXL and Mooncake."""
