"""Writing a validation's report into a file: whole, or not at all."""

from pathlib import Path

from kconvert.layouts.blob import digest
from kconvert.layouts.manifest import MANIFEST_NAME, Manifest, read_manifest
from kconvert.validate.findings import Validation
from kconvert.validate.report.page import made, write_whole
from kconvert.validate.report.parity import parity_of
from kconvert.validate.report.render import Subject, render


def write_report(result: Validation, output: Path, target: Path) -> None:
    """Write the page on `result`, a validation of `output`, to `target`.

    Raises OutputError if `output` has no manifest, OSError as the system gives it.
    """
    write_whole(render(result, subject_of(output)), target)


def subject_of(output: Path) -> Subject:
    """What the page says about an output beside what was found."""
    manifest = read_manifest(output)
    return Subject(
        output=output.name,
        manifest=manifest,
        digest=digest((output / MANIFEST_NAME).read_bytes()),
        parity=parity_of(output, (name for name, e in manifest.files.items() if e.fingerprint)),
        rank_bytes=_sums(manifest, 0),
        layer_bytes=_sums(manifest, 1),
        made=made(),
    )


def _sums(manifest: Manifest, part: int) -> dict[str, int]:
    """Bytes of the blobs by a part of their paths: 0 the folder, 1 the group they hold."""
    found: dict[str, int] = {}
    for name, entry in sorted(manifest.files.items()):
        if "/" in name:
            key = name.removesuffix(".safetensors").split("/")[part]
            found[key] = found.get(key, 0) + entry.bytes
    return dict(sorted(found.items()))
