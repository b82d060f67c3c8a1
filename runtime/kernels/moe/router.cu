// The router: sigmoid scores, the TOP_K experts with the largest score + bias (ties to the lowest
// id), weights = their scores without the bias, normalised and scaled. One warp a token.
#include "common.cuh"

constexpr int kLanes = (EXPERTS + 31) / 32;
static_assert(TOP_K <= 32, "a lane each");

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// logits fp32 [tokens, EXPERTS], bias fp32 [EXPERTS]
// counts int32 [tokens] or null: a token with count 0 is none, its experts are -1
// ids    int32 [tokens, TOP_K], weights fp32 [tokens, TOP_K], best first
// grid   ceil(tokens / 4) blocks of 128 threads
extern "C" __global__ void __launch_bounds__(128)
    moe_router(const float* logits, const float* bias, const int* counts, int tokens, float factor,
               int* ids, float* weights) {
  const int token = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  float more[kLanes];  // the bias: asked for ahead of the wait
#pragma unroll
  for (int i = 0; i < kLanes; ++i) more[i] = i * 32 + lane < EXPERTS ? bias[i * 32 + lane] : 0.0f;
  wait_for_previous();
  let_next_start();
  if (token >= tokens) return;
  // A choice as an integer in the order of floats; 0 is none: a NaN, or one that is taken.
  u32 choice[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    const int e = i * 32 + lane;
    choice[i] = 0;
    if (e < EXPERTS) {
      const float value = sigmoid(logits[(long long)token * EXPERTS + e]) + more[i];
      const u32 bits = __float_as_uint(value);
      if (value == value) choice[i] = bits >> 31 ? ~bits : bits | 0x80000000u;
    }
  }
  int expert = EXPERTS;  // a lane's, of the first TOP_K
#pragma unroll
  for (int k = 0; k < TOP_K; ++k) {
    u32 best = choice[0];
#pragma unroll
    for (int i = 1; i < kLanes; ++i) best = max(best, choice[i]);
    best = __reduce_max_sync(~0u, best);
    u32 id = EXPERTS;
#pragma unroll
    for (int i = kLanes - 1; i >= 0; --i)
      if (choice[i] == best) id = i * 32 + lane;
    id = best ? __reduce_min_sync(~0u, id) : EXPERTS;
    if (lane == k) expert = id;
#pragma unroll
    for (int i = 0; i < kLanes; ++i)
      if (i * 32 + lane == id) choice[i] = 0;
  }
  float score = expert < EXPERTS ? sigmoid(logits[(long long)token * EXPERTS + expert]) : 0.0f;
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < TOP_K; ++k) sum += __shfl_sync(~0u, score, k);
  const float scale = factor / (sum + 1e-20f);
  if (lane >= TOP_K) return;
  ids[token * TOP_K + lane] = counts && counts[token] == 0 ? -1 : expert;
  weights[token * TOP_K + lane] = score * scale;
}
