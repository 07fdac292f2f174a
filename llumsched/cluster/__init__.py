# SPDX-License-Identifier: Apache-2.0
"""The one model of the cluster: instances by id, and the same in columns.

`view` is what a store (`llumsched.cms`) writes and everybody reads. `table` observes a view and lays it out: a row per
instance, a column per number, each column written by one of the `providers`. `snapshot` is a copy of it that stands
still. Dispatch and rescheduling measure, filter and choose over these columns, and nothing keeps others of its own.
"""
