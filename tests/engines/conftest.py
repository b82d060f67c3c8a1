"""`make test-engines` alone collects what lies here: the engines have an environment of their own,
which is told by their being there."""

from importlib.util import find_spec

import pytest
from engines.comparing import Folders

collect_ignore = [
    file
    for file, engine in {
        "test_vllm.py": "vllm", "test_sglang.py": "sglang", "test_install.py": "vllm",
    }.items()
    if not find_spec(engine)
]  # fmt: skip


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("folders"))
