"""Changes that keep several places in agreement, so that they get past the first checks."""

import json
from math import prod
from random import Random
from typing import Any

from fuzz import headers, hostile
from fuzz.folders import CONFIG, INDEX, Folder, shards, split

from kconvert.layouts.header import DTYPE_BYTES

Table = dict[str, Any]
_SIZES = (
    "hidden_size", "num_hidden_layers", "first_k_dense_replace", "moe_layer_freq",
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size",
    "num_attention_heads", "vocab_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "num_nextn_predict_layers", "max_position_embeddings",
)  # fmt: skip
_FIELDS: dict[str, tuple[object, ...]] = {
    "group_size": (0, -1, 1, 32, 64, 128, 48, None, True, 32.0, 2**31, "32"),
    "strategy": ("group", "channel", "tensor", "block", "token", None, 1, []),
    "num_bits": (2, 3, 4, 8, 4.0, True, None, "4"),
    "symmetric": (True, False, 1, None),
    "type": ("int", "float", "INT", None),
    "actorder": (None, False, True, "weight", "static", "group", "dynamic", [], {}),
    "dynamic": (False, True, "local", 0),
    "observer": ("minmax", None, 7, {"a": [1]}),
    "zp_dtype": (None, "torch.int8"),
    "scale_dtype": (None, "torch.bfloat16", 1),
}
_STOPS = (0, [0, 1], [[1]], [{}], "x", ["x"], 1.5, -1, None, [None], {"a": 1}, 10**30, True)


def change_config(raw: bytes, rng: Random) -> bytes:
    """A config.json: sizes, quantization, rotary settings, where things stand; or anything."""
    if rng.random() < 0.4:
        return hostile.change_text(raw, rng)
    config = json.loads(raw)
    text = config["text_config"]
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.randrange(7)
        if kind == 0:
            number = rng.choice(hostile.NUMBERS)
            for key in rng.sample(_SIZES, rng.choice((1, 1, 2, 4))):
                text[key] = number
        elif kind == 1:
            _quantization(text["quantization_config"], rng)
        elif kind == 2:
            key = rng.choice([*text["rope_scaling"], "attention_factor"])
            text["rope_scaling"][key] = rng.choice((hostile.value(rng), *hostile.NUMBERS))
        elif kind == 3:
            key = rng.choice((
                "rope_theta", "rms_norm_eps", "routed_scaling_factor", "eos_token_id",
                "rope_scaling", "quantization_config", "scoring_func", "tie_word_embeddings",
            ))  # fmt: skip
            if key in text:
                text[key] = rng.choice((hostile.value(rng), *hostile.NUMBERS, *_STOPS))
            break  # what the others look into may be gone
        elif kind == 4:
            config[rng.choice(("eos_token_id", "model_type"))] = rng.choice(_STOPS)
        elif kind == 5:
            hostile.change_json(text["quantization_config"], rng)
            break
        else:
            table = text.pop("quantization_config")
            config[rng.choice(("quantization_config", "compression_config"))] = table
            if rng.random() < 0.5:  # no wrapper, as DeepSeek-V3 has it
                config.pop("text_config")
                config = {**text, **config}
            break
    return hostile.encode(config)


def change_other_config(raw: bytes, rng: Random) -> bytes:
    """A config.json of any family and format: its values by those of others, or by anything."""
    if rng.random() < 0.3:
        return hostile.change_text(raw, rng)
    config = json.loads(raw)
    table = config["quantization_config"]
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.randrange(4)
        if kind == 0:
            key = rng.choice(list(_OTHER_FIELDS))
            table[key] = rng.choice((*_OTHER_FIELDS[key], hostile.value(rng)))
        elif kind == 1 and isinstance(table.get("config_groups"), dict):
            group = next(iter(table["config_groups"].values()), None)
            if isinstance(group, dict) and isinstance(group.get("weights"), dict):
                key = rng.choice(list(_FIELDS))
                group["weights"][key] = rng.choice((*_FIELDS[key], hostile.value(rng)))
        elif kind == 2:
            config[rng.choice(list(config))] = rng.choice((
                hostile.value(rng), *hostile.NUMBERS, [0], [1], ["MixtralForCausalLM"], "gpt_oss",
                "unheard_of",
            ))  # fmt: skip
            table = {}
        else:
            hostile.change_json(table or config, rng)
    return hostile.encode(config)


_OTHER_FIELDS = {
    "bits": (4, 8, 3), "group_size": (32, 64, 128, -1, 0), "sym": (True, False),
    "desc_act": (True, False), "checkpoint_format": ("gptq", "gptq_v2", "marlin"),
    "quant_method": ("gptq", "compressed-tensors", "mxfp4", "awq"),
    "dynamic": ({}, {"+:x": {"a": 1}}), "meta": ({"quantizer": "x"}, []),
    "format": ("pack-quantized", "mxfp4-pack-quantized"),
}  # fmt: skip


def _quantization(table: Table, rng: Random) -> None:
    group = table["config_groups"]["group_0"]
    kind = rng.randrange(6)
    if kind <= 2:
        key = rng.choice(list(_FIELDS))
        group["weights"][key] = rng.choice((*_FIELDS[key], hostile.value(rng)))
    elif kind == 3:
        key = rng.choice(("format", "quant_method", "kv_cache_scheme", "quantization_status", "x"))
        table[key] = rng.choice(("mxfp4", "pack-quantized", "compressed", hostile.value(rng)))
    elif kind == 4:
        name = rng.choice(("group_1", *hostile.STRINGS))
        table["config_groups"] = rng.choice((
            {}, {name: group}, {"group_0": group, name: group}, {name: hostile.value(rng)},
        ))  # fmt: skip
        table["config_groups"].setdefault("group_0", group)
    else:
        group[rng.choice(("targets", "format", "input_activations", "x"))] = hostile.value(rng)


def change_drafter(raw: bytes, rng: Random) -> bytes:
    """A drafter's config.json: settings that drafters have, in either place, or anything."""
    if rng.random() < 0.4:
        return hostile.change_text(raw, rng)
    config = json.loads(raw)
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.choice((config, config, config["dflash_config"]))
        key = rng.choice((
            *config, *config["dflash_config"], "causal", "is_causal", "max_window_layers",
            "rope_scaling", "rope_parameters", "final_logit_softcapping",
        ))  # fmt: skip
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
        yarn[rng.choice((*yarn, "mscale", "mscale_all_dim", "beta_fast", "attention_factor"))] = (
            hostile.value(rng)
        )
        if key != "dflash_config":
            place[key] = rng.choice((
                hostile.value(rng), rng.choice(hostile.NUMBERS), yarn, True, 1, 2, 256,
                ["sliding_attention", "full_attention"], [2, 1],
            ))  # fmt: skip
    return hostile.encode(config)


def change_index(raw: bytes, rng: Random) -> bytes:
    """An index: entries moved to other shards and to paths, added, taken away."""
    if rng.random() < 0.3:
        return hostile.change_text(raw, rng)
    table = json.loads(raw)
    places = table["weight_map"]
    files = sorted(set(places.values()))
    for _ in range(rng.choice((1, 1, 2, 20))):
        name = rng.choice(list(places))
        kind = rng.randrange(6)
        if kind <= 1:
            places[name] = rng.choice((*files, *hostile.STRINGS))
        elif kind == 2:
            places[headers.rename(name, rng)] = places.pop(name)
        elif kind == 3:
            places[headers.rename(name, rng)] = rng.choice((rng.choice(files), "absent"))
        elif kind == 4 and len(places) > 1:
            del places[name]
        else:  # a shard by another name
            old, new = rng.choice(files), rng.choice((*hostile.STRINGS, CONFIG, INDEX, "." + name))
            table["weight_map"] = places = {n: new if s == old else s for n, s in places.items()}
    return hostile.encode(table)


def change_checkpoint(folder: Folder, rng: Random) -> None:
    """Config, index and shards of a checkpoint changed together: sizes, experts, layers, dtypes,
    names. What results may well be sound."""
    config = json.loads(folder.files[CONFIG][0])
    index = json.loads(folder.files[INDEX][0])
    tables = {name: headers.table_of(split(folder, name)[0]) for name in shards(folder)}
    text = config["text_config"]
    for _ in range(rng.choice((1, 1, 2))):
        rng.choice((_sizes, _experts, _layers, _scales, _names))(tables, text, rng)
    if rng.random() < 0.15:
        hostile.change_json(rng.choice((text, text["quantization_config"])), rng)
    order = {n: shard for shard, table in tables.items() for n in table if n != "__metadata__"}
    if rng.random() < 0.1:  # one file, with or without an index
        one = {name: t for table in tables.values() for name, t in table.items()}
        for name in tables:
            folder.remove(name)
        tables = {"model.safetensors": one}
        order = dict.fromkeys(one, "model.safetensors")
    index["weight_map"] = order
    for name, table in tables.items():
        data = headers.retile(table)
        raw = headers.with_length(hostile.encode(table))
        folder.put(name, raw, len(raw) + data)
    if len(tables) == 1 and rng.random() < 0.5:
        folder.remove(INDEX)
    else:
        folder.put(INDEX, hostile.encode(index))
    folder.put(CONFIG, hostile.encode(config))


def _sizes(tables: dict[str, Table], text: Table, rng: Random) -> None:
    """Hidden and intermediate size, with every shape that follows from them."""
    new = rng.choice((8, 32, 64, 96, 128, 512, 1024, 7168, 2**16, 2**20, 2**31, 2**31 + 32, 10**18))
    text["hidden_size"] = text["moe_intermediate_size"] = new
    for table in tables.values():
        for name, tensor in table.items():
            by = {256: new}
            if name.endswith("weight_packed"):
                by[32] = new // 8
            elif name.endswith("weight_scale"):
                by[8] = new // 32
            tensor["shape"] = [by.get(size, size) for size in tensor["shape"]]


def _experts(tables: dict[str, Table], text: Table, rng: Random) -> None:
    """Fewer experts, or more of the same."""
    count = text["n_routed_experts"] = rng.choice((0, 1, 2, 4, 7, 16, 40))
    for table in tables.values():
        for name in list(table):
            before, found, after = name.partition(".experts.")
            number, _, rest = after.partition(".")
            if found and number == "0":
                for expert in range(1, count):
                    table[f"{before}.experts.{expert}.{rest}"] = dict(table[name])
            elif found and number.isdecimal() and int(number) >= count:
                del table[name]


def _layers(tables: dict[str, Table], text: Table, rng: Random) -> None:
    """Layers that change places, or a last one less."""
    one, other = rng.choice(((1, 2), (0, 1), (2, 3), (2, 9), (2, -1)))
    if other == -1:
        text["num_hidden_layers"] = 2
    elif other > 2:
        text["num_hidden_layers"] = rng.choice((2, 3))
        text["num_nextn_predict_layers"] = rng.choice((0, 1, 7, 10_000))
    text["first_k_dense_replace"] = rng.choice((0, 1, 1, 1, 2, 3, 4, 10_000))
    new = {f".layers.{one}.": f".layers.{other}.", f".layers.{other}.": f".layers.{one}."}
    for table in tables.values():
        for name in list(table):
            part = next((p for p in new if p in name), None)
            tensor = table.pop(name)
            if part is None or other != -1:
                table[name.replace(part, new[part]) if part else name] = tensor


def _scales(tables: dict[str, Table], text: Table, rng: Random) -> None:
    """Another group size or dtype of scales, also of a few only."""
    weights = text["quantization_config"]["config_groups"]["group_0"]["weights"]
    size = rng.choice((32, 64, 128, None, 0, 256))
    weights.update(group_size=size, strategy="group" if size else "channel")
    dtype, share = rng.choice(("BF16", "F16", "F32", "F8_E4M3")), rng.choice((1.0, 1.0, 0.1))
    for table in tables.values():
        for name, tensor in table.items():
            if name.endswith("weight_scale"):
                columns = 8 * tensor["shape"][1] // 8
                tensor["shape"] = [tensor["shape"][0], columns * 32 // size if size else 1]
                if rng.random() < share:
                    tensor["dtype"] = dtype
            elif name.endswith("weight_shape"):
                tensor["dtype"] = rng.choice(("I32", "I64", "I32", "I32", "U8"))


def _names(tables: dict[str, Table], text: Table, rng: Random) -> None:
    """All names without the wrapper's prefix, a few renamed, or a few tensors more."""
    table = rng.choice(list(tables.values()))
    if rng.random() < 0.4:
        for each in tables.values():
            for name in list(each):
                each[name.removeprefix("language_model.")] = each.pop(name)
        return
    for name in rng.sample(list(table), min(len(table), rng.choice((1, 1, 3)))):
        new = headers.rename(name, rng)
        if new != "__metadata__":
            table[new] = table[name] if rng.random() < 0.5 else table.pop(name)


def change_blob(head: bytes, size: int, rng: Random) -> tuple[bytes, int]:
    """A blob's header: dtypes and shapes of the same bytes, names, and what `kconvert` says."""
    table = headers.table_of(head)
    info = json.loads(table["__metadata__"]["kconvert"])
    names = [name for name in table if name != "__metadata__"]
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind, name = rng.randrange(8), rng.choice(names)
        tensor = table[name]
        if kind == 0:
            same = [d for d in DTYPE_BYTES if DTYPE_BYTES[d] == DTYPE_BYTES[tensor["dtype"]]]
            tensor["dtype"] = rng.choice(same)
        elif kind == 1:
            shape = [prod(tensor["shape"]), *[1] * (len(tensor["shape"]) - 1)]
            tensor["shape"] = rng.choice((shape, shape[::-1], tensor["shape"][::-1]))
        elif kind == 2:
            new = rng.choice((headers.rename(name, rng), f"x.{name}", name.rpartition(".")[2]))
            if new != "__metadata__":
                table[new], names = table.pop(name), [new if n == name else n for n in names]
                for digests in (info.get("digests"), info.get("expert_digests")):
                    if isinstance(digests, dict) and name in digests:
                        digests[new] = digests.pop(name)
        elif kind == 3:
            lists = info.get("expert_digests")
            if lists and isinstance(lists, dict):
                key = rng.choice(list(lists))
                lists[key] = rng.choice(([], ["0" * 32], _less(lists[key]), {}, "", "0"))
        elif kind == 4:
            info["expert_digests"] = rng.choice(({}, {name: ["0" * 32]}, None, [], {name: []}))
        elif kind == 5:
            info[rng.choice(("rank", "tp", "ep", "format"))] = rng.choice(hostile.NUMBERS)
        elif kind == 6:
            info[rng.choice(list(info))] = hostile.value(rng)
        else:
            hostile.change_json(info, rng)
            break
    table["__metadata__"]["kconvert"] = hostile.encode(info).decode()
    raw = headers.with_length(hostile.encode(table))
    if rng.random() < 0.7:  # on a page again
        raw = headers.with_length(raw[8:] + b" " * (-len(raw) % 4096))
    return raw, len(raw) + size - len(head)


def _less(digests: Any) -> Any:
    return digests[:-1] if isinstance(digests, list) else digests


def change_manifest(table: Table, rng: Random) -> None:
    """The manifest: numbers of ranks, files under other paths, entries of other types."""
    files = table["files"]
    for _ in range(rng.choice((1, 1, 2))):
        kind, name = rng.randrange(6), rng.choice(list(files))
        if kind == 0:
            table["tp"] = rng.choice(hostile.NUMBERS)
            table["ep"] = rng.choice((1, 1, table["tp"], rng.choice(hostile.NUMBERS)))
        elif kind == 1:
            table[rng.choice(list(table))] = hostile.value(rng)
            break
        elif kind == 2:
            field = rng.choice(list(files[name]))
            files[name][field] = rng.choice((hostile.value(rng), None, "0" * 32))
            break
        elif kind == 3:
            files[rng.choice((f"../{name}", "/etc/passwd", *hostile.STRINGS))] = dict(files[name])
        elif kind == 4:
            other = rng.choice(list(files))
            files[name], files[other] = files[other], files[name]
        elif len(files) > 1:
            del files[name]
