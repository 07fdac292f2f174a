# SPDX-License-Identifier: Apache-2.0
"""Faults of an instance's reports by themselves. Each function returns all faults, a sentence each.

They run for every message, so a few calls into C check it as a whole, and only a faulty one is checked field by field.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from google.protobuf.descriptor import FieldDescriptor

from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumlet.protocol.infer_type import InferType
from llumsched.cluster.providers.status import number_faults, numbers_of

MAX_ID_CHARACTERS: Final = 256
"""Longest id of an instance or a life: ids are keys, labels of metrics, and logged."""
MAX_TEXT_CHARACTERS: Final = 4096
MAX_LIST: Final = 4096
"""Largest number of requests in a list, and of served names."""
MAX_REPORT_BYTES: Final = 2 << 20

_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
_INTEGERS = (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)


_METADATA_NUMBERS = [
    field.name
    for field in InstanceMetadata.DESCRIPTOR.fields
    if field.cpp_type in (*_FLOATS, *_INTEGERS) and not field.is_repeated and field.name != "kvt_port"
]
"""Fields whose number must be finite and not negative."""
_numbers_of_metadata = attrgetter(*_METADATA_NUMBERS)


def metadata_faults(metadata: InstanceMetadata) -> list[str]:
    faults = []
    for field in ("instance_id", "incarnation", "ip"):
        text = getattr(metadata, field)
        if not text:
            faults.append(f"{field} is empty")
        elif len(text) > MAX_ID_CHARACTERS:
            faults.append(f"{field} has {len(text)} characters")
        elif not text.isprintable():
            faults.append(f"{field} has characters that cannot be printed")
    if metadata.instance_type not in tuple(InferType):
        faults.append(f"instance_type {metadata.instance_type[:40]!r} is not one of {', '.join(InferType)}")
    for field in ("llumlet_port", "api_server_port"):
        if not 0 <= getattr(metadata, field) < 65536:
            faults.append(f"{field} {getattr(metadata, field)} is not a port")
    for name in ("node_id", "unit_id", "model", "backend_type", "version", "engine_version"):
        if len(getattr(metadata, name)) > MAX_TEXT_CHARACTERS:
            faults.append(f"{name} has {len(getattr(metadata, name))} characters")
    if len(metadata.served_models) > MAX_LIST or len(metadata.transports) > MAX_LIST:
        faults.append("served_models or transports is too long")
    return faults + [
        f"{name} is {value}"
        for name, value in zip(_METADATA_NUMBERS, _numbers_of_metadata(metadata), strict=True)
        if not (math.isfinite(value) and value >= 0)
    ]


def status_faults(
    status: InstanceStatus, instance_id: str, incarnation: str, numbers: Sequence[float] | None = None
) -> list[str]:
    """Faults of a status from this life of an instance. `numbers`: the status's, if they have been read."""
    faults = []
    if status.instance_id != instance_id:
        faults.append(f"instance_id {status.instance_id[:MAX_ID_CHARACTERS]!r} is not that of the metadata")
    if status.incarnation != incarnation:
        faults.append(f"incarnation {status.incarnation[:MAX_ID_CHARACTERS]!r} is not that of the metadata")
    if len(status.recent_waiting_requests) > MAX_LIST or len(status.waiting_requests) > MAX_LIST:
        faults.append(f"more than {MAX_LIST} requests are listed")
    if len(status.coming_blocks) > MAX_LIST or len(status.coming_ends) > MAX_LIST:
        faults.append(f"more than {MAX_LIST} coming steps are told")
    return faults + number_faults(numbers_of(status) if numbers is None else numbers)
