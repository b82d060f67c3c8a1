"""A whole validation: structure first, then the data of every blob, layer by layer."""

import secrets
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from kconvert.convert.source import Source
from kconvert.convert.source.comparison import Comparison, open_comparison
from kconvert.convert.source.hashes import known_oid
from kconvert.layouts.blob import COMMON_FOLDER, digest
from kconvert.layouts.checkpoint import Checkpoint, read_json
from kconvert.layouts.errors import OptionError
from kconvert.layouts.families.known import read_family
from kconvert.layouts.fields import CONFIG_NAME
from kconvert.layouts.manifest import Manifest, read_manifest
from kconvert.layouts.model import VISION, Group, Model, read_model
from kconvert.layouts.registry import layout_named
from kconvert.validate import structure
from kconvert.validate.asked import Asked
from kconvert.validate.data import look_at_data
from kconvert.validate.findings import OF_SOURCE, Finding, SourceIdentity, SourceShard, Validation
from kconvert.validate.ledger import UNEXPLAINED, ledger
from kconvert.validate.product import read_in_order
from kconvert.validate.structure import Blob


def run(output: Path, asked: Asked) -> Validation:
    """See `kconvert.validate.validate`."""
    begin = time.perf_counter()
    manifest = read_manifest(output)
    compared = _open(output, manifest, asked)
    seed = asked.seed
    if asked.sample is not None and seed is None:
        seed = secrets.randbits(32)  # nobody can know beforehand what will be looked at
    result = Validation(
        complete=manifest.complete,
        against_source=compared is not None,
        sample=asked.sample,
        seed=None if asked.sample is None else seed,
        files=len(manifest.files),
    )
    if compared is None:
        for name in OF_SOURCE:
            result.check(name).skipped = "no source was given"
    else:
        result.source = _identity(compared.source, str(asked.source))
        result.verified = compared.source.verified
    _look(output, manifest, compared, asked, result)
    result.seconds = time.perf_counter() - begin
    return result


def _open(output: Path, manifest: Manifest, asked: Asked) -> Comparison | None:
    """The source, if one is given."""
    if asked.source is None:
        given = {"--verify": asked.verify, "--revision": asked.revision,
                 "--cache-dir": asked.cache_dir, "--work-dir": asked.work_dir}  # fmt: skip
        for option in (name for name, value in given.items() if value):
            raise OptionError(f"{option} is for a source: give --source.")
        return None
    return open_comparison(
        asked.source, output, (manifest.repo, manifest.commit), revision=asked.revision,
        cache_dir=asked.cache_dir, work_dir=asked.work_dir, verify=asked.verify,
    )  # fmt: skip


def _identity(source: Source, given: str) -> SourceIdentity:
    """What identifies the source; `given` is its name if it has none of its own."""
    shards = [
        SourceShard(
            shard.name, shard.size, digest(shard.header),
            source.contents[shard.name] if source.name else known_oid(source.folder / shard.name),
        )
        for shard in source.checkpoint.shards.values()
    ]  # fmt: skip
    return SourceIdentity(source.name or given, source.commit, shards)


def _look(
    output: Path,
    manifest: Manifest,
    compared: Comparison | None,
    asked: Asked,
    result: Validation,
) -> None:
    """Make the checks, as far as the findings of earlier ones allow."""
    blobs, unreadable = structure.read_blobs(output, manifest)
    result.record("headers", unreadable, 0, "blobs")
    result.record("files", structure.check_files(output, manifest), len(manifest.files), "files")
    if any(finding.file == CONFIG_NAME for finding in result.findings):
        return  # the shapes that the headers should have are not known
    family = read_family(read_json(output / CONFIG_NAME))
    dims = family.dims
    if manifest.complete:
        missing = structure.check_complete(manifest, dims)
        result.record("coverage", missing, len(blobs), "blobs")
    else:
        result.check("coverage").skipped = "the output does not claim to be complete"
    result.record("headers", structure.check_headers(manifest, blobs, dims), len(blobs), "blobs")
    result.record("alignment", structure.check_alignment(blobs), len(blobs), "blobs")
    wrong_origin = structure.check_provenance(manifest, blobs)
    result.record("provenance", wrong_origin, len(blobs), "blobs")
    common = sum(len(b.header.tensors) for b in blobs if b.info.sharding is None)
    result.record("tensors", structure.check_common(blobs, family), common, "tensors")
    model = None
    if compared is not None:
        model = read_model(compared.source.checkpoint)
        _look_at_source(output, manifest, compared.source, model, blobs, result)
    if not read_in_order(layout_named(manifest.layout)(dims.quantization)):
        result.check("product").skipped = f"layout {manifest.layout} is read in the plain order"
    # If their headers cannot be trusted, their data is not read.
    of_blobs = {name for name, entry in manifest.files.items() if entry.fingerprint is not None}
    damaged = {finding.file for finding in result.findings if finding.severity == "error"}
    result.unread = sorted(damaged & of_blobs)
    blobs = [blob for blob in blobs if blob.path not in result.unread]
    look_at_data(output, manifest, family, blobs, compared, model, asked, result)


def _look_at_source(
    output: Path,
    manifest: Manifest,
    source: Source,
    model: Model,
    blobs: list[Blob],
    result: Validation,
) -> None:
    """Compare what can be compared with the source before its shards are read."""
    wrong = chain(
        _check_small_files(output, source, manifest),
        _check_groups(manifest, blobs, model.groups),
    )
    small_files = source.checkpoint.small_files
    result.record("source-files", wrong, len(small_files), "files")
    _account(result, source.checkpoint, model, {blob.group for blob in blobs})


def _account(result: Validation, checkpoint: Checkpoint, model: Model, converted: set[str]) -> None:
    """Make the ledger, and a finding if bytes are left over; not for a part of a source."""
    if checkpoint.absent:
        result.check("ledger").skipped = "the source lacks shards that its index names"
        return
    result.ledger = ledger(checkpoint, model, converted)
    wrong = [
        Finding(CONFIG_NAME, f"{entry.bytes:,} bytes of the source's shards went nowhere")
        for entry in result.ledger
        if entry.label == UNEXPLAINED
    ]
    result.record("ledger", wrong, sum(entry.bytes for entry in result.ledger), "bytes")


def _check_small_files(output: Path, source: Source, manifest: Manifest) -> Iterable[Finding]:
    for name, entry in manifest.files.items():
        if entry.fingerprint is None and name not in source.checkpoint.small_files:
            yield Finding(name, "is not in the source")
    for name in source.checkpoint.small_files:
        path = output / name
        if not path.is_file():
            yield Finding(name, "is missing: the source has it")
        elif path.read_bytes() != source.path(name).read_bytes():
            yield Finding(name, "is not the source's")


def _check_groups(
    manifest: Manifest, blobs: list[Blob], groups: dict[str, Group]
) -> Iterable[Finding]:
    """A complete output has every group of the source (also MTP layers and vision, which its config
    does not declare), except vision if that was left out."""
    there = {blob.group for blob in blobs}
    for name in groups.keys() - there if manifest.complete else ():
        if not (name == VISION and manifest.text_only):
            yield Finding(f"{COMMON_FOLDER}/{name}.safetensors", "is missing: the source has it")
