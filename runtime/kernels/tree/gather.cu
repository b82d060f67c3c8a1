// The accepted rows of a layer's output, side by side with other layers': the drafter's context.
#include "tree/state.cuh"

// from bf16 [rows, size];  to bf16 [most, stride], this layer's columns from `column` on
// grid most x 128; rows past the path are zero
extern "C" __global__ void __launch_bounds__(128)
    tree_gather(const int* state, const int* accepted, const u16* from, int size, int column,
                int stride, u16* to) {
  let_next_start();
  wait_for_previous();
  const int i = blockIdx.x;
  const bool here = i < state[kAccepted];
  const u16* row = from + (long long)(here ? accepted[i] : 0) * size;
  for (int k = threadIdx.x * 8; k < size; k += 128 * 8)
    *reinterpret_cast<uint4*>(to + (long long)i * stride + column + k) =
        here ? *reinterpret_cast<const uint4*>(row + k) : make_uint4(0, 0, 0, 0);
}
