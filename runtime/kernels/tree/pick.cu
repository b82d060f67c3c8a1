// The best token of a chunk of a row's logits, with Gumbel noise if they are sampled: sampling.py's
// `best`, whose bits these are: float64, each operation rounded by itself.
#include "common.cuh"

constexpr int kThreads = 256, kChunk = 4096;

__device__ __forceinline__ u64 mix(u64 x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}
// ln x of a normal x > 0.
__device__ __forceinline__ double logarithm(double x) {
  const long long bits = __double_as_longlong(x);
  int exponent = static_cast<int>(bits >> 52 & 0x7ff) - 1022;
  double mantissa =
      __longlong_as_double((bits & 0x000fffffffffffffll) | 0x3fe0000000000000ll);  // [0.5, 1)
  if (mantissa < 0.7071067811865476) mantissa = __dmul_rn(2.0, mantissa), --exponent;
  const double s = __ddiv_rn(__dadd_rn(mantissa, -1.0), __dadd_rn(mantissa, 1.0));
  const double square = __dmul_rn(s, s);
  double series = 0.0;
#pragma unroll
  for (int k = 11; k >= 0; --k)
    series = __dadd_rn(__dmul_rn(series, square), __ddiv_rn(1.0, static_cast<double>(2 * k + 1)));
  return __dadd_rn(__dmul_rn(static_cast<double>(exponent), 0.6931471805599453),
                   __dmul_rn(__dmul_rn(2.0, s), series));
}
__device__ __forceinline__ double gumbel(u64 row, int token) {
  const u64 bits = mix(row ^ static_cast<u64>(token)) >> 12;
  const double uniform =
      __ddiv_rn(__dadd_rn(static_cast<double>(bits), 0.5), 4503599627370496.0);
  return -logarithm(-logarithm(uniform));
}

// logits fp32 [rows, size], columns from token `first` on;  positions int32 [rows]
// sampling {fp64 temperature, u64 seed}
// values fp64 [rows, chunks], NaN where one is not finite;  tokens int32 [rows, chunks]
// grid (chunks, rows) x 256
extern "C" __global__ void __launch_bounds__(kThreads)
    tree_pick(const float* logits, int size, int first, const int* positions,
              const double* sampling, double* values, int* tokens) {
  __shared__ double best_of[kThreads / 32];
  __shared__ int token_of[kThreads / 32];
  let_next_start();
  wait_for_previous();
  const int row = blockIdx.y, begin = blockIdx.x * kChunk;
  const double temperature = sampling[0];
  const u64 seed = static_cast<u64>(__double_as_longlong(sampling[1]));
  const u64 key = mix(mix(seed) ^ static_cast<u64>(positions[row] + 1));
  double best = -__longlong_as_double(0x7ff0000000000000ll);
  int token = 0x7fffffff;
  bool wrong = false;
  for (int v = begin + threadIdx.x; v < min(begin + kChunk, size); v += kThreads) {
    double value = logits[(long long)row * size + v];
    wrong |= !(fabs(value) < __longlong_as_double(0x7ff0000000000000ll));
    if (temperature > 0.0) value = __dadd_rn(value, __dmul_rn(temperature, gumbel(key, first + v)));
    if (value > best) best = value, token = first + v;  // of equal ones the lowest id stays
  }
  auto take = [&](double other, int its) {
    if (other > best || (other == best && its < token)) best = other, token = its;
  };
#pragma unroll
  for (int d = 16; d; d /= 2) {
    const double other = __shfl_xor_sync(~0u, best, d);
    take(other, __shfl_xor_sync(~0u, token, d));
  }
  if ((threadIdx.x & 31) == 0) best_of[threadIdx.x >> 5] = best, token_of[threadIdx.x >> 5] = token;
  wrong = __syncthreads_or(wrong);
  if (threadIdx.x) return;
  for (int w = 1; w < kThreads / 32; ++w) take(best_of[w], token_of[w]);
  const long long at = (long long)row * gridDim.x + blockIdx.x;
  values[at] = wrong ? __longlong_as_double(0x7ff8000000000000ll) : best;
  tokens[at] = token;
}
