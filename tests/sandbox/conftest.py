"""The image of the tests marked podman, in a storage of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.sandbox.images import build_tree
from tests.sandbox.sandboxes import IMAGE


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Podman has `IMAGE`; its storage is a folder that is removed at the end."""
    folder = tmp_path_factory.mktemp("podman")
    storage, settings, tree = folder / "storage.conf", folder / "containers.conf", folder / "tree"
    storage.write_text(f'[storage]\ndriver = "vfs"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/graph"\n')
    # crun refuses hybrid cgroups
    settings.write_text('[engine]\nruntime = "runc"\n' if shutil.which("runc") else "")
    build_tree(tree)
    subprocess.run(["tar", "-C", tree, "-cf", folder / "image.tar", "."], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(storage))
        patch.setenv("CONTAINERS_CONF", str(settings))
        subprocess.run(["podman", "import", folder / "image.tar", IMAGE], check=True, capture_output=True)
        yield IMAGE
        left = subprocess.run(["podman", "ps", "-aq"], check=True, capture_output=True, text=True).stdout
        subprocess.run(["podman", "rmi", "--all", "--force"], check=True, capture_output=True)
    shutil.rmtree(folder)
    assert left == "", "containers are left"
    assert "CONTAINERS_STORAGE_CONF" not in os.environ


@pytest.fixture(autouse=True)
def _has_its_image(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("podman"):
        request.getfixturevalue("image")
