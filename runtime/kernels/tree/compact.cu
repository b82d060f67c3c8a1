// Accepted rows' latents move to their positions' slots; the others' become NaN. A thread has a column
// of one layer: it goes along the path in order, in which no row is overwritten before it moved.
#include "tree/state.cuh"

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
  for (int i = 1; i < n; ++i) at[(long long)i * width] = at[(long long)accepted[i] * width];
  for (int i = n; i < rows; ++i) at[(long long)i * width] = 0x7fc07fc0u;
}
