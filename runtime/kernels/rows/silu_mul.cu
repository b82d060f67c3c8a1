// SiLU(gate) * up of rows [gate | up], rounded.
#include "rows/silu.cuh"

// gate_up bf16 [rows, 2 size];  out bf16 [rows, size];  size a multiple of 8
// grid (rows, ceil(size / 1024)) x 128
extern "C" __global__ void __launch_bounds__(128)
    rows_silu_mul(const u16* gate_up, int size, u16* out) {
  let_next_start();
  wait_for_previous();
  const int k = (blockIdx.y * 128 + threadIdx.x) * 8;
  if (k >= size) return;
  const long long row = blockIdx.x;
  const uint4 g = *reinterpret_cast<const uint4*>(gate_up + row * 2 * size + k);
  const uint4 u = *reinterpret_cast<const uint4*>(gate_up + row * 2 * size + size + k);
  const u32 gate[4] = {g.x, g.y, g.z, g.w}, up[4] = {u.x, u.y, u.z, u.w};
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    v[i] = pack_bf16(silu_mul(bf16_low(gate[i]), bf16_low(up[i])),
                     silu_mul(bf16_high(gate[i]), bf16_high(up[i])));
  *reinterpret_cast<uint4*>(out + row * size + k) = make_uint4(v[0], v[1], v[2], v[3]);
}
