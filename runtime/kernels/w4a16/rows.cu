// The simple reference on the device: a W4A16 product over weights in the checkpoint's own order,
// one thread an output, k in order, fp32. Slow and easy to read.
#include "common.cuh"

__device__ __forceinline__ float round_bf16(float v) { return bf16_low(pack_bf16(v, 0.0f)); }

// x       bf16 [rows, k];  expert int32 [rows], negative = leave this row's output as it is
// packed  int32 [experts, n, k/8], nibble j of word c is column 8c + j
// scales  bf16 [experts, n, k/group];  y fp32 [rows, n]
// grid    (ceil(n / 128), rows), 128 threads
extern "C" __global__ void __launch_bounds__(128)
    w4a16_rows(const u16* x, const int* expert, const u32* packed, const u16* scales, float* y,
               int n, int k, int group) {
  const int column = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y, e = expert[row];
  if (column >= n || e < 0) return;
  const u16* xs = x + (long long)row * k;
  const u32* words = packed + ((long long)e * n + column) * (k / 8);
  const u16* sc = scales + ((long long)e * n + column) * (k / group);
  float sum = 0.0f;
  for (int c = 0; c < k / 8; ++c) {
    const u32 word = words[c];
    const float scale = bf16_low(sc[c * 8 / group]);
    for (int j = 0; j < 8; ++j) {
      const float value = static_cast<float>(static_cast<int>(word >> (4 * j) & 15u) - 8);
      sum += bf16_low(xs[c * 8 + j]) * round_bf16(value * scale);
    }
  }
  y[(long long)row * n + column] = sum;
}
