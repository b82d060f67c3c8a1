"""Files that another output has already, byte for byte: linked instead of made again."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kconvert.convert.output import publish
from kconvert.convert.plan import Plan
from kconvert.convert.planned import PlannedFile
from kconvert.convert.progress import Meter
from kconvert.convert.source import Source
from kconvert.layouts.blob import new_digest, read_blob
from kconvert.layouts.checkpoint import tensor_in
from kconvert.layouts.reader import CHUNK_BYTES, Reader, Scratch
from kconvert.layouts.stored.expert import refuse_changed


def link_finished(
    plan: Plan, source: Source, workspace: publish.OwnedWorkspace, workers: int, meter: Meter
) -> frozenset[str]:
    """Publish a link for every file of `plan` that the source already has byte for byte, if the
    file system can link, and return their paths. Each is read once and compared with its digests.

    Raises CheckpointError if one was changed.
    """
    staged: list[tuple[PlannedFile, Path, Path]] = []
    for file in plan.files:
        there = source.finished(file.path, file.fingerprint)
        link = there and publish.link(workspace, there, file.path)
        if there is not None and link is not None:
            staged.append((file, there, link))
    scratch = Scratch()

    def check(file: PlannedFile, there: Path, _: Path) -> None:
        with meter.busy("read", file.nbytes - file.header_bytes):
            _check(there, file.path, scratch)

    pool = ThreadPoolExecutor(workers, thread_name_prefix="link")
    try:
        checks = [pool.submit(check, *one) for one in staged]
        for (file, _, link), checked in zip(staged, checks, strict=True):
            checked.result()
            with meter.busy("write", file.nbytes - file.header_bytes):
                publish.publish(workspace, link, workspace.output / file.path)
    finally:
        pool.shutdown(cancel_futures=True)
    return frozenset(file.path for file, _, _ in staged)


def _check(path: Path, name: str, scratch: Scratch) -> None:
    """Compare every tensor of a blob with its digest, and stacked ones expert by expert."""
    header, info = read_blob(path)
    reader = Reader(lambda _: path)
    buffer = scratch.take("chunk", (CHUNK_BYTES,), np.uint8)
    try:
        for entry in header.tensors.values():
            tensor = tensor_in(name, entry)
            experts = info.expert_digests.get(entry.name)
            parts = [tensor] if experts is None else [*map(tensor.part, range(len(experts)))]
            wanted = experts or [info.digests[entry.name]]
            for expert, (part, digest) in enumerate(zip(parts, wanted, strict=True)):
                state = new_digest()
                for chunk in reader.chunks(part, buffer):
                    state.update(chunk)
                which = "" if experts is None else f", its expert {expert}"
                refuse_changed(reader, part, state.hexdigest(), digest, which)
    finally:
        reader.close()
