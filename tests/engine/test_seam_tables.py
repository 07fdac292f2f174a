# SPDX-License-Identifier: Apache-2.0
"""What is wrapped or set in vLLM is in a table, and what is in a table is there, in vLLM and in our code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_llumnix import seams
from vllm_llumnix.engine.attach import _check_workers, attach
from vllm_llumnix.errors import PatchError
from vllm_llumnix.patching.installed import find_vllm
from vllm_llumnix.patching.release import reader_of
from vllm_llumnix.patching.seam import Seam, SeamKind, Seams, absent
from vllm_llumnix.seams import ALL

ROOT = Path(__file__).parents[2]
CODE = [path for part in ("engine", "kv", "frontend") for path in sorted((ROOT / "vllm_llumnix" / part).rglob("*.py"))]
VLLMS_OBJECTS = {
    *("engine", "_engine", "scheduler", "executor", "model_executor", "worker", "resources", "_grammars"),
    *("lora_config", "scheduler_config", "structured_output_manager", "kv_cache_manager", "block_pool"),
}
"""What our code calls them: the last part of an expression that an attribute is assigned to."""
REQUESTS = {"request", "self.request", "self._request"}
MESSAGES = {"queue_server_address"}
"""A field of `EngineCoreRequest`, which a patch adds."""


def targets(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that plain assignments set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            found = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            found = [node.target]
        else:
            continue
        for target in found:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from (part for part in parts if isinstance(part, ast.Attribute))


def assigned(path: Path) -> set[str]:
    """Names of attributes of vLLM's objects that a module assigns to."""
    names = set()
    for target in targets(ast.parse(path.read_text())):
        base = ast.unparse(target.value)
        if base.split(".")[-1].lstrip("_") in VLLMS_OBJECTS or base in REQUESTS:
            names.add(target.attr)
    return names - MESSAGES


def wrapped() -> set[str]:
    """Names that our code gives to `wrap` of a table."""
    calls = (node for path in CODE for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return {
        call.args[1].value
        for call in calls
        if ast.unparse(call.func) in ("ENGINE.wrap", "WORKER.wrap", "CLIENT.wrap") and is_name(call.args[1])
    }


def is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_set_that_is_not_in_a_table(path: Path) -> None:
    values = {row.attribute for row in ALL if row.kind in (SeamKind.SET, SeamKind.ADDED)}
    strangers = assigned(path) - values
    assert not strangers, f"into seams.py, or through ENGINE.wrap: {strangers}"


def test_whatever_is_in_a_table_is_done() -> None:
    done, set_somewhere = wrapped(), set[str]().union(*map(assigned, CODE))
    for row in ALL:
        if row.kind in (SeamKind.WRAPPED, SeamKind.REPLACED):
            assert row.name in done, row.name
        else:
            # `config.long_prefill_token_threshold`: an alias within one function
            assert row.name in done or row.attribute in set_somewhere | {"long_prefill_token_threshold"}, row.name
    assert done <= {row.name for row in ALL}


def test_rows_are_complete() -> None:
    assert len({row.name for row in ALL}) == len(ALL)
    for row in ALL:
        assert row.why, row.name
        assert row.remove_when, row.name
        assert row.process in {"api", "core", "worker"}, row.name
        assert (ROOT / row.test).is_file(), row.name


def test_the_installed_vllm_has_them_all() -> None:
    package = find_vllm()
    assert package is not None
    read = reader_of(package.parent)
    assert absent(ALL, read) == []
    # And one that is gone is seen, whether a method, an attribute of the class, or one of its objects.
    for name in ("Scheduler._free_request", "SchedulerConfig.long_prefill_token_threshold", "EngineCore.step_fn"):
        (row,) = (row for row in ALL if row.name == name)
        without = read(row.path).replace(row.attribute.encode(), b"something_else")
        assert row in absent([row], lambda path, text=without: text)
    assert len(absent(ALL, lambda path: b"")) == sum(row.kind is not SeamKind.ADDED for row in ALL)


def seam(attribute: str, kind: SeamKind = SeamKind.WRAPPED) -> Seam:
    return Seam("vllm/x.py", "Owner", attribute, kind, "so that it works", "core", "never", "tests/x.py")


def test_wrapping_what_is_gone_is_refused_by_name() -> None:
    table = Seams(seam("there"), seam("gone"), seam("new", SeamKind.ADDED))
    target = SimpleNamespace(there=1)
    table.wrap(target, "Owner.there", len)
    table.wrap(target, "Owner.new", len)
    assert (target.there, target.new) == (len, len)
    with pytest.raises(PatchError, match=r"wraps or sets: Owner.gone \(so that it works\): install a vLLM"):
        table.wrap(target, "Owner.gone", len)
    with pytest.raises(KeyError):
        table.wrap(target, "Owner.unlisted", len)
    assert not hasattr(target, "gone")
    with pytest.raises(PatchError, match=r"sets: Owner.gone \("):
        table.require({"Owner": target})
    table.require({"Owner": None, "Other": object()})


def engine_with_everything() -> Any:
    owners: dict[str, SimpleNamespace] = {}
    for row in seams.ENGINE:
        setattr(owners.setdefault(row.owner, SimpleNamespace()), row.attribute, None)
    scheduler = SimpleNamespace(**vars(owners["Scheduler"]) | {"scheduler_config": owners["SchedulerConfig"]})
    scheduler.lora_config = owners["LoRAConfig"]
    scheduler.kv_cache_manager = SimpleNamespace(block_pool=owners["BlockPool"])
    return SimpleNamespace(
        **vars(owners["EngineCore"]) | vars(owners["EngineCoreProc"]),
        scheduler=scheduler,
        model_executor=owners["Executor"],
        structured_output_manager=owners["StructuredOutputManager"],
    )


@pytest.mark.parametrize(
    ("where", "attribute", "name"),
    [
        ("", "_process_aborts_queue", "EngineCore._process_aborts_queue"),
        ("", "_handle_client_request", "EngineCoreProc._handle_client_request"),
        ("scheduler", "max_num_active_reqs", "Scheduler.max_num_active_reqs"),
        ("scheduler", "_preempt_request", "Scheduler._preempt_request"),
        ("model_executor", "execute_model", "Executor.execute_model"),
        ("structured_output_manager", "grammar_init", "StructuredOutputManager.grammar_init"),
    ],
)
def test_attach_refuses_an_engine_without_one(
    monkeypatch: pytest.MonkeyPatch, where: str, attribute: str, name: str
) -> None:
    """Before anything is started or changed."""
    engine = engine_with_everything()
    seams.require(engine)
    delattr(getattr(engine, where) if where else engine, attribute)
    before = dict(vars(engine))
    engine.engine_index = 0
    monkeypatch.setenv("LLUMNIX_LLUMLET", '{"instance_id": "a"}')
    with pytest.raises(PatchError, match=rf"wraps or sets: {name} \("):
        attach(engine)
    assert vars(engine) == before | {"engine_index": 0}


def test_attach_refuses_a_worker_without_one() -> None:
    worker = SimpleNamespace(sleep=None, discard=None, execute_model=None, compile_or_warm_up_model=None)
    executor = SimpleNamespace(collective_rpc=lambda function: [function(SimpleNamespace(worker=worker))])
    with pytest.raises(PatchError, match=r"wraps or sets: Worker.wake_up \("):
        _check_workers(SimpleNamespace(model_executor=executor))
    worker.wake_up = None
    _check_workers(SimpleNamespace(model_executor=executor))
