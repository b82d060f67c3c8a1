// The router: sigmoid scores, the TOP_K experts with the largest score + bias (ties to the lowest
// id), weights = their scores without the bias, normalised and scaled. One warp a token.
#include "common.cuh"

constexpr int kLanes = (EXPERTS + 31) / 32;

// logits fp32 [tokens, EXPERTS], bias fp32 [EXPERTS]
// counts int32 [tokens] or null: a token with count 0 is none, its experts are -1
// ids    int32 [tokens, TOP_K], weights fp32 [tokens, TOP_K], best first
// grid   ceil(tokens / 4) blocks of 128 threads
extern "C" __global__ void __launch_bounds__(128)
    moe_router(const float* logits, const float* bias, const int* counts, int tokens, float factor,
               int* ids, float* weights) {
  wait_for_previous();
  let_next_start();
  const int token = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (token >= tokens) return;
  const float kNone = -__int_as_float(0x7f800000);
  float score[kLanes], choice[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    const int e = i * 32 + lane;
    score[i] = e < EXPERTS ? 1.0f / (1.0f + expf(-logits[(long long)token * EXPERTS + e])) : 0.0f;
    choice[i] = e < EXPERTS ? score[i] + bias[e] : kNone;
  }
  float chosen[TOP_K], sum = 0.0f;
  int expert[TOP_K];
#pragma unroll
  for (int k = 0; k < TOP_K; ++k) {
    float best = kNone, its_score = 0.0f;
    int id = EXPERTS;
#pragma unroll
    for (int i = 0; i < kLanes; ++i)
      if (choice[i] > best) best = choice[i], its_score = score[i], id = i * 32 + lane;
#pragma unroll
    for (int d = 16; d; d /= 2) {
      const float other = __shfl_xor_sync(~0u, best, d);
      const float other_score = __shfl_xor_sync(~0u, its_score, d);
      const int other_id = __shfl_xor_sync(~0u, id, d);
      if (other > best || (other == best && other_id < id))
        best = other, its_score = other_score, id = other_id;
    }
    chosen[k] = its_score, expert[k] = id, sum += its_score;
#pragma unroll
    for (int i = 0; i < kLanes; ++i)
      if (i * 32 + lane == id) choice[i] = kNone;
  }
  const float scale = factor / (sum + 1e-20f);
#pragma unroll
  for (int k = 0; k < TOP_K; ++k)
    if (lane == k) {
      ids[token * TOP_K + k] = counts && counts[token] == 0 ? -1 : expert[k];
      weights[token * TOP_K + k] = chosen[k] * scale;
    }
}
