// A draft tree and the rows of its step: drafting/ddtree.py's build_tree, from the same top-k the
// same tree. Costs are float64 sums of float32 log-probabilities; ties go by the path of ranks.
//
// A warp a level merges its chunks' lists; one warp grows; the block writes the rows.
//
// Compile-time: TOP, LEVELS (at most 16), CHUNKS (lists of a level, all ranks'), NODES (at most).
#include "tree/state.cuh"

constexpr int kThreads = LEVELS * 32;
constexpr int kHeads = (CHUNKS + 31) / 32;
constexpr int kCandidates = 2 * NODES + 3;
constexpr int kRounds = TOP < NODES ? TOP : NODES;

struct Path {  // ranks + 1 by depth, a byte each, from the most significant on; 0 behind the end
  u64 high, low;
};
__device__ __forceinline__ int shift_of(int depth) { return 56 - 8 * (depth & 7); }
__device__ __forceinline__ int rank_at(const Path& p, int depth) {
  return static_cast<int>((depth < 8 ? p.high : p.low) >> shift_of(depth) & 255) - 1;
}
__device__ __forceinline__ Path with_more(Path p, int depth, int more) {
  (depth < 8 ? p.high : p.low) += (u64)more << shift_of(depth);
  return p;
}
__device__ __forceinline__ bool before(double cost, const Path& p, double other, const Path& q) {
  if (cost != other) return cost < other;
  return p.high != q.high ? p.high < q.high : p.low < q.low;
}

__shared__ double logprob[LEVELS][TOP];
__shared__ int token_of[LEVELS][TOP];
__shared__ double costs[kCandidates];
__shared__ Path paths[kCandidates];
__shared__ int parents[kCandidates], depths[kCandidates];
__shared__ int node_token[NODES + 1], node_depth[NODES + 1], node_parent[NODES + 1];
__shared__ double node_logprob[NODES + 1];
__shared__ int tree_size, wrong_draft;

// The lists of a level into one of `width`, normalised.
__device__ void merge_level(const u64* keys, const double* sums, int chunks, int level, int width) {
  const int lane = threadIdx.x & 31;
  const double none = -__longlong_as_double(0x7ff0000000000000ll);
  double greatest = none, total = 0.0;
  u64 head[kHeads], next[kHeads];
  const u64* from[kHeads];
  bool wrong = false;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int list = i * 32 + lane;
    head[i] = next[i] = 0;
    if (list >= CHUNKS) continue;
    const long long at = ((long long)(list / chunks) * LEVELS + level) * chunks + list % chunks;
    from[i] = keys + at * TOP;
    head[i] = from[i][0];
    next[i] = TOP > 1 ? from[i][1] : 0;
    wrong |= sums[at * 2] != sums[at * 2];
    greatest = fmax(greatest, sums[at * 2]);
  }
  int taken[kHeads] = {};
#pragma unroll
  for (int d = 16; d; d /= 2) greatest = fmax(greatest, __shfl_xor_sync(~0u, greatest, d));
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int list = i * 32 + lane;
    if (list >= CHUNKS) continue;
    const long long at = ((long long)(list / chunks) * LEVELS + level) * chunks + list % chunks;
    if (sums[at * 2] > none) total += sums[at * 2 + 1] * exp(sums[at * 2] - greatest);
  }
#pragma unroll
  for (int d = 16; d; d /= 2) total += __shfl_xor_sync(~0u, total, d);
  wrong = __any_sync(~0u, wrong);
  if (wrong && lane == 0) wrong_draft = 1;
  const float normalizer = (float)greatest + (float)log(total);
  for (int round = 0; round < kRounds && round < width; ++round) {
    u64 best = 0;
#pragma unroll
    for (int i = 0; i < kHeads; ++i) best = head[i] > best ? head[i] : best;
    const u64 mine = best;
#pragma unroll
    for (int d = 16; d; d /= 2) {
      const u64 other = __shfl_xor_sync(~0u, best, d);
      best = other > best ? other : best;
    }
    if (best && mine == best) {
#pragma unroll
      for (int i = 0; i < kHeads; ++i)
        if (head[i] == best) {
          head[i] = next[i];
          ++taken[i];
          next[i] = taken[i] + 1 < TOP ? from[i][taken[i] + 1] : 0;
        }
    }
    if (lane == 0) {
      const u32 ordered = best >> 32;
      const float value = __uint_as_float(ordered ^ (ordered >> 31 ? 0x80000000u : 0xffffffffu));
      token_of[level][round] = best ? static_cast<int>(~(u32)best) : 0;
      const bool possible = best && value > -__int_as_float(0x7f800000) && !wrong;
      logprob[level][round] = possible ? (double)(value - normalizer) : none;
    }
  }
}

// Every lane does the same; the search for the cheapest is shared.
__device__ void grow(int levels, int width, int budget, int seeds) {
  const int lane = threadIdx.x & 31;
  const double inf = __longlong_as_double(0x7ff0000000000000ll);
  int count = 1, best = 0, node = 0;
  bool on_chain = true;
  if (lane == 0) {
    costs[0] = 0.0, parents[0] = depths[0] = 0, paths[0] = Path{0, 0};
    node_parent[0] = -1, node_depth[0] = 0;
  }
  __syncwarp();
  while (true) {
    const double cost = costs[best];
    const int depth = depths[best], parent = parents[best];
    const Path path = paths[best];
    __syncwarp();
    if (lane == 0) costs[best] = inf;  // taken
    if (depth > 0) {
      const int rank = rank_at(path, depth - 1);
      const double* row = logprob[depth - 1];
      ++node;
      if (lane == 0) {
        node_token[node] = token_of[depth - 1][rank], node_depth[node] = depth;
        node_parent[node] = parent, node_logprob[node] = -cost;
      }
      if (rank + 1 < width && row[rank + 1] > -inf) {
        if (lane == 0) {
          costs[count] = cost + row[rank] - row[rank + 1];
          parents[count] = parent, depths[count] = depth;
          paths[count] = with_more(path, depth - 1, 1);
        }
        ++count;
      }
    }
    const bool has_child = depth < levels && width > 0 && logprob[depth][0] > -inf;
    if (has_child) {
      if (lane == 0) {
        costs[count] = cost - logprob[depth][0];
        parents[count] = node, depths[count] = depth + 1;
        paths[count] = with_more(path, depth, 1);
      }
      ++count;
    }
    __syncwarp();
    on_chain = on_chain && has_child && node < seeds;
    if (on_chain) {
      best = count - 1;
    } else {
      double least = inf;
      Path its = {~0ull, ~0ull};
      best = 0;
      for (int c = lane; c < count; c += 32)
        if (before(costs[c], paths[c], least, its)) least = costs[c], its = paths[c], best = c;
#pragma unroll
      for (int d = 16; d; d /= 2) {
        const double other = __shfl_xor_sync(~0u, least, d);
        const Path that = {__shfl_xor_sync(~0u, its.high, d), __shfl_xor_sync(~0u, its.low, d)};
        const int at = __shfl_xor_sync(~0u, best, d);
        if (before(other, that, least, its)) least = other, its = that, best = at;
      }
    }
    if (node == budget || costs[best] == inf) break;
  }
  if (lane == 0) tree_size = node;
}

// The prefix of the tree with the greatest rate of tokens: drafting/budget.py's `rates`.
__device__ void cut(double* seconds) {
  const int lane = threadIdx.x & 31, size = tree_size;
  for (int i = lane + 1; i <= size; i += 32) costs[i] = exp(node_logprob[i]);
  __syncwarp();
  if (lane == 0) {
    double* learnt = seconds + NODES + 2;
    double sum = 0.0, promised = 0.0, best = 1.0 / (seconds[0] + seconds[1]);
    const double kept = learnt[kKept];
    int nodes = 0;
    for (int i = 1; i <= size; ++i) {
      sum += costs[i];
      const double rate = (1.0 + kept * sum) / (seconds[0] + seconds[i + 1]);
      if (rate > best) best = rate, nodes = i, promised = sum;
    }
    tree_size = nodes;
    learnt[kNow] = promised, learnt[kPays] = best * seconds[1] >= 1.0;
  }
  __syncwarp();
}

// keys, sums of tree/top_k, [ranks, LEVELS, chunks, …]
// options int32 {levels, width, budget, chain seed, whether `seconds` cut the tree}
// seconds fp64 [NODES + 2 + kAutoSize]: state.cuh
// tokens, positions, slots, prefix, counts, parents int32 [rows]; windows int32 [rows, kWindow]
// grid 1 x 32 LEVELS.  Rows past the tree have token -1, slot -1 and count 0.
extern "C" __global__ void __launch_bounds__(kThreads)
    tree_grow(const u64* keys, const double* sums, int chunks, const int* options,
              double* seconds, int rows, int* state, int* tokens, int* positions, int* slots,
              int* prefix, int* counts, int* parents_out, int* windows) {
  let_next_start();
  wait_for_previous();
  const int levels = options[0], width = options[1], budget = min(options[2], rows - 1);
  const int warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) wrong_draft = 0;
  __syncthreads();
  if (warp < levels && budget > 0) merge_level(keys, sums, chunks, warp, width);
  __syncthreads();
  if (warp == 0) {
    if (budget > 0) {
      grow(levels, min(width, kRounds), budget, options[3] ? levels : 0);
      __syncwarp();
      if (options[4]) cut(seconds);
    } else if (threadIdx.x == 0) {
      tree_size = 0, node_parent[0] = -1, node_depth[0] = 0;
    }
  }
  __syncthreads();
  const int start = state[kStart], size = tree_size;
  if (threadIdx.x == 0) {
    state[kRows] = size + 1;
    if (wrong_draft) state[kWrong] = 1;
  }
  for (int r = threadIdx.x; r < rows; r += kThreads) {
    const bool here = r <= size;
    const int position = here ? start + node_depth[r] : 0, below = prefix_of(position);
    tokens[r] = !here ? -1 : r ? node_token[r] : state[kToken];
    positions[r] = position, slots[r] = here ? start + r : -1;
    prefix[r] = below, counts[r] = here ? position - below + 1 : 0;
    parents_out[r] = here ? node_parent[r] : -1;
    if (!here) continue;
    int node = r;
    for (int p = position; p >= start; --p, node = node_parent[node])
      windows[r * kWindow + p - below] = start + node;
  }
  for (int i = threadIdx.x; i < (size + 1) * kWindow; i += kThreads) {
    const int r = i / kWindow, below = prefix_of(start + node_depth[r]);
    if (below + i % kWindow < start) windows[i] = below + i % kWindow;
  }
}
