// A row's parts, added in the order of positions: sum of w p over sum of w l, w = exp(m - greatest).
//
// Compile-time: HEADS, C.
#include "common.cuh"

// positions, counts int32 [rows]: a row with count 0 becomes zeros
// parts fp32 [rows, most, HEADS, C], scales fp32 [rows, most, HEADS, 2]
// out   bf16 [rows, HEADS, C];  grid (HEADS, rows) x 128
extern "C" __global__ void __launch_bounds__(128)
    attention_merge(const int* positions, const int* counts, const float* parts,
                    const float* scales, int most, u16* out) {
  let_next_start();
  wait_for_previous();
  const int head = blockIdx.x, row = blockIdx.y;
  const int n = counts[row] ? positions[row] / 64 + 1 : 0;
  const float* scale = scales + ((long long)row * most * HEADS + head) * 2;
  float greatest = -__int_as_float(0x7f800000);
  for (int s = 0; s < n; ++s) {
    const float m = scale[(long long)s * HEADS * 2];
    greatest = m > greatest || m != m ? m : greatest;
  }
  const float* part = parts + ((long long)row * most * HEADS + head) * C;
  for (int c = threadIdx.x * 2; c < C; c += 256) {
    float2 sum = make_float2(0.0f, 0.0f);
    float total = 0.0f;
    for (int s = 0; s < n; ++s) {
      const float* ml = scale + (long long)s * HEADS * 2;
      const float weight = expf(ml[0] - greatest);
      const float2 p = *reinterpret_cast<const float2*>(part + (long long)s * HEADS * C + c);
      sum.x = fmaf(weight, p.x, sum.x), sum.y = fmaf(weight, p.y, sum.y);
      total = fmaf(weight, ml[1], total);
    }
    const u32 pair = n ? pack_bf16(sum.x / total, sum.y / total) : 0;
    *reinterpret_cast<u32*>(out + ((long long)row * HEADS + head) * C + c) = pair;
  }
}
