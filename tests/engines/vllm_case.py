"""One run of vLLM: load a folder, generate, and say what the parameters are. A process of its own,
as an engine cannot be unloaded. `python vllm_case.py RESULT.json '{"model": …}'`, the JSON being
arguments of vllm.LLM, and `then`: what the workers are told at the end."""

import json
import sys
from pathlib import Path

from cpu_shim import inspect_model

PROMPTS = [[1, 17, 300, 5, 88, 260], [7, 7, 410, 33]]


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    arguments = json.loads(sys.argv[2])
    then = arguments.pop("then", None)
    llm = LLM(
        skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="bfloat16",
        max_num_seqs=4, seed=0, **arguments,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=12, logprobs=0, detokenize=False)
    outcome = [
        request.outputs[0]
        for request in llm.generate([TokensPrompt(prompt_token_ids=p) for p in PROMPTS], sampling)
    ]
    result = {
        "tokens": [list(one.token_ids) for one in outcome],
        "logprobs": [one.cumulative_logprob for one in outcome],
        "ranks": llm.apply_model(inspect_model),
    }
    if then:
        llm.collective_rpc(then)
    Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
