"""Loading true-size layers on a GPU: vLLM's own loader against a converted folder.

    python tests/engines/gpu_load.py WORK RESULT.json [--layers 3] [--repeats 2]

Needs vLLM, torch, and what kconvert needs to convert (numba, numpy, tqdm, typer, xxhash) on the
path; kconvert itself is linked into WORK. WORK takes 21 GB a MoE layer, and what is loaded has to
fit the page cache. Writes a checkpoint of K2.6's sizes (a dense layer, then MoE layers; vocabulary
32,768), converts it (marlin, tp 1), and loads both in turn, each in a process of its own with its
files in the page cache. Of each: seconds of vLLM's `load_model` and its parts, peak GPU memory,
tokens, logprobs, and the digest of every parameter. Without a GPU it runs on tiny sizes with the
CPU shim, to test this script.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
PROMPT = [1, 17, 300, 5, 88, 260, 7, 410]
KEYS = (
    "hidden_size", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "q_lora_rank",
)  # fmt: skip


def main() -> None:
    if "--one" in sys.argv:
        one(json.loads(sys.argv[-1]))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    work, gpu = options.work.resolve(), torch.cuda.is_available()
    link_package(work / "site")
    sys.path[:0] = [str(work / "site"), str(ROOT / "tests"), str(ROOT / "tests/engines")]
    source, output = make_folders(work, options.layers, gpu)
    report: dict[str, Any] = {
        "machine": machine(), "layers": options.layers,
        "source_bytes": size_of(source), "converted_bytes": size_of(output), "runs": [],
    }  # fmt: skip
    for _ in range(options.repeats):
        for name, folder in (("stock", source), ("marlin", output)):
            run = start(work, name, folder, gpu)
            report["runs"].append(run)
            say({k: v for k, v in run.items() if k != "parameters"})
            options.result.write_text(json.dumps(report))
    options.result.write_text(json.dumps(summary(report), indent=1) + "\n")
    say({k: v for k, v in report.items() if k != "runs"})


def say(what: object) -> None:
    print(f"[{time.monotonic():.0f} s] {what}", flush=True)


def machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    driver = torch.cuda.driver_version() if hasattr(torch.cuda, "driver_version") else None
    return {
        "gpu": gpu, "driver": driver, "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def link_package(site: Path) -> None:
    """kconvert and its entry point, as an installation would have them."""
    package, info = site / "kconvert", site / "kconvert-0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    info.mkdir(exist_ok=True)
    for folder in ("layouts", "convert", "validate", "runtime"):
        if not (package / folder).exists():
            (package / folder).symlink_to(ROOT / folder)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kconvert\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nkconvert = kconvert.runtime.plugins.entry:vllm\n"
    )


def make_folders(work: Path, layers: int, gpu: bool) -> tuple[Path, Path]:
    import checkpoints

    from kconvert.convert import convert
    from kconvert.convert.synth.presets import PRESETS

    source, output = work / "source", work / "marlin"
    if not source.exists():
        begin, sizes = time.perf_counter(), {"num_hidden_layers": layers}
        if gpu:
            text = PRESETS["k2.6"].config["text_config"]
            sizes |= {key: text[key] for key in KEYS} | {"vocab_size": 32768}
        checkpoints.write(source, **sizes)
        say(f"checkpoint written in {time.perf_counter() - begin:.0f} s")
    if not output.exists():
        begin = time.perf_counter()
        convert(str(source), output)
        say(f"converted in {time.perf_counter() - begin:.0f} s")
    return source, output


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def start(work: Path, name: str, folder: Path, gpu: bool) -> dict[str, Any]:
    """One load in a process of its own, with its files in the page cache."""
    for path in sorted(folder.rglob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.read(64 << 20):
                pass
    result = work / "one.json"
    result.unlink(missing_ok=True)
    path = [work / "site", ROOT / "tests/engines"]
    if not gpu:
        import launch

        launch.write_plugins(work / "shim")
        path.append(work / "shim")
    environment = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "PYTHONPATH": ":".join([*map(str, path), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    case = json.dumps({"name": name, "folder": str(folder), "result": str(result)})
    log = work / f"{name}.log"
    with open(log, "w") as out:
        command = [sys.executable, __file__, "--one", case]
        code = subprocess.run(command, env=environment, stdout=out, stderr=out).returncode
    if code or not result.exists():
        sys.exit(f"{name} ended with {code}:\n{log.read_text()[-4000:]}")
    return json.loads(result.read_text())


def one(case: dict[str, str]) -> None:
    """The process of one load."""
    from vllm import LLM, SamplingParams, __version__
    from vllm.inputs import TokensPrompt
    from vllm.model_executor.model_loader import base_loader, default_loader

    run: dict[str, Any] = {"name": case["name"], "vllm": __version__}
    ours = case["name"] != "stock"
    if ours:  # as the plugin's module would be loaded by vLLM anyway
        from kconvert.runtime.filling import filler
        from kconvert.runtime.plugins import vllm

        timed(vllm.KconvertLoader, "load_weights", run)
        timed(filler.Filler, "wait", run)
    else:
        timed(default_loader.DefaultModelLoader, "load_weights", run)
    timed(base_loader, "process_weights_after_loading", run)
    timed(base_loader.BaseModelLoader, "load_model", run)
    with_peak(base_loader.BaseModelLoader, run)
    llm = LLM(
        model=case["folder"], load_format="kconvert" if ours else "auto", moe_backend="marlin",
        skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, max_num_seqs=4,
        dtype="bfloat16", seed=0, gpu_memory_utilization=0.5, enable_prefix_caching=False,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=16, logprobs=0, detokenize=False)
    (request,) = llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], sampling)
    run["tokens"] = list(request.outputs[0].token_ids)
    run["logprob"] = request.outputs[0].cumulative_logprob
    run["parameters"] = llm.apply_model(digests)[0]
    if ours:
        run["experts_alone"] = experts_alone(Path(case["folder"]))
        if torch.cuda.is_available():
            run["page_cache_to_device"] = page_cache_to_device(Path(case["folder"]))
    Path(case["result"]).write_text(json.dumps(run))
    sys.stdout.flush()
    os._exit(0)


def timed(owner: Any, name: str, run: dict[str, Any]) -> None:
    """Count the seconds of a function, to the end of what it began on the GPU."""
    original: Callable[..., Any] = getattr(owner, name)

    def function(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        result = original(*arguments, **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        key = f"{name}_seconds"
        run[key] = round((run.get(key) or 0) + time.perf_counter() - begin, 4)
        return result

    setattr(owner, name, function)


def with_peak(owner: Any, run: dict[str, Any]) -> None:
    """Bytes of GPU memory at the end of load_model, and the most during it."""
    original = owner.load_model

    def load_model(*arguments: Any, **options: Any) -> Any:
        if not torch.cuda.is_available():
            return original(*arguments, **options)
        torch.cuda.reset_peak_memory_stats()
        model = original(*arguments, **options)
        run["peak_bytes"] = torch.cuda.max_memory_allocated()
        run["model_bytes"] = torch.cuda.memory_allocated()
        return model

    owner.load_model = load_model


def digests(model: torch.nn.Module) -> dict[str, str]:
    import xxhash

    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        what = f"{tensor.dtype}{list(tensor.shape)}"
        found[name] = what + xxhash.xxh3_128(data).hexdigest()
    return found


def experts_alone(folder: Path) -> dict[str, float]:
    """GB/s of filling fresh parameters of all layers with experts, digests compared or not: the
    second of two times, as pinned memory is made at the first."""
    from kconvert.layouts.experts import STACKED
    from kconvert.layouts.sharding import RankSlice
    from kconvert.layouts.stored.output import Output
    from kconvert.layouts.w4a16 import W4A16
    from kconvert.runtime.filling.filler import Filler
    from kconvert.runtime.plugins.device import memory_of, place
    from kconvert.runtime.plugins.loading import ExpertLayer, fill

    output, layers = Output(folder), []
    wanted = RankSlice(range(output.dims.experts), range(output.dims.intermediate))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for number in output.moe_layers():
        parameters = {}
        for tensor in STACKED:
            cut = tensor.cut(wanted.rows, output.dims.hidden)
            shape = W4A16(output.dims.quantization).shape(tensor.role, cut.n, cut.k)
            parameters[tensor.name] = torch.empty(
                (len(wanted.experts), *shape), device=device,
                dtype=torch.int32 if tensor.role == "code" else torch.bfloat16,
            )  # fmt: skip
        layers.append(ExpertLayer(f"model.layers.{number}.mlp.experts", wanted, parameters, False))
    shapes = [{name: p.shape for name, p in layer.parameters.items()} for layer in layers]
    rates = {}
    for name, check in (("checked", True), ("unchecked", False)) * 2:
        for layer, before in zip(layers, shapes, strict=True):
            for key, parameter in layer.parameters.items():
                parameter.data = parameter.data.view(before[key])
        begin = time.perf_counter()
        with Filler(memory_of(layers), check) as filler:
            for layer in layers:
                fill(filler, output, layer, functools.partial(place, output.layout, layer))
            filler.wait()
        rates[name] = round(filler.bytes_read / (time.perf_counter() - begin) / 1e9, 2)
    return rates


def page_cache_to_device(folder: Path, seconds: float = 1.5) -> dict[str, float]:
    """GB/s of pread into pinned buffers and copies to the GPU by so many threads: what this machine
    can do, without digests and without us. No two threads read the same bytes: the second would
    find them in the processor's cache."""
    files = [os.open(path, os.O_RDONLY) for path in sorted(folder.glob("rank-*/*.safetensors"))]
    chunk, rates = 16 << 20, {}
    places = [(fd, at) for fd in files for at in range(0, os.fstat(fd).st_size - chunk, chunk)]
    for threads in (1, 4, 8, 16):
        stop, moved = time.perf_counter() + seconds, [0] * threads

        def work(
            index: int, stop: float = stop, moved: list[int] = moved, threads: int = threads
        ) -> None:
            stream = torch.cuda.Stream()
            buffers = [torch.empty(chunk, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            target = torch.empty(chunk, dtype=torch.uint8, device="cuda")
            done = [torch.cuda.Event() for _ in range(2)]
            turn = index
            while time.perf_counter() < stop:
                mine = turn // threads % 2
                done[mine].synchronize()
                fd, at = places[turn % len(places)]
                os.preadv(fd, [memoryview(buffers[mine].numpy())], at)
                with torch.cuda.stream(stream):
                    target.copy_(buffers[mine], non_blocking=True)
                    done[mine].record(stream)
                moved[index] += chunk
                turn += threads
            stream.synchronize()

        begin = time.perf_counter()
        pool = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()
        rates[str(threads)] = round(sum(moved) / (time.perf_counter() - begin) / 1e9, 2)
    return rates


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Medians, and whether all runs agree; parameters are kept once."""
    runs = report["runs"]
    first = runs[0]
    report["equal"] = {
        key: all(run[key] == first[key] for run in runs)
        for key in ("tokens", "logprob", "parameters")
    }
    report["parameters"] = len(first["parameters"])
    for run in runs:
        del run["parameters"]
    for name in ("stock", "marlin"):
        mine = [run for run in runs if run["name"] == name]
        keys = [key for key in mine[0] if key.endswith(("_seconds", "_bytes"))]
        report[name] = {key: statistics.median(run[key] for run in mine) for key in keys}
    stock, ours = report["stock"], report["marlin"]
    for run in (stock, ours):  # what is left of load_model is building the model
        parts = ("load_weights_seconds", "process_weights_after_loading_seconds")
        run["weights_seconds"] = round(sum(run[part] for part in parts), 4)
    report["times_as_fast"] = round(stock["weights_seconds"] / ours["weights_seconds"], 2)
    report["load_model_times_as_fast"] = round(
        stock["load_model_seconds"] / ours["load_model_seconds"], 2
    )
    alone = [run["experts_alone"] for run in runs if "experts_alone" in run]
    report["experts_alone_gb_s"] = {
        name: statistics.median(rates[name] for rates in alone) for name in alone[0]
    }
    rates = [max(r["page_cache_to_device"].values()) for r in runs if "page_cache_to_device" in r]
    if rates:
        limit = report["page_cache_to_device_gb_s"] = statistics.median(rates)
        report["of_page_cache_to_device"] = {
            name: round(rate / limit, 2) for name, rate in report["experts_alone_gb_s"].items()
        }
    return report


if __name__ == "__main__":
    main()
