// Queries into latent space: a head's NOPE values times the key rows of kv_b, and R values rotated.
// A sum is one fp32 chain over NOPE. A block has 8 rows of one head and up to 256 columns.
//
// Compile-time: NOPE (a multiple of 4), VALUE, C, R, HEADS.
#include "attention/rotate.cuh"

constexpr int kRows = 8;
constexpr int kHead = NOPE + R;

// q     bf16 [rows, HEADS, NOPE + R];  kv_b bf16 [HEADS, NOPE + VALUE, C]
// out   bf16 [rows, HEADS, C + R];  positions int32 [rows];  cos, sin fp32 [positions, R/2]
// grid  (HEADS, ceil(rows / 8), ceil(C / 256)) x 128, two columns a thread
extern "C" __global__ void __launch_bounds__(128)
    attention_queries(const u16* q, const u16* kv_b, int rows, const int* positions,
                      const float* cos, const float* sin, u16* out) {
  __shared__ __align__(16) float plain[kRows][NOPE];
  let_next_start();
  wait_for_previous();
  const int head = blockIdx.x, first = blockIdx.y * kRows, here = min(kRows, rows - first);
  for (int i = threadIdx.x; i < kRows * NOPE / 2; i += 128) {
    const int r = i / (NOPE / 2), n = i % (NOPE / 2);
    u32 pair = 0;
    if (r < here)
      pair = reinterpret_cast<const u32*>(q + ((long long)(first + r) * HEADS + head) * kHead)[n];
    plain[r][2 * n] = bf16_low(pair), plain[r][2 * n + 1] = bf16_high(pair);
  }
  __syncthreads();
  const int column = blockIdx.z * 256 + threadIdx.x * 2;
  if (column < C) {
    const u16* w = kv_b + (long long)head * (NOPE + VALUE) * C + column;
    float sum[kRows][2] = {};
#pragma unroll 8
    for (int n = 0; n < NOPE; n += 4) {
      float low[4], high[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 pair = *reinterpret_cast<const u32*>(w + (n + i) * C);
        low[i] = bf16_low(pair), high[i] = bf16_high(pair);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 v = *reinterpret_cast<const float4*>(&plain[r][n]);
        const float value[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[r][0] = fmaf(value[i], low[i], sum[r][0]);
          sum[r][1] = fmaf(value[i], high[i], sum[r][1]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (r < here)
        *reinterpret_cast<u32*>(out + ((long long)(first + r) * HEADS + head) * (C + R) + column) =
            pack_bf16(sum[r][0], sum[r][1]);
  }
  if (blockIdx.z) return;
  for (int i = threadIdx.x; i < here * (R / 2); i += 128) {
    const int r = first + i / (R / 2), k = i % (R / 2);
    const long long row = (long long)r * HEADS + head, at = (long long)positions[r] * (R / 2) + k;
    const u32 pair = reinterpret_cast<const u32*>(q + row * kHead + NOPE)[k];
    reinterpret_cast<u32*>(out + row * (C + R) + C)[k] = rotate_pair(pair, cos[at], sin[at]);
  }
}
