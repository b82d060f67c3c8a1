// The rows of an embedding, or of this rank's part of it: those of other ranks are zero.
#include "common.cuh"

// tokens int32 [rows];  table bf16 [count, size], of the tokens from `first` on
// out    bf16, or fp32 where wide, [rows, size];  size a multiple of 8;  grid rows x 128
extern "C" __global__ void __launch_bounds__(128)
    rows_embed(const int* tokens, const u16* table, int first, int count, int size, int wide,
               void* out) {
  let_next_start();
  wait_for_previous();
  const int at = tokens[blockIdx.x] - first;
  const bool here = static_cast<u32>(at) < static_cast<u32>(count);
  for (int k = threadIdx.x * 8; k < size; k += 128 * 8) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (here) v = *reinterpret_cast<const uint4*>(table + (long long)at * size + k);
    const long long to = (long long)blockIdx.x * size + k;
    if (!wide) {
      *reinterpret_cast<uint4*>(static_cast<u16*>(out) + to) = v;
      continue;
    }
    float4* p = reinterpret_cast<float4*>(static_cast<float*>(out) + to);
    p[0] = make_float4(bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y));
    p[1] = make_float4(bf16_low(v.z), bf16_high(v.z), bf16_low(v.w), bf16_high(v.w));
  }
}
