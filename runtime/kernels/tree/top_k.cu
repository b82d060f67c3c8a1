// The TOP greatest of a chunk of 2048 logits of a row, sorted, and what the row's normalizer needs.
//
// A key is the logit, mapped so that greater is greater as an integer, then the complement of its
// token: keys are unlike, and of equal logits the lowest token is the greatest.
//
// Compile-time: TOP (a power of two, at most 64).
#include "common.cuh"

constexpr int kChunk = 2048, kThreads = 1024;

// logits fp32 [levels, size], columns from token `first` on
// keys u64 [levels, chunks, TOP], 0 where there is none
// sums fp64 [levels, chunks, 2]: the greatest logit, sum of exp(logit - greatest); NaN if one is
// NaN or +inf.  grid (chunks, levels) x 1024
extern "C" __global__ void __launch_bounds__(kThreads)
    tree_top_k(const float* logits, int size, int first, u64* keys, double* sums) {
  __shared__ u64 key[kChunk];
  __shared__ double part[kThreads / 32];
  let_next_start();
  wait_for_previous();
  const int chunk = blockIdx.x, level = blockIdx.y;
  const float* row = logits + (long long)level * size;
  float value[2];
  bool wrong = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = chunk * kChunk + i * kThreads + threadIdx.x;
    value[i] = at < size ? row[at] + 0.0f : -__int_as_float(0x7f800000);  // -0 is 0
    wrong |= !(value[i] < __int_as_float(0x7f800000));
    const u32 bits = __float_as_uint(value[i]);
    const u32 ordered = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
    key[i * kThreads + threadIdx.x] = at < size ? (u64)ordered << 32 | ~(u32)(first + at) : 0;
  }
  for (int span = 2; span <= kChunk; span *= 2)
    for (int step = span / 2; step; step /= 2) {
      __syncthreads();
      const int i = 2 * threadIdx.x - (threadIdx.x & (step - 1)), j = i + step;
      const u64 a = key[i], b = key[j];
      if ((a < b) == ((i & span) == 0)) key[i] = b, key[j] = a;
    }
  wrong = __syncthreads_or(wrong);
  const long long at = (long long)level * gridDim.x + chunk;
  for (int i = threadIdx.x; i < TOP; i += kThreads) keys[at * TOP + i] = key[i];
  const u32 ordered = key[0] >> 32;
  const float greatest = __uint_as_float(ordered ^ (ordered >> 31 ? 0x80000000u : 0xffffffffu));
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (value[i] > -__int_as_float(0x7f800000)) sum += expf(value[i] - greatest);
#pragma unroll
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = sum;
  __syncthreads();
  if (threadIdx.x) return;
  for (int w = 1; w < kThreads / 32; ++w) sum += part[w];
  sums[at * 2] = wrong ? __longlong_as_double(0x7ff8000000000000ll) : (double)greatest;
  sums[at * 2 + 1] = sum;
}
