# SPDX-License-Identifier: Apache-2.0
"""The mover's private directory goes away, however its owner ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_llumnix.kv.mover.endpoint import PREFIX, PrivateDirectory, sweep

OWNER = """
import sys
from vllm_llumnix.kv.mover.endpoint import PrivateDirectory
directory = PrivateDirectory(sys.argv[1])
print(directory.path, flush=True)
sys.stdin.read()
"""


def own_and_exit(parent: str) -> None:
    directory = PrivateDirectory(parent)
    Path(parent, "seen").write_text(str(directory.path))


@pytest.fixture
def owner(tmp_path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    with process:
        yield process
        process.kill()


def test_only_this_user_may_enter(tmp_path: Path) -> None:
    directory = PrivateDirectory(str(tmp_path))
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.close()
    assert list(tmp_path.iterdir()) == []
    directory.close()


def test_removed_when_a_child_of_multiprocessing_ends(tmp_path: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=own_and_exit, args=(str(tmp_path),))
    child.start()
    child.join()
    assert child.exitcode == 0
    path = Path((tmp_path / "seen").read_text())
    assert path.parent == tmp_path
    assert not path.exists()


def test_a_forked_child_leaves_it_alone(tmp_path: Path) -> None:
    directory = PrivateDirectory(str(tmp_path))
    child = multiprocessing.get_context("fork").Process(target=directory.close)
    child.start()
    child.join()
    assert directory.path.exists()
    directory.close()


def test_killed_owner_s_endpoint_is_swept(tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    assert owner.stdout is not None
    path = Path(owner.stdout.readline().strip())
    assert sweep(tmp_path) == []
    assert path.exists()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert path.exists()
    directory = PrivateDirectory(str(tmp_path))
    assert not path.exists()
    directory.close()


def test_foreign_or_unfinished_endpoint_is_not_swept(tmp_path: Path) -> None:
    unfinished = tmp_path / f"{PREFIX}unfinished"
    unfinished.mkdir()
    (tmp_path / "other").mkdir()
    linked = tmp_path / f"{PREFIX}linked"
    linked.mkdir()
    os.symlink("/etc/passwd", linked / "lock")
    assert sweep(tmp_path) == []
    assert linked.exists()
    assert unfinished.exists()


def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with pytest.raises(ValueError, match="set TMPDIR to a shorter one"):
        PrivateDirectory(str(long))
    assert list(long.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_other_user_s_endpoint_is_not_swept(tmp_path: Path) -> None:
    """A directory that somebody else has prepared under our name: whatever is in it is theirs."""
    trap = tmp_path / f"{PREFIX}trap"
    trap.mkdir()
    (trap / "lock").touch()
    os.chown(trap, 12345, 12345)
    assert sweep(tmp_path) == []
    os.chown(trap, os.geteuid(), os.getegid())
    assert sweep(tmp_path) == [trap]
