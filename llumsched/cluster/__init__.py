# SPDX-License-Identifier: Apache-2.0
"""The model of the cluster: instances by id, and the same in columns.

A store (`llumsched.cms`) writes `view`. `table` observes a view: a row per instance, a column per number, each column
written by one of the `providers`. `snapshot` is a frozen copy. Dispatch and rescheduling use these columns and keep
none of their own.
"""
