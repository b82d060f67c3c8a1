// The 64 greatest of a chunk of 4096 logits of a row, sorted, and what the row's normalizer needs.
//
// A key is the logit, mapped so that greater is greater as an integer, then the complement of its
// token: keys are unlike, and of equal logits the lowest token is the greatest. The fourth greatest
// of the lanes' greatest bounds 4 keys a warp from below, so the least of these bounds bounds 64 of
// the chunk; only keys above it are sorted, of most chunks one or two hundred.
#include "tree/run.cuh"

constexpr int kChunk = 4096, kThreads = 512, kWarps = kThreads / 32;
static_assert(4 * kWarps >= 64, "the bound is of 64 keys");

// logits fp32 [levels, size], columns from token `first` on
// keys u64 [levels, chunks, 64], 0 where there is none
// sums fp64 [levels, chunks, 2]: the greatest logit, sum of exp(logit - greatest); NaN if one is
// NaN or +inf.  grid (chunks, levels) x 512
extern "C" __global__ void __launch_bounds__(kThreads)
    tree_top_k(const float* logits, int size, int first, u64* keys, double* sums) {
  __shared__ Run runs[kWarps];
  __shared__ u64 list[kChunk];
  __shared__ u32 bound;
  __shared__ int listed;
  __shared__ double part[kWarps];
  let_next_start();
  wait_for_previous();
  const int chunk = blockIdx.x, level = blockIdx.y, lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const float* row = logits + (long long)level * size;
  const float none = -__int_as_float(0x7f800000);
  float value[kChunk / kThreads];
  bool wrong = false;
  u32 key[kChunk / kThreads], mine = 0;
#pragma unroll
  for (int i = 0; i < kChunk / kThreads; ++i) {
    const int at = chunk * kChunk + i * kThreads + threadIdx.x;
    value[i] = at < size ? row[at] + 0.0f : none;  // -0 is 0
    wrong |= !(value[i] < -none);
    const u32 bits = __float_as_uint(value[i]);
    key[i] = at < size ? bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u) : 0;
    mine = max(mine, key[i]);
  }
  u32 fourth = 0;
  for (int i = 0; i < 4; ++i) {
    fourth = __reduce_max_sync(~0u, mine);
    if (lane == __ffs(__ballot_sync(~0u, mine == fourth)) - 1) mine = 0;
  }
  if (threadIdx.x == 0) listed = 0, bound = ~0u;
  __syncthreads();
  if (lane == 0) atomicMin(&bound, fourth);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kChunk / kThreads; ++i)
    if (key[i] && key[i] >= bound)
      list[atomicAdd(&listed, 1)] =
          (u64)key[i] << 32 | ~(u32)(first + chunk * kChunk + i * kThreads + threadIdx.x);
  __syncthreads();
  u64 best[2] = {0, 0};
  for (int at = warp * 64; at < listed; at += kWarps * 64) {
    u64 run[2] = {at + lane < listed ? list[at + lane] : 0,
                  at + 32 + lane < listed ? list[at + 32 + lane] : 0};
    sort_run(run);
    keep_greatest(best, run);
  }
  merge_warps<kWarps>(runs, best);
  wrong = __syncthreads_or(wrong);
  const long long at = (long long)level * gridDim.x + chunk;
  if (warp == 0) keys[at * 64 + lane] = best[0], keys[at * 64 + 32 + lane] = best[1];
  if (warp == 0) runs[0].key[lane] = best[0];
  __syncthreads();
  const u32 ordered = runs[0].key[0] >> 32;
  const float greatest = __uint_as_float(ordered ^ (ordered >> 31 ? 0x80000000u : 0xffffffffu));
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < kChunk / kThreads; ++i)
    if (value[i] > none) sum += expf(value[i] - greatest);
#pragma unroll
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (lane == 0) part[warp] = sum;
  __syncthreads();
  if (threadIdx.x) return;
  for (int w = 1; w < kWarps; ++w) sum += part[w];
  sums[at * 2] = wrong ? __longlong_as_double(0x7ff8000000000000ll) : (double)greatest;
  sums[at * 2 + 1] = sum;
}
