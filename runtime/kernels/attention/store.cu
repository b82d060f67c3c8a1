// MLA's low-rank rows: of each the first Q are normed, for the queries; the next C are normed, the
// last R rotated, and both written to the row's slot of the cache.
//
// Compile-time: Q (0 where queries have no low-rank rows), C, R; multiples of 8.
#include "attention/rotate.cuh"
#include "rows/reduce.cuh"

constexpr int kThreads = 128;

template <int SIZE>
constexpr int kPairs = (SIZE / 2 + kThreads - 1) / kThreads;  // a thread's

// A thread's pairs of a norm's weight, which is asked for ahead of the wait.
template <int SIZE>
__device__ __forceinline__ void ask(const u16* weight, u32 (&factors)[kPairs<SIZE>]) {
#pragma unroll
  for (int j = 0; j < kPairs<SIZE>; ++j) {
    const int k = j * kThreads + threadIdx.x;
    factors[j] = k < SIZE / 2 ? reinterpret_cast<const u32*>(weight)[k] : 0;
  }
}

// Norms SIZE values of `from` into `to`.
template <int SIZE>
__device__ __forceinline__ void norm_row(const u16* from, const u32 (&factors)[kPairs<SIZE>],
                                         float epsilon, u16* to, bool write) {
  constexpr int kEach = kPairs<SIZE>;
  float v[kEach][2];
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int k = j * kThreads + threadIdx.x;
    const u32 pair = k < SIZE / 2 ? reinterpret_cast<const u32*>(from)[k] : 0;
    v[j][0] = bf16_low(pair), v[j][1] = bf16_high(pair);
    squares += v[j][0] * v[j][0] + v[j][1] * v[j][1];
  }
  const float scale = norm_scale(block_sum<kThreads>(squares), SIZE, epsilon);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int k = j * kThreads + threadIdx.x;
    if (k >= SIZE / 2 || !write) continue;
    reinterpret_cast<u32*>(to)[k] = pack_bf16(bf16_low(factors[j]) * (v[j][0] * scale),
                                              bf16_high(factors[j]) * (v[j][1] * scale));
  }
}

// low     bf16 [rows, Q + C + R];  q_weight bf16 [Q], c_weight bf16 [C]
// positions, slots int32 [rows]: a negative slot is not written
// cos, sin fp32 [positions, R/2];  q_low bf16 [rows, Q];  keys bf16 [slots, C + R]
// grid (rows, 2) x 128
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_store(const u16* low, const u16* q_weight, const u16* c_weight, float epsilon,
                    const int* positions, const int* slots, const float* cos, const float* sin,
                    u16* q_low, u16* keys) {
  let_next_start();
  const int row = blockIdx.x;
  const u16* from = low + (long long)row * (Q + C + R);
  if (blockIdx.y == 0) {
#if Q > 0
    u32 factors[kPairs<Q>];
    ask<Q>(q_weight, factors);
    wait_for_previous();
    norm_row<Q>(from, factors, epsilon, q_low + (long long)row * Q, true);
#else
    wait_for_previous();
#endif
    return;
  }
  u32 factors[kPairs<C>];
  ask<C>(c_weight, factors);
  wait_for_previous();
  const int slot = slots[row];
  u16* key = keys + (long long)max(slot, 0) * (C + R);
  norm_row<C>(from + Q, factors, epsilon, key, slot >= 0);
  for (int i = threadIdx.x; i < R / 2 && slot >= 0; i += kThreads) {
    const long long at = (long long)positions[row] * (R / 2) + i;
    const u32 pair = reinterpret_cast<const u32*>(from + Q + C)[i];
    reinterpret_cast<u32*>(key + C)[i] = rotate_pair(pair, cos[at], sin[at]);
  }
}
