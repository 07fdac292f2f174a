# SPDX-License-Identifier: Apache-2.0
"""The scheduler process: the HTTP service that says where a request goes, and its web page."""
