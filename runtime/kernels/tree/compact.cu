// Accepted rows' latents move to their positions' slots; the others' become NaN. A thread has a column
// of one layer: it goes along the path in order, some rows at a time, in which none is overwritten
// before it moved: row i comes from i or behind it.
#include "tree/state.cuh"

constexpr int kTogether = 8;  // rows whose loads do not wait for one another

// keys u32 [layers, slots, width], two bf16 a word;  accepted int32
// grid (layers, ceil(width / 128)) x 128
extern "C" __global__ void __launch_bounds__(128)
    tree_compact(const int* state, const int* accepted, u32* keys, int slots, int width) {
  let_next_start();
  wait_for_previous();
  const int column = blockIdx.y * 128 + threadIdx.x;
  if (column >= width) return;
  const int start = state[kBefore], n = state[kAccepted], rows = state[kRows];
  u32* at = keys + ((long long)blockIdx.x * slots + start) * width + column;
  for (int first = 1; first < n; first += kTogether) {
    u32 moved[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j)
      if (first + j < n) moved[j] = at[(long long)accepted[first + j] * width];
#pragma unroll
    for (int j = 0; j < kTogether; ++j)
      if (first + j < n) at[(long long)(first + j) * width] = moved[j];
  }
  for (int i = n; i < rows; ++i) at[(long long)i * width] = 0x7fc07fc0u;
}
