"""One run of SGLang, as vllm_case.py; the JSON holds arguments of sglang.Engine. What the
parameters are, the shim writes down in each rank's process."""

import json
import os
import sys
from pathlib import Path

PROMPTS = [[1, 17, 300, 5, 88, 260], [7, 7, 410, 33]]


def main() -> None:
    import sglang

    reports = Path(sys.argv[1]).parent / "reports"
    reports.mkdir()
    os.environ["SHIM_REPORTS"] = str(reports)
    engine = sglang.Engine(
        device="cpu", attention_backend="torch_native", skip_tokenizer_init=True, dtype="bfloat16",
        context_length=64, max_total_tokens=512, max_running_requests=4, disable_radix_cache=True,
        disable_overlap_schedule=True, mem_fraction_static=0.2, random_seed=0,
        **json.loads(sys.argv[2]),
    )  # fmt: skip
    outcome = engine.generate(
        input_ids=PROMPTS,
        sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
        return_logprob=True,
    )
    engine.shutdown()
    result = {
        "tokens": [one["output_ids"] for one in outcome],
        "logprobs": [
            sum(value for value, *_ in one["meta_info"]["output_token_logprobs"]) for one in outcome
        ],
        "ranks": [json.loads(path.read_text()) for path in sorted(reports.iterdir())],
    }
    Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
