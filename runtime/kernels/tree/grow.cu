// A draft tree and the rows of its step: drafting/ddtree.py's build_tree, from the same top-k the
// same tree. Costs are float64 sums of float32 log-probabilities; ties go by the path of ranks.
//
// Some warps a level merge its chunks' lists; one warp grows; the block writes the rows.
//
// Compile-time: LEVELS (at most 16), CHUNKS (lists of a level, all ranks').
#include "tree/run.cuh"
#include "tree/state.cuh"

constexpr int NODES = 64;  // tree/launch.py
constexpr int kWarps = LEVELS <= 8 ? 4 : 2;  // a level
constexpr int kThreads = LEVELS * kWarps * 32;
constexpr int kCandidates = 2 * NODES + 3;
constexpr int kSlots = (kCandidates + 31) / 32;

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

__shared__ double logprob[LEVELS][NODES];
__shared__ int token_of[LEVELS][NODES];
__shared__ Run runs[LEVELS * kWarps];
__shared__ double costs[kCandidates];
__shared__ Path paths[kCandidates];
__shared__ int parents[kCandidates], depths[kCandidates];
__shared__ int node_token[NODES + 1], node_depth[NODES + 1], node_parent[NODES + 1];
__shared__ double node_logprob[NODES + 1];
__shared__ int tree_size, wrong_draft;

// The lists of a level into one, normalised. All warps call it.
__device__ void merge_levels(const u64* keys, const double* sums, int chunks, int width) {
  const int lane = threadIdx.x & 31, level = (threadIdx.x >> 5) / kWarps;
  const double none = -__longlong_as_double(0x7ff0000000000000ll);
  auto list_at = [&](int list) {
    return ((long long)(list / chunks) * LEVELS + level) * chunks + list % chunks;
  };
  u64 best[2] = {0, 0};
  for (int list = (threadIdx.x >> 5) % kWarps; list < CHUNKS; list += kWarps) {
    const u64* from = keys + list_at(list) * 64;
    const u64 run[2] = {from[lane], from[32 + lane]};
    const u64 least = __shfl_sync(~0u, width > 32 ? best[1] : best[0], (width - 1) & 31);
    if (__shfl_sync(~0u, run[0], 0) > least) keep_greatest(best, run);
  }
  merge_warps<kWarps>(runs, best);
  if ((threadIdx.x >> 5) % kWarps) return;
  double greatest = none, total = 0.0;
  bool wrong = false;
  for (int list = lane; list < CHUNKS; list += 32) {
    const double its = sums[list_at(list) * 2];
    wrong |= its != its;
    greatest = fmax(greatest, its);
  }
#pragma unroll
  for (int d = 16; d; d /= 2) greatest = fmax(greatest, __shfl_xor_sync(~0u, greatest, d));
  for (int list = lane; list < CHUNKS; list += 32) {
    const double* its = sums + list_at(list) * 2;
    if (its[0] > none) total += its[1] * exp(its[0] - greatest);
  }
#pragma unroll
  for (int d = 16; d; d /= 2) total += __shfl_xor_sync(~0u, total, d);
  wrong = __any_sync(~0u, wrong);
  if (wrong && lane == 0) wrong_draft = 1;
  const float normalizer = (float)greatest + (float)log(total);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const u32 ordered = best[j] >> 32;
    const float value = __uint_as_float(ordered ^ (ordered >> 31 ? 0x80000000u : 0xffffffffu));
    const bool possible = best[j] && value > (float)none && !wrong;
    token_of[level][j * 32 + lane] = best[j] ? static_cast<int>(~(u32)best[j]) : 0;
    logprob[level][j * 32 + lane] = possible ? (double)(value - normalizer) : none;
  }
}

// A cost as an integer of the same order.
__device__ __forceinline__ u64 ordered_cost(double cost) {
  const u64 bits = static_cast<u64>(__double_as_longlong(cost + 0.0));  // -0 is 0
  return bits ^ (bits >> 63 ? ~0ull : 1ull << 63);
}

// Every lane does the same; candidate c's cost is in lane c % 32, which makes the search short.
__device__ void grow(int levels, int width, int budget, int seeds) {
  const int lane = threadIdx.x & 31;
  const double inf = __longlong_as_double(0x7ff0000000000000ll);
  u64 open[kSlots];  // ~0: taken, or none
#pragma unroll
  for (int i = 0; i < kSlots; ++i) open[i] = ~0ull;
  int count = 1, best = 0, node = 0;
  bool on_chain = true;
  auto add = [&](double cost, int parent, int depth, Path path) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
      if (count == i * 32 + lane) open[i] = ordered_cost(cost);
    if (lane == 0)
      costs[count] = cost, parents[count] = parent, depths[count] = depth, paths[count] = path;
    ++count;
  };
  if (lane == 0) {
    costs[0] = 0.0, parents[0] = depths[0] = 0, paths[0] = Path{0, 0};
    node_parent[0] = -1, node_depth[0] = 0;
  }
  __syncwarp();
  while (true) {
    const double cost = costs[best];
    const int depth = depths[best], parent = parents[best];
    const Path path = paths[best];
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
      if (best == i * 32 + lane) open[i] = ~0ull;  // taken
    if (depth > 0) {
      const int rank = rank_at(path, depth - 1);
      const double* row = logprob[depth - 1];
      ++node;
      if (lane == 0) {
        node_token[node] = token_of[depth - 1][rank], node_depth[node] = depth;
        node_parent[node] = parent, node_logprob[node] = -cost;
      }
      if (rank + 1 < width && row[rank + 1] > -inf)
        add(cost + row[rank] - row[rank + 1], parent, depth, with_more(path, depth - 1, 1));
    }
    const bool has_child = depth < levels && width > 0 && logprob[depth][0] > -inf;
    if (has_child) add(cost - logprob[depth][0], node, depth + 1, with_more(path, depth, 1));
    __syncwarp();
    if (node == budget) break;
    on_chain = on_chain && has_child && node < seeds;
    if (on_chain) {
      best = count - 1;
      continue;
    }
    u64 least = open[0];
    int slot = 0;
    bool twice = false;
#pragma unroll
    for (int i = 1; i < kSlots; ++i) {
      twice = open[i] < least ? false : twice || open[i] == least;
      if (open[i] < least) least = open[i], slot = i;
    }
    const u32 high = __reduce_min_sync(~0u, (u32)(least >> 32));
    const u32 low = __reduce_min_sync(~0u, (u32)(least >> 32) == high ? (u32)least : ~0u);
    const bool has_it = least == ((u64)high << 32 | low);
    least = (u64)high << 32 | low;
    if (least == ~0ull) break;
    const u32 holders = __ballot_sync(~0u, has_it);
    if (!(holders & (holders - 1)) && !__any_sync(~0u, has_it && twice)) {
      const int lane_of_it = __ffs(holders) - 1;
      best = __shfl_sync(~0u, slot, lane_of_it) * 32 + lane_of_it;
      continue;
    }
    best = kCandidates;
    for (int i = 0; i < kSlots; ++i) {
      u64 mine = ~0ull;
#pragma unroll
      for (int j = 0; j < kSlots; ++j)
        if (i == j) mine = open[j];
      // Equal costs: the least path.
      for (u32 equal = __ballot_sync(~0u, mine == least); equal; equal &= equal - 1) {
        const int c = i * 32 + __ffs(equal) - 1;
        if (best == kCandidates || before(0.0, paths[c], 0.0, paths[best])) best = c;
      }
    }
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
// grid 1 x kThreads.  Rows past the tree have token -1, slot -1 and count 0.
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
  if (budget > 0) merge_levels(keys, sums, chunks, max(1, min(width, NODES)));
  __syncthreads();
  if (warp == 0) {
    if (budget > 0) {
      grow(min(levels, LEVELS), min(width, NODES), budget, options[3] ? levels : 0);
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
