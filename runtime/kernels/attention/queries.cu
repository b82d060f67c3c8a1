// Queries into latent space: a head's NOPE values times the key rows of kv_b, and R values rotated.
// A sum is one fp32 chain over NOPE. A block has 8 rows of one head and up to 64 columns, whose
// weights it asks for before it waits.
//
// Compile-time: NOPE (a multiple of 4), VALUE, C (a multiple of 8), R, HEADS.
#include "attention/rotate.cuh"

constexpr int kRows = 8, kColumns = 64, kThreads = 128;
constexpr int kHead = NOPE + R;

// q     bf16 [rows, HEADS, NOPE + R];  kv_b bf16 [HEADS, NOPE + VALUE, C]
// out   bf16 [rows, HEADS, C + R];  positions int32 [rows];  cos, sin fp32 [positions, R/2]
// grid  (HEADS, ceil(rows / 8), ceil(C / 64)) x 128: a warp two rows, a lane two columns
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_queries(const u16* q, const u16* kv_b, int rows, const int* positions,
                      const float* cos, const float* sin, u16* out) {
  __shared__ __align__(16) u16 weights[NOPE][kColumns];
  __shared__ __align__(16) float plain[kRows][NOPE];
  let_next_start();
  const int head = blockIdx.x, first = blockIdx.y * kRows, here = min(kRows, rows - first);
  const int column0 = blockIdx.z * kColumns;
  const u16* w = kv_b + (long long)head * (NOPE + VALUE) * C + column0;
  for (int i = threadIdx.x; i < NOPE * (kColumns / 8); i += kThreads) {
    const int n = i / (kColumns / 8), c = i % (kColumns / 8) * 8;
    if (column0 + c < C) copy16_shared(smem_addr(&weights[n][c]), w + (long long)n * C + c);
  }
  commit_copies();
  wait_for_previous();
  for (int i = threadIdx.x; i < kRows * NOPE / 2; i += kThreads) {
    const int r = i / (NOPE / 2), n = i % (NOPE / 2);
    u32 pair = 0;
    if (r < here)
      pair = reinterpret_cast<const u32*>(q + ((long long)(first + r) * HEADS + head) * kHead)[n];
    plain[r][2 * n] = bf16_low(pair), plain[r][2 * n + 1] = bf16_high(pair);
  }
  wait_copies<0>();
  __syncthreads();
  const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * 2, column = column0 + lane * 2;
  if (row < here && column < C) {
    float sum[2][2] = {};
#pragma unroll 8
    for (int n = 0; n < NOPE; n += 4) {
      float value[2][4];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float4 v = *reinterpret_cast<const float4*>(&plain[row + r][n]);
        value[r][0] = v.x, value[r][1] = v.y, value[r][2] = v.z, value[r][3] = v.w;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 pair = *reinterpret_cast<const u32*>(&weights[n + i][lane * 2]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          sum[r][0] = fmaf(value[r][i], bf16_low(pair), sum[r][0]);
          sum[r][1] = fmaf(value[r][i], bf16_high(pair), sum[r][1]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (row + r < here)
        *reinterpret_cast<u32*>(out + ((long long)(first + row + r) * HEADS + head) * (C + R) +
                                column) = pack_bf16(sum[r][0], sum[r][1]);
  }
  if (blockIdx.z) return;
  for (int i = threadIdx.x; i < here * (R / 2); i += kThreads) {
    const int r = first + i / (R / 2), k = i % (R / 2);
    const long long at = (long long)positions[r] * (R / 2) + k, from = (long long)r * HEADS + head;
    const u32 pair = reinterpret_cast<const u32*>(q + from * kHead + NOPE)[k];
    reinterpret_cast<u32*>(out + from * (C + R) + C)[k] = rotate_pair(pair, cos[at], sin[at]);
  }
}
