// Queries into latent space: a head's NOPE values times the key rows of kv_b, and R values rotated.
// A sum is one MMA chain over NOPE. A block has 64 columns of one head, whose weights it asks for
// before it waits, and up to 40 rows: `most` of them, a multiple of 8.
//
// Compile-time: NOPE (a multiple of 32), VALUE, C (a multiple of 64), R (of 8), HEADS.
#include "attention/rotate.cuh"

constexpr int kRows = 40, kColumns = 64, kThreads = 128;  // a warp has 16 columns
constexpr int kHead = NOPE + R;
constexpr int kLine = NOPE * 2 + 16;  // bytes; an odd number of 16: a matrix's rows lie in all banks

// q     bf16 [rows, HEADS, NOPE + R];  kv_b bf16 [HEADS, NOPE + VALUE, C]
// out   bf16 [rows, HEADS, C + R];  positions int32 [rows];  cos, sin fp32 [positions, R/2]
// grid  (HEADS, ceil(rows / most), C / 64) x 128
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_queries(const u16* q, const u16* kv_b, int rows, int most, const int* positions,
                      const float* cos, const float* sin, u16* out) {
  __shared__ __align__(128) char weights[NOPE * kColumns * 2];
  __shared__ __align__(16) char plain[kRows * kLine];
  let_next_start();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int head = blockIdx.x, first = blockIdx.y * most, here = min(most, rows - first);
  const u16* w = kv_b + (long long)head * (NOPE + VALUE) * C + blockIdx.z * kColumns;
  // Lines of 128 bytes; the xor spreads the rows of a matrix over all banks.
  auto weight_at = [&](int n, int chunk16) {
    return smem_addr(weights) + n * 128 + ((chunk16 ^ (n & 7)) << 4);
  };
  for (int i = threadIdx.x; i < NOPE * 8; i += kThreads)
    copy16_shared(weight_at(i / 8, i % 8), w + (long long)(i / 8) * C + i % 8 * 8);
  wait_for_previous();
  const int tiles = (here + 7) / 8;
  for (int i = threadIdx.x; i < tiles * NOPE; i += kThreads) {
    const int r = i / (NOPE / 8), n = i % (NOPE / 8) * 8;
    const u32 to = smem_addr(plain) + r * kLine + n * 2;
    if (r < here)
      copy16_shared(to, q + ((long long)(first + r) * HEADS + head) * kHead + n);
    else
      store_shared_f4(to, make_float4(0, 0, 0, 0));
  }
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  u32 a[NOPE / 16][4];
#pragma unroll
  for (int k = 0; k < NOPE / 16; ++k)
    load_matrices_transposed(
        weight_at(k * 16 + (lane >> 4) * 8 + (lane & 7), warp * 2 + ((lane >> 3) & 1)), a[k]);
  const int column = blockIdx.z * kColumns + warp * 16 + (lane & 3) * 2;
  for (int t = 0; t < tiles; ++t) {
    float4 sum = {};
#pragma unroll
    for (int k = 0; k < NOPE / 16; k += 2) {
      u32 b[4];
      load_matrices(smem_addr(plain) + (t * 8 + (lane & 7)) * kLine + (k * 2 + (lane >> 3)) * 16, b);
      mma(sum, a[k], b[0], b[1]);
      mma(sum, a[k + 1], b[2], b[3]);
    }
    const u32 low = transpose8x8(pack_bf16(sum.x, sum.y));
    const u32 high = transpose8x8(pack_bf16(sum.z, sum.w));
    const int row = t * 8 + (lane >> 2);
    if (row >= here) continue;
    u16* to = out + ((long long)(first + row) * HEADS + head) * (C + R) + column;
    *reinterpret_cast<u32*>(to) = low, *reinterpret_cast<u32*>(to + 8) = high;
  }
  if (blockIdx.z) return;
  for (int i = threadIdx.x; i < here * (R / 2); i += kThreads) {
    const int r = first + i / (R / 2), k = i % (R / 2);
    const long long at = (long long)positions[r] * (R / 2) + k, from = (long long)r * HEADS + head;
    const u32 pair = reinterpret_cast<const u32*>(q + from * kHead + NOPE)[k];
    reinterpret_cast<u32*>(out + from * (C + R) + C)[k] = rotate_pair(pair, cos[at], sin[at]);
  }
}
