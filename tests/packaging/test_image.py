# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile is built, on stand-ins for the images of vLLM: these are 10 GB, and this machine's files do as well.

A stand-in holds an environment with a `vllm` that has the files that are patched. All else that a build needs (Python,
the compiler, the packages of the tests) is this machine's and mounted: buildah starts nothing but a chroot.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.environment import OUR_SITE

_MAY_MOUNT = subprocess.run(["unshare", "--mount", "true"], stderr=subprocess.DEVNULL, check=False).returncode == 0
pytestmark = [
    pytest.mark.skipif(not _MAY_MOUNT, reason="buildah's chroot must mount; a container may not"),
    pytest.mark.rest,
]

ENVIRONMENT = "/opt/env"
PACKAGES = "/opt/packages"
ENTRYPOINT = ["vllm", "serve"]
_OWN = ("vllm", "vllm-", "vllm_", "__editable__", "zz-")
_OURS = [path for path in sorted(OUR_SITE.iterdir()) if path.suffix != ".pth" and not path.name.startswith(_OWN)]
"""What images of vLLM have as well, and what builds a wheel, but for vLLM and this package."""


class Images:
    """Images of their own below `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._buildah = ("buildah", "--root", directory / "root", "--runroot", directory / "run")
        self._volumes = {Path("/usr"), Path("/etc/alternatives"), Path(sys.base_prefix), OUR_SITE}

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [*map(str, self._buildah), "--storage-driver", "vfs", *map(str, arguments)]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)

    def build(self, name: str, dockerfile: Path, context: Path, *options: str) -> subprocess.CompletedProcess[str]:
        volumes = [f"--volume={path}:{path}:ro" for path in self._volumes if path.exists()]
        isolation = ("--isolation", "chroot", "--pull-never", *volumes)
        return self.run("build", *isolation, *options, "--file", dockerfile, "--tag", name, context)

    def stand_in(self, tag: str, version: str, vllm: Path) -> None:
        """An image of vLLM of a version, with the files of `vllm`."""
        context = self._directory / tag
        root = context / "root"
        site = root / ENVIRONMENT[1:] / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        for directory in ("tmp", "etc", "proc", "dev", "sys", "usr", "opt/env/bin", PACKAGES[1:]):
            (root / directory).mkdir(parents=True)
        for name in ("bin", "lib", "lib64", "sbin"):
            (root / name).symlink_to(f"usr/{name}")
        for python in ("python", "python3"):
            (root / ENVIRONMENT[1:] / "bin" / python).symlink_to(os.path.realpath(sys.executable))
        (root / ENVIRONMENT[1:] / "pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\n")
        for path in _OURS:
            (root / PACKAGES[1:] / path.name).symlink_to(path)
        shutil.copytree(vllm, site)
        information = site / f"vllm-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        (information / "RECORD").write_text("")
        (context / "Dockerfile").write_text(
            "FROM scratch\nCOPY root /\n"
            f"ENV PATH={ENVIRONMENT}/bin:/usr/bin:/bin PYTHONPATH={PACKAGES} PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0\n"
            f"ENTRYPOINT {json.dumps(ENTRYPOINT)}\n"
        )
        made = self.build(f"docker.io/vllm/vllm-openai:{tag}", context / "Dockerfile", context)
        assert made.returncode == 0, made.stdout


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return Images(tmp_path)


def test_the_image_is_built_on_vllms(images: Images, source: Path, small_vllm: Path) -> None:
    images.stand_in("v0.32.0", "0.32.0", small_vllm)
    made = images.build("ours", source / "deploy" / "Dockerfile", source, "--build-arg", "VLLM_VERSION=0.32.0")
    assert made.returncode == 0, made.stdout
    assert "Successfully installed vllm-llumnix" in made.stdout
    told = json.loads(images.run("inspect", "--type", "image", "ours").stdout)
    assert told["OCIv1"]["config"]["Entrypoint"] == ENTRYPOINT


def test_an_image_of_another_vllm_is_refused(images: Images, source: Path, small_vllm: Path) -> None:
    """It would be replaced, where an index is."""
    images.stand_in("v0.32.0", "0.32.1", small_vllm)
    made = images.build("ours", source / "deploy" / "Dockerfile", source, "--build-arg", "VLLM_VERSION=0.32.0")
    assert made.returncode != 0
    assert "The user requested (constraint) vllm==0.32.0" in made.stdout, made.stdout
