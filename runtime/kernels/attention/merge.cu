// A row's parts, added: groups of 8 parts, 512 positions, each from its first to its last, then the
// groups from the first to the last. The result is sum of w p over sum of w l, w = exp(m - greatest).
//
// Compile-time: HEADS, C, WARPS (groups at once; no effect on any bit).
#include "common.cuh"

constexpr int kGroup = 8, kThreads = WARPS * 32;

__device__ __forceinline__ float greater(float a, float b) {  // a NaN stays
  return b > a || b != b ? b : a;
}

// positions, counts int32 [rows]: a row with count 0 becomes zeros
// parts fp32 [rows, most, HEADS, C], scales fp32 [rows, most, HEADS, 2]
// out   bf16 [rows, HEADS, C];  grid (HEADS, rows, ceil(C / 64)) x WARPS * 32, two columns a lane
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_merge(const int* positions, const int* counts, const float* parts,
                    const float* scales, int most, u16* out) {
  __shared__ float best[WARPS], totals[2][WARPS];
  __shared__ float2 sums[2][WARPS][32];
  let_next_start();
  wait_for_previous();
  const int head = blockIdx.x, row = blockIdx.y;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, c = blockIdx.z * 64 + lane * 2;
  const int n = counts[row] ? positions[row] / 64 + 1 : 0, groups = (n + kGroup - 1) / kGroup;
  const float2* scale = reinterpret_cast<const float2*>(scales) + (long long)row * most * HEADS + head;
  const float* part = parts + ((long long)row * most * HEADS + head) * C + c;

  float2 p[kGroup];
  auto fetch = [&](int group) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int s = group * kGroup + i;
      p[i] = make_float2(0.0f, 0.0f);
      if (s < n && c < C) p[i] = *reinterpret_cast<const float2*>(part + (long long)s * HEADS * C);
    }
  };
  fetch(warp);
  float greatest = -__int_as_float(0x7f800000);
  for (int s = threadIdx.x; s < n; s += kThreads)
    greatest = greater(greatest, scale[(long long)s * HEADS].x);
#pragma unroll
  for (int d = 16; d; d /= 2) greatest = greater(greatest, __shfl_xor_sync(~0u, greatest, d));
  if (lane == 0) best[warp] = greatest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; ++w) greatest = greater(greatest, best[w]);

  float2 sum = make_float2(0.0f, 0.0f);  // in the first warp
  float total = 0.0f;
  for (int first = 0, turn = 0; first < groups; first += WARPS, turn ^= 1) {
    const int s0 = (first + warp) * kGroup;
    if (first) fetch(first + warp);
    float weight = 0.0f, of = 0.0f;  // of a lane's part
    if (lane < kGroup && s0 + lane < n) {
      const float2 ml = scale[(long long)(s0 + lane) * HEADS];
      weight = expf(ml.x - greatest), of = ml.y;
    }
    float2 v = make_float2(0.0f, 0.0f);
    float t = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float w = __shfl_sync(~0u, weight, i), l = __shfl_sync(~0u, of, i);
      if (s0 + i >= n) continue;
      v.x = fmaf(w, p[i].x, v.x), v.y = fmaf(w, p[i].y, v.y);
      t = fmaf(w, l, t);
    }
    sums[turn][warp][lane] = v;
    if (lane == 0) totals[turn][warp] = t;
    __syncthreads();
    if (warp == 0)
      for (int w = 0; w < min(WARPS, groups - first); ++w) {
        const float2 more = sums[turn][w][lane];
        sum.x += more.x, sum.y += more.y, total += totals[turn][w];
      }
  }
  if (warp || c >= C) return;
  const u32 pair = n ? pack_bf16(sum.x / total, sum.y / total) : 0;
  *reinterpret_cast<u32*>(out + ((long long)row * HEADS + head) * C + c) = pair;
}
