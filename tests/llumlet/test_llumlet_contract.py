# SPDX-License-Identifier: Apache-2.0
"""The contract itself: generated code, reasons, field numbers, and what may be imported."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import llumlet
from llumlet.contract.errors import STATUS_OF_REASON
from llumlet.contract.proto.generate import generate
from llumlet.contract.types import (
    InstanceMetadata,
    InstanceStatus,
    MigrateRequest,
    MigrationReqPolicy,
    MigrationType,
    Reason,
    reason_word,
    word,
)
from llumlet.protocol.errors import Reason as EngineReason
from llumlet.protocol.move.selection import Order

ROOT = Path(llumlet.__file__).resolve().parents[1]
GENERATED = ("llumlet_pb2.py", "llumlet_pb2.pyi", "llumlet_pb2_grpc.py", "llumlet_pb2_grpc.pyi")


@pytest.mark.parametrize("name", GENERATED)
def test_generated_code_is_current(tmp_path: Path, name: str) -> None:
    pytest.importorskip("grpc_tools")
    committed = (ROOT / "llumlet" / "contract" / "proto" / name).read_text()
    written_by = f"GRPC_GENERATED_VERSION = '{metadata.version('grpcio-tools')}'"
    if written_by not in (ROOT / "llumlet/contract/proto/llumlet_pb2_grpc.py").read_text():
        pytest.fail("regenerate with the pinned grpcio-tools: python -m llumlet.contract.proto.generate")
    generate(ROOT, tmp_path)
    assert (tmp_path / "llumlet" / "contract" / "proto" / name).read_text() == committed


def test_reasons_are_those_of_the_engine_side() -> None:
    wire = {name: name.lower() for name, value in Reason.items() if value}
    assert wire == {reason.name: reason.value for reason in EngineReason}


def test_every_reason_has_a_status() -> None:
    assert STATUS_OF_REASON.keys() == set(Reason.values()) - {Reason.REASON_NONE}


def test_names_of_the_public_contract() -> None:
    assert MigrationType.keys()[1:] == ["NUM_REQ", "TOKEN", "RATIO"]
    assert MigrationReqPolicy.keys()[1:] == ["LCR", "FCR", "LR", "SR", "FCW", "FCWSR", "LP"] == [*Order]


def numbers(message: type[InstanceStatus | InstanceMetadata | MigrateRequest]) -> dict[int, str]:
    return {field.number: field.name for field in message.DESCRIPTOR.fields}


def test_field_numbers_of_the_public_contract() -> None:
    migrate = numbers(MigrateRequest)
    assert [migrate[number] for number in range(1, 11)] == [
        "src_engine_id",
        "dst_engine_id",
        "dst_engine_ip",
        "dst_engine_port",
        "migration_type",
        "migration_req_policy",
        "num_reqs",
        "num_tokens",
        "kv_cache_usage_ratio",
        "trigger_policy",
    ]
    metadata_fields = numbers(InstanceMetadata)
    assert [metadata_fields[number] for number in (1, 6, 7, 9, 12, 16, 19, 20)] == [
        "instance_id",
        "api_server_port",
        "llumlet_port",
        "node_id",
        "unit_id",
        "utc_create",
        "block_size",
        "max_num_batched_tokens",
    ]
    status = numbers(InstanceStatus)
    assert [status[number] for number in (2, 5, 7, 10, 12, 14, 26, 29, 37)] == [
        "schedulable",
        "update_id",
        "waiting_requests",
        "num_waiting_requests",
        "num_running_requests",
        "num_total_gpu_tokens",
        "num_migrate_in_reqs",
        "num_available_migrate_out_slots",
        "available_kv_cache_usage_ratio_migrate_out",
    ]


def test_a_number_of_a_newer_peer_is_shown_as_such() -> None:
    assert word(Reason, 999) == "999"
    assert reason_word(Reason.REASON_NONE) == ""


def test_neither_vllm_nor_torch_is_imported() -> None:
    program = """
import importlib, pkgutil, sys
before = set(sys.modules)  # the import hook of an installed vllm-llumnix is there from the start
for name in ("llumlet", "llumsched"):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        importlib.import_module(module.name)
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} & {"vllm", "torch", "vllm_llumnix"}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"
