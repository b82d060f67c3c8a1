"""How SOURCE is understood."""

import subprocess
import sys
from pathlib import Path

import pytest

from kconvert.convert.source import HubName, hub_name
from kconvert.layouts.errors import UnsupportedError

PAGE = "https://huggingface.co/org/name"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/name", HubName("org/name")),
        ("org/name/", HubName("org/name")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/name@feature/x", HubName("org/name", "feature/x")),
        (PAGE, HubName("org/name")),
        (f"{PAGE}/", HubName("org/name")),
        (f"{PAGE}.git", HubName("org/name")),
        (f"{PAGE}?library=vllm#use", HubName("org/name")),
        (f"{PAGE}/tree/v1", HubName("org/name", "v1")),
        (f"{PAGE}/tree/v1/", HubName("org/name", "v1")),
        (f"{PAGE}/tree/refs%2Fpr%2F3", HubName("org/name", "refs/pr/3")),
        ("http://hf.co/org/name", HubName("org/name")),
        ("huggingface.co/org/name", HubName("org/name")),
        ("hf://org/name@v1", HubName("org/name", "v1")),
        ("a", None), ("a/b/c", None), ("/a/b", None), ("./a", None), ("../a/b", None), ("a/", None),
        ("~/a", None),
    ],
)  # fmt: skip
def test_names(source: str, expected: HubName | None) -> None:
    assert hub_name(source) == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("org/name@", "names no revision after its @"),
        ("https://huggingface.co/datasets/org/name", "is a dataset, not a whole model"),
        (f"{PAGE}/blob/main/config.json", "is a file or folder in org/name"),
        (f"{PAGE}/tree/main/sub", "is a file or folder in org/name"),
        (f"{PAGE}/discussions/3", "is not the address of a model"),
        ("https://huggingface.co/org", "is not the address of a model"),
        ("https://example.com/org/name", "is not the address of a model"),
        ("s3://bucket/name", "is not the address of a model"),
        ("https://[x", "is not the address of a model"),
        ("https://me:s3cret@example.com/org/name", "https://example.com/org/name is not"),
    ],
)
def test_addresses_of_something_else(source: str, words: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        hub_name(source)
    assert words in str(caught.value) and "s3cret" not in str(caught.value)


def test_what_is_here_is_no_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("org/name", "org/name@v1", "huggingface.co/org/name"):
        Path(name).mkdir(parents=True)
        assert hub_name(name) is hub_name(f"{name}/") is None


def test_a_folder_loads_no_client() -> None:
    code = (
        "import sys; from kconvert.convert.source import hub_name; hub_name('/tmp');"
        " hub_name('org/name@v1'); print('huggingface_hub' in sys.modules)"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert made.stdout == "False\n", made.stderr
