// A row's parts, added: groups of 8 parts, each from its first to its last, then the groups from the
// first to the last. The result is sum of w p over sum of w l, w = 2^(m - greatest).
//
// Compile-time: HEADS, C, SPANS, WARPS (as many groups as there may be).
#include "attention/spans.cuh"

constexpr int kGroup = 8, kThreads = WARPS * 32;

__device__ __forceinline__ float greater(float a, float b) {  // a NaN stays
  return b > a || b != b ? b : a;
}

// positions, prefix, counts int32 [rows]: a row with count 0 becomes zeros
// parts fp32 [rows, most, HEADS, C], scales fp32 [rows, most, HEADS, 2]
// out   bf16 [rows, HEADS, C];  grid (HEADS, rows, ceil(C / 128)) x WARPS * 32, four columns a lane
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_merge(const int* positions, const int* prefix, const int* counts, const float* parts,
                    const float* scales, int most, u16* out) {
  __shared__ float best[WARPS], totals[WARPS];
  __shared__ float4 sums[WARPS][32];
  let_next_start();
  wait_for_previous();
  const int head = blockIdx.x, row = blockIdx.y;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, c = blockIdx.z * 128 + lane * 4;
  const int n = counts[row] ? parts_of(positions[row], prefix[row]) : 0, s0 = warp * kGroup;
  const float2* scale = reinterpret_cast<const float2*>(scales) + (long long)row * most * HEADS + head;
  const float* part = parts + ((long long)row * most * HEADS + head) * C + c;

  float4 p[kGroup];
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    p[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (s0 + i < n && c < C)
      p[i] = *reinterpret_cast<const float4*>(part + (long long)(s0 + i) * HEADS * C);
  }
  const float none = -__int_as_float(0x7f800000);
  float2 mine = make_float2(none, 0.0f);  // of a lane's part
  if (lane < kGroup && s0 + lane < n) mine = scale[(long long)(s0 + lane) * HEADS];
  float greatest = mine.x;
#pragma unroll
  for (int d = kGroup / 2; d; d /= 2)
    greatest = greater(greatest, __shfl_xor_sync(~0u, greatest, d));
  if (lane == 0) best[warp] = greatest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; ++w) greatest = greater(greatest, best[w]);

  const float weight = power_of_2(mine.x - greatest);
  float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float t = 0.0f;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const float w = __shfl_sync(~0u, weight, i), l = __shfl_sync(~0u, mine.y, i);
    if (s0 + i >= n) continue;
    v.x = fmaf(w, p[i].x, v.x), v.y = fmaf(w, p[i].y, v.y);
    v.z = fmaf(w, p[i].z, v.z), v.w = fmaf(w, p[i].w, v.w);
    t = fmaf(w, l, t);
  }
  sums[warp][lane] = v;
  if (lane == 0) totals[warp] = t;
  __syncthreads();
  if (warp || c >= C) return;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float total = 0.0f;
  for (int w = 0; w * kGroup < n; ++w) sum = add(sum, sums[w][lane]), total += totals[w];
  uint2 pairs = make_uint2(0, 0);
  if (n) pairs.x = pack_bf16(sum.x / total, sum.y / total);
  if (n) pairs.y = pack_bf16(sum.z / total, sum.w / total);
  *reinterpret_cast<uint2*>(out + ((long long)row * HEADS + head) * C + c) = pairs;
}
