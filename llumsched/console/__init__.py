# SPDX-License-Identifier: Apache-2.0
"""The command line's output and questions: tables, JSON lines, hints, exit codes, calls to many llumlets."""
