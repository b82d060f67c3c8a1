// Attended latents times the value rows of kv_b. A warp has one value row and eight rows of
// context; lanes share C in runs of 8, added in a fixed tree.
//
// Compile-time: NOPE, VALUE, C (a multiple of 8), HEADS.
#include "common.cuh"

constexpr int kRows = 8, kWarps = 8, kRuns = (C + 255) / 256;

// context bf16 [rows, HEADS, C];  kv_b bf16 [HEADS, NOPE + VALUE, C];  out bf16 [rows, HEADS, VALUE]
// grid (HEADS, ceil(VALUE / 8), ceil(rows / 8)) x 256
extern "C" __global__ void __launch_bounds__(kWarps * 32)
    attention_expand(const u16* context, const u16* kv_b, int rows, u16* out) {
  let_next_start();
  const int head = blockIdx.x, lane = threadIdx.x & 31;
  const int value = blockIdx.y * kWarps + (threadIdx.x >> 5), first = blockIdx.z * kRows;
  const u16* w = kv_b + ((long long)head * (NOPE + VALUE) + NOPE + value) * C;
  uint4 a[kRuns];  // weights: asked for ahead of the wait
#pragma unroll
  for (int j = 0; j < kRuns; ++j)
    if (value < VALUE && j * 256 + lane * 8 < C)
      a[j] = *reinterpret_cast<const uint4*>(w + j * 256 + lane * 8);
  wait_for_previous();
  if (value >= VALUE) return;
  float sum[kRows] = {};
#pragma unroll
  for (int j = 0; j < kRuns; ++j) {
    const int c = j * 256 + lane * 8;
    if (c >= C) continue;
    const u32 pair[4] = {a[j].x, a[j].y, a[j].z, a[j].w};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r >= rows) continue;
      const uint4 b = *reinterpret_cast<const uint4*>(
          context + ((long long)(first + r) * HEADS + head) * C + c);
      const u32 other[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[r] = fmaf(bf16_low(pair[i]), bf16_low(other[i]), sum[r]);
        sum[r] = fmaf(bf16_high(pair[i]), bf16_high(other[i]), sum[r]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int d = 16; d; d /= 2) sum[r] += __shfl_xor_sync(~0u, sum[r], d);
    if (lane == 0 && first + r < rows)
      out[((long long)(first + r) * HEADS + head) * VALUE + value] = pack_bf16(sum[r], 0.0f);
  }
}
