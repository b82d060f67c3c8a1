// The drafter's heads: queries and keys normed and rotated (rotate-half), keys and values written
// behind the context. A warp a head.
//
// Compile-time: Q_HEADS (0: only keys and values), KV_HEADS, DIM (a multiple of 32, at most 256).
#include "common.cuh"

constexpr int kHeads = Q_HEADS + 2 * KV_HEADS;
constexpr int kPairs = (DIM / 2 + 31) / 32;  // a lane has elements j and j + DIM/2

// x bf16 [rows, kHeads, DIM]: queries, keys, values
// base int32: the position of row 0;  count int32 or null: rows past it are not written
// cos, sin fp32 [positions, DIM/2];  q bf16 [rows, Q_HEADS, DIM]
// cache bf16 [capacity, 2 KV_HEADS, DIM]: keys, values.  grid (rows, ceil(kHeads / 4)) x 128
extern "C" __global__ void __launch_bounds__(128)
    drafter_heads(const u16* x, const int* base, const int* count, const u16* q_norm,
                  const u16* k_norm, float epsilon, const float* cos, const float* sin, u16* q,
                  u16* cache) {
  let_next_start();
  wait_for_previous();
  const int row = blockIdx.x, head = blockIdx.y * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (head >= kHeads || (count && row >= *count)) return;
  const long long position = *base + row;
  const u16* from = x + ((long long)row * kHeads + head) * DIM;
  u16* to = head < Q_HEADS ? q + ((long long)row * Q_HEADS + head) * DIM
                           : cache + (position * 2 * KV_HEADS + head - Q_HEADS) * DIM;
  const bool value = head >= Q_HEADS + KV_HEADS;
  const u16* norm = head < Q_HEADS ? q_norm : k_norm;
  float low[kPairs], high[kPairs], squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int j = i * 32 + lane;
    low[i] = j < DIM / 2 ? bf16_low(from[j]) : 0.0f;
    high[i] = j < DIM / 2 ? bf16_low(from[j + DIM / 2]) : 0.0f;
    squares += low[i] * low[i] + high[i] * high[i];
  }
#pragma unroll
  for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
  const float scale = 1.0f / sqrtf(squares / static_cast<float>(DIM) + epsilon);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int j = i * 32 + lane;
    if (j >= DIM / 2) continue;
    if (!value) {
      const float a = bf16_low(norm[j]) * (low[i] * scale);
      const float b = bf16_low(norm[j + DIM / 2]) * (high[i] * scale);
      const float c = cos[position * (DIM / 2) + j], s = sin[position * (DIM / 2) + j];
      low[i] = a * c - b * s, high[i] = b * c + a * s;
    }
    to[j] = pack_bf16(low[i], 0.0f), to[j + DIM / 2] = pack_bf16(high[i], 0.0f);
  }
}
