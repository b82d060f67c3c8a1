"""Which keys of a config.json are understood: every other one is named.

A key is read, or known to change nothing here, or unknown. An unknown key that says nothing (null,
false, 0, empty) is only mentioned; one with a value may change what the model computes.
"""

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from kconvert.layouts.fields import CONFIG_NAME

# What transformers writes into any model's config.json and no forward pass reads: training, the
# library's own book-keeping, defaults of text generation (transformers 4.5x and 5.x,
# configuration_utils.py).
BOOK_KEEPING = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path",
    "add_cross_attention", "architectures", "attention_dropout", "auto_map", "bad_words_ids",
    "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "id2label", "initializer_range", "is_decoder", "is_encoder_decoder",
    "label2id", "length_penalty", "max_length", "min_length", "model_type",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_router_logits", "output_scores",
    "pad_token_id", "prefix", "pretraining_tp", "problem_type", "pruned_heads",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
    "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache",
})  # fmt: skip


class UnknownKey(NamedTuple):
    """A key that nobody here knows: its path in config.json, and whether it says anything."""

    path: str
    value: Any

    @property
    def matters(self) -> bool:
        """Whether it has a value that could change something."""
        return self.value not in (None, False, 0, "", [], {})

    def __str__(self) -> str:
        return f"{self.path} {self.value!r:.40}"


def unknown_keys(
    table: dict[str, Any], known: Collection[str], prefix: str = ""
) -> Iterable[UnknownKey]:
    """The keys of `table` that are neither `known` nor book-keeping, by their path."""
    for key, value in table.items():
        if key not in known and key not in BOOK_KEEPING:
            yield UnknownKey(f"{prefix}{key}", value)


def warnings_of(keys: Iterable[UnknownKey]) -> list[str]:
    """A sentence for each key that may change what the model computes."""
    return [
        f"{CONFIG_NAME}: {key} is not known here and may change what the model computes; the engine"
        f" refuses it without --ignore-config-key {key.path}"
        for key in keys
        if key.matters
    ]


def mention_of(keys: Iterable[UnknownKey]) -> list[str]:
    """A sentence that lists the keys that say nothing, if there are any."""
    empty = [key.path for key in keys if not key.matters]
    return [f"{CONFIG_NAME}: unknown, and empty: {', '.join(empty)}"] if empty else []
