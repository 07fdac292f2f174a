# SPDX-License-Identifier: Apache-2.0
"""The scheduler process: the HTTP service that places requests, and its web page."""
