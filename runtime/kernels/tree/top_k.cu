// The 64 greatest of a chunk of 4096 logits of a row, sorted, and what the row's normalizer needs.
//
// A key is the logit, mapped so that greater is greater as an integer, then the complement of its
// token: keys are unlike, and of equal logits the lowest token is the greatest. A warp sorts runs of
// 64 and keeps the greatest of its own, then warps' runs are merged in pairs.
#include "tree/run.cuh"

constexpr int kChunk = 4096, kThreads = 512, kWarps = kThreads / 32;

// logits fp32 [levels, size], columns from token `first` on
// keys u64 [levels, chunks, 64], 0 where there is none
// sums fp64 [levels, chunks, 2]: the greatest logit, sum of exp(logit - greatest); NaN if one is
// NaN or +inf.  grid (chunks, levels) x 512
extern "C" __global__ void __launch_bounds__(kThreads)
    tree_top_k(const float* logits, int size, int first, u64* keys, double* sums) {
  __shared__ Run runs[kWarps];
  __shared__ double part[kWarps];
  let_next_start();
  wait_for_previous();
  const int chunk = blockIdx.x, level = blockIdx.y, lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const float* row = logits + (long long)level * size;
  const float none = -__int_as_float(0x7f800000);
  float value[kChunk / kThreads];
  bool wrong = false;
  u64 best[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kChunk / kThreads; i += 2) {
    u64 run[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int at = chunk * kChunk + (i + j) * kThreads + threadIdx.x;
      value[i + j] = at < size ? row[at] + 0.0f : none;  // -0 is 0
      wrong |= !(value[i + j] < -none);
      const u32 bits = __float_as_uint(value[i + j]);
      const u32 ordered = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
      run[j] = at < size ? (u64)ordered << 32 | ~(u32)(first + at) : 0;
    }
    // Most runs hold nothing that is great enough.
    if (i && !__any_sync(~0u, (run[0] > run[1] ? run[0] : run[1]) > __shfl_sync(~0u, best[1], 31)))
      continue;
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
