// The router: sigmoid scores, the TOP_K experts with the largest score + bias (ties to the lowest
// id), weights = their scores without the bias, normalised and scaled. A block a token: each of four
// warps finds the best of its experts, of which each then counts how many are better.
#include "common.cuh"

constexpr int kThreads = 128, kEach = (EXPERTS + kThreads - 1) / kThreads;
constexpr int kCandidates = kThreads / 32 * TOP_K;
static_assert(TOP_K <= 32, "a lane each");

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// logits fp32 [tokens, EXPERTS], bias fp32 [EXPERTS]
// counts int32 [tokens] or null: a token with count 0 is none, its experts are -1
// ids    int32 [tokens, TOP_K], weights fp32 [tokens, TOP_K], best first.  grid tokens x 128
extern "C" __global__ void __launch_bounds__(kThreads)
    moe_router(const float* logits, const float* bias, const int* counts, float factor, int* ids,
               float* weights) {
  __shared__ float scores[EXPERTS + 1], best_scores[TOP_K];
  __shared__ u64 candidates[kCandidates];
  const int token = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float more[kEach];  // the bias: asked for ahead of the wait
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = i * kThreads + threadIdx.x;
    more[i] = e < EXPERTS ? bias[e] : 0.0f;
  }
  wait_for_previous();
  let_next_start();
  // A choice as an integer in the order of floats; 0 is none: a NaN, or one that is taken.
  u32 choice[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = i * kThreads + threadIdx.x;
    choice[i] = 0;
    if (e >= EXPERTS) continue;
    const float score = sigmoid(logits[(long long)token * EXPERTS + e]), value = score + more[i];
    const u32 bits = __float_as_uint(value);
    if (value == value) choice[i] = bits >> 31 ? ~bits : bits | 0x80000000u;
    scores[e] = score;
  }
  u64 mine = 0;  // a lane's candidate: the choice, and below it what is greater for a lower id
#pragma unroll
  for (int k = 0; k < TOP_K; ++k) {
    u32 best = choice[0];
#pragma unroll
    for (int i = 1; i < kEach; ++i) best = max(best, choice[i]);
    best = __reduce_max_sync(~0u, best);
    u32 id = ~0u;
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i)
      if (choice[i] == best) id = i * kThreads + threadIdx.x;
    id = __reduce_min_sync(~0u, id);
    if (lane == k) mine = best ? (u64)best << 32 | ~id : threadIdx.x;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (i * kThreads + threadIdx.x == id) choice[i] = 0;
  }
  if (lane < TOP_K) candidates[warp * TOP_K + lane] = mine;
  __syncthreads();
  const int t = threadIdx.x;
  int rank = TOP_K, expert = EXPERTS;
  if (t < kCandidates) {
    const u64 own = candidates[t];
    rank = 0;
#pragma unroll 8
    for (int i = 0; i < kCandidates; ++i) rank += candidates[i] > own;
    if (own >> 32) expert = ~static_cast<u32>(own);
    if (rank < TOP_K) best_scores[rank] = expert < EXPERTS ? scores[expert] : 0.0f;
  }
  __syncthreads();
  if (rank >= TOP_K) return;
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < TOP_K; ++k) sum += best_scores[k];
  const int at = token * TOP_K + rank;
  ids[at] = counts && counts[token] == 0 ? -1 : expert;
  weights[at] = best_scores[rank] * (factor / (sum + 1e-20f));
}
