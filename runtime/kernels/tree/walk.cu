// The rows' tokens from tree/pick's chunks, the walk along them, and what follows: the text is longer,
// its newest token another, and the host is told through a ring in its own memory.
#include "tree/state.cuh"

constexpr int kThreads = 1024, kMost = 128;

// values fp64, tokens int32 [ranks, rows, chunks] of tree/pick
// row_tokens, parents int32 [rows];  accepted int32 [rows]: rows of the path, root first
// chosen int32 [rows]
// learnt fp64 [kAutoSize] or null: what the budget auto corrects its promises by
// ring int32 [entries, kMost + 8]: {step, rows accepted, rows, position that is not finite or -1,
// whether the draft was wrong, whether it paid, 0, 0, tokens …}, the step last.  grid 1 x 1024
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    tree_walk(const double* values, const int* tokens, int ranks, int rows, int chunks,
              const int* row_tokens, const int* parents, int* state, int* accepted, int* chosen,
              double* learnt, volatile int* ring, int entries) {
  __shared__ int choice[kMost], token_at[kMost], parent_of[kMost], child_of[kMost], path[kMost];
  __shared__ int length, wrong_row;
  let_next_start();
  wait_for_previous();
  const int count = min(state[kRows], rows), start = state[kStart], step = state[kSteps];
  const int lane = threadIdx.x & 31;
  if (threadIdx.x < rows) {
    token_at[threadIdx.x] = row_tokens[threadIdx.x], parent_of[threadIdx.x] = parents[threadIdx.x];
    child_of[threadIdx.x] = kMost;
  }
  if (threadIdx.x == 0) wrong_row = kMost;
  __syncthreads();
  for (int r = threadIdx.x >> 5; r < count; r += kThreads / 32) {
    double best = -__longlong_as_double(0x7ff0000000000000ll);
    int token = 0x7fffffff;
    bool wrong = false;
#pragma unroll 4
    for (int i = lane; i < ranks * chunks; i += 32) {
      const long long at = ((long long)(i / chunks) * rows + r) * chunks + i % chunks;
      const double value = values[at];
      const int its = tokens[at];  // asked for with the value, not after it
      wrong |= value != value;
      if (value > best || (value == best && its < token)) best = value, token = its;
    }
#pragma unroll
    for (int d = 16; d; d /= 2) {
      const double other = __shfl_xor_sync(~0u, best, d);
      const int its = __shfl_xor_sync(~0u, token, d);
      if (other > best || (other == best && its < token)) best = other, token = its;
    }
    wrong = __any_sync(~0u, wrong);
    if (lane == 0) {
      choice[r] = chosen[r] = token;
      if (wrong) atomicMin(&wrong_row, r);
    }
  }
  __syncthreads();
  const int r = threadIdx.x;
  if (0 < r && r < count && token_at[r] == choice[parent_of[r]])
    atomicMin(&child_of[parent_of[r]], r);
  __syncthreads();
  if (r == 0) {
    int n = 0;
    for (int row = 0; row < kMost; row = child_of[row]) path[n++] = row;
    length = n;
  }
  __syncthreads();
  const int n = length;
  volatile int* entry = ring + (long long)(step % entries) * (kMost + 8);
  for (int i = threadIdx.x; i < n; i += kThreads) {
    accepted[i] = path[i];
    entry[8 + i] = choice[path[i]];
  }
  __syncthreads();
  if (threadIdx.x) return;
  entry[1] = n, entry[2] = count, entry[3] = wrong_row < kMost ? start + wrong_row + 1 : -1;
  entry[4] = state[kWrong], entry[5] = 1;
  if (learnt) {  // drafting/budget.py's Calibration
    learnt[kPromised] = 0.98 * learnt[kPromised] + learnt[kNow];
    learnt[kAcceptedSum] = 0.98 * learnt[kAcceptedSum] + (n - 1);
    learnt[kKept] = fmin(1.0, (4.0 + learnt[kAcceptedSum]) / (4.0 + learnt[kPromised]));
    entry[5] = learnt[kPays] != 0.0;
  }
  state[kBefore] = start, state[kAccepted] = n, state[kStart] = start + n;
  state[kToken] = choice[path[n - 1]], state[kSteps] = step + 1;
  __threadfence_system();
  entry[0] = step + 1;
}
