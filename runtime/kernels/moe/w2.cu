// w2 of the routed experts with the router weight fused: one bf16 row for each (token, slot).
//
// A block keeps its expert's rows of act in shared memory, and each warp streams runs of 64 columns
// of weights past them. K is cut into CHUNKS by the shape alone; a column's sum is the fold of the
// chunks' fp32 MMA chains, either by one warp in turn (WARPS_K = 1) or by CHUNKS warps, which is
// faster for few rows. Weights do not depend on the kernel before: they are asked for ahead of the
// wait.
//
// Compile-time: HIDDEN, INTERMEDIATE, GROUP, BLOCK_ROWS, STAGES, CHUNKS, WARPS, WARPS_K,
// MIN_BLOCKS.
#include "moe/w2.cuh"

constexpr int kSteps = INTERMEDIATE / 64;  // a step is 64 k: two blocks
constexpr int kTiles = HIDDEN / 64;
constexpr int kTilesAtOnce = WARPS / WARPS_K;
constexpr int kRowBytes = INTERMEDIATE * 2;
constexpr int kStage = 2 * kBlockBytes;  // words, words, scales, scales
constexpr int kRing = STAGES * kStage;
static_assert(WARPS_K == 1 || WARPS_K == CHUNKS, "the fold is over chunks");
static_assert(WARPS_K == 1 || kRing >= 4 * (BLOCK_ROWS / 8) * 512, "a partial must fit the ring");
static_assert(kSteps >= CHUNKS, "no chunk is empty");
constexpr int kPartial = WARPS_K == 1 ? 4 * (BLOCK_ROWS / 8) * 512 : 0;

extern __shared__ __align__(128) char smem[];  // a ring and a partial a warp, act

__device__ constexpr int chunk_begin(int chunk) { return chunk * kSteps / CHUNKS; }

// Rows of act lie whole; the xor spreads the eight rows of a matrix over all banks.
__device__ __forceinline__ u32 act_offset(int row, int chunk16) {
  return row * kRowBytes + ((chunk16 ^ (row & 7)) << 4);
}

// One unit of a tile whose K was shared among warps.
__device__ __forceinline__ void store_unit(float4 v, const Row& row, int t, int row_count, u16* y) {
  const int lane = threadIdx.x & 31, r = t * 8 + (lane >> 2);
  u32 low, high;
  row.weigh(v, t * 8, low, high);
  low = transpose8x8(low), high = transpose8x8(high);
  u32* out = reinterpret_cast<u32*>(row.out(y, r)) + (lane & 3);
  if (r < row_count) {
    out[0] = low;
    out[4] = high;
  }
}

template <int NT>
__device__ __forceinline__ void run(const u16* act, const char* packed, const char* scales,
                                    const int* slots, int row_count,
                                    const float* router_weights, u16* y,
                                    int first_tile, int last_tile) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int chunk = WARPS_K == 1 ? 0 : warp % WARPS_K;
  const int begin = chunk_begin(chunk), end = chunk_begin(WARPS_K == 1 ? CHUNKS : chunk + 1);
  const u32 ring = smem_addr(smem) + warp * (kRing + kPartial), partial = ring + kRing;
  const u32 acts = smem_addr(smem) + WARPS * (kRing + kPartial);
  packed += lane * 16;
  scales += (lane & 7) * 16;

  // The warp's stream: steps begin..end of each of its tiles.
  int next_tile = first_tile, next_step = begin;
  auto fetch = [&](u32 stage) {
    if (next_tile < last_tile) {
      const char* src = packed + (next_step * 4 * (HIDDEN * 8) + next_tile * 512);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        copy16_once(stage + i * 512 + lane * 16, src + i * (HIDDEN * 8));
      const int k = next_step * 64 + (lane >> 3) * 32;
      if (lane < 16)
        copy16_once(stage + 2 * kWeightBytes + lane * 16,
                    scales + (k / GROUP * (HIDDEN * 2) + next_tile * 128));
      if (++next_step == end) next_step = begin, next_tile += kTilesAtOnce;
    }
    commit_copies();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch(ring + s * kStage);

  const Row row(slots, row_count, router_weights);
  wait_for_previous();
  for (int i = threadIdx.x; i < row_count * (kRowBytes / 16); i += WARPS * 32) {
    const int r = i / (kRowBytes / 16), c = i % (kRowBytes / 16);
    copy16_shared(acts + act_offset(r, c), reinterpret_cast<const char*>(act) + i * 16);
  }
  commit_copies();
  wait_copies<0>();
  __syncthreads();

  u32 stage = ring, ahead = ring + (STAGES - 1) * kStage;
  float4 acc[4][NT];
  for (int tile = first_tile; tile < last_tile; tile += kTilesAtOnce) {
    for (int c = chunk, step = begin; step < end; ++c) {
      fill<NT>(acc, 0.0f);
      for (const int stop = chunk_begin(c + 1); step < stop; ++step) {
        wait_copies<STAGES - 2>();
        __syncwarp();
        fetch(ahead);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          u32 b[NT][4];
#pragma unroll
          for (int t = 0; t < NT; ++t)
            load_matrices(acts + act_offset(t * 8 + (lane & 7), step * 8 + h * 4 + (lane >> 3)),
                          b[t]);
          multiply_block<NT>(stage + h * kWeightBytes,
                             stage + 2 * kWeightBytes + h * kScaleBytes, b, acc);
        }
        ahead = stage;  // the stage just read is the next to fill
        stage = stage + kStage == ring + kRing ? ring : stage + kStage;
      }
      // Shared memory holds the fold so far: registers for it would halve the warps on an SM.
      if (WARPS_K == 1 && c > 0) fold_partial<NT>(partial, acc);
      if (WARPS_K == 1 && c + 1 < CHUNKS) leave_partial<NT>(partial, acc);
    }
    if (WARPS_K == 1) store_tile<NT>(partial, acc, row, row_count, y + tile * 64);
  }
  if (WARPS_K > 1) {
    __syncwarp();
    leave_partial<NT>(ring, acc);
    __syncthreads();
    const u32 partials = ring - chunk * kRing;
#pragma unroll
    for (int d = 0; d < 4; ++d)
#pragma unroll
      for (int t = 0; t < NT; ++t)
        if ((d * NT + t) % WARPS_K == chunk && first_tile < last_tile) {
          const u32 addr = partials + ((d * NT + t) * 32 + lane) * 16;
          float4 v = load_shared_f4(addr);
#pragma unroll
          for (int w = 1; w < WARPS_K; ++w) v = add(v, load_shared_f4(addr + w * kRing));
          store_unit(v, row, t, row_count, y + first_tile * 64 + d * 16);
        }
  }
}

// act     bf16 [positions, INTERMEDIATE]
// packed  int32 [experts, INTERMEDIATE/16, 2 HIDDEN]
// scales  bf16 [experts, INTERMEDIATE/GROUP, HIDDEN]
// y       bf16 [tokens * top_k, HIDDEN], a row for each slot
// grid    items, of 8 rows as many as are likely, x ceil(HIDDEN/64 / (WARPS/WARPS_K *
//         tiles_per_warp)) blocks of WARPS warps; tiles_per_warp is 1 when WARPS_K > 1
extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
    moe_w2(const u16* act, const char* packed, const char* scales, const int4* items,
           const int* item_count, const int* slots, const float* router_weights, u16* y,
           int tiles_per_warp) {
  let_next_start();
  const int per_block = kTilesAtOnce * tiles_per_warp;
  const int blocks = (kTiles + per_block - 1) / per_block;
  // Many rows: all items' first columns, then all items' next, so that moe_combine finds the last of
  // y in the L2. Few: an item after the other, so that those past the end of the list come last.
  constexpr bool kByColumns = BLOCK_ROWS > 8;
  const int listed = gridDim.x / blocks;
  int item = kByColumns ? blockIdx.x % listed : blockIdx.x / blocks;
  const int begin = (kByColumns ? blockIdx.x / listed : blockIdx.x % blocks) * per_block;
  const int end = min(begin + per_block, kTiles), first = begin + (threadIdx.x >> 5) / WARPS_K;
  // Items were written two kernels ago, and the kernel before waited for that one.
  const int count = item_count[0];
  int4 it = items[item];  // may be past the end of the list, never of the buffer
  if (item >= count) return wait_for_previous();
#pragma unroll 1
  for (;;) {
    const char* w = packed + (long long)it.x * (INTERMEDIATE / 16) * (HIDDEN * 8);
    const char* s = scales + (long long)it.x * (INTERMEDIATE / GROUP) * (HIDDEN * 2);
    const u16* a = act + (long long)it.y * INTERMEDIATE;
    switch ((it.z + 7) / 8) {
      case 1: run<1>(a, w, s, slots + it.y, it.z, router_weights, y, first, end); break;
#if BLOCK_ROWS >= 16
      case 2: run<2>(a, w, s, slots + it.y, it.z, router_weights, y, first, end); break;
#endif
#if BLOCK_ROWS >= 32
      case 3: run<3>(a, w, s, slots + it.y, it.z, router_weights, y, first, end); break;
      case 4: run<4>(a, w, s, slots + it.y, it.z, router_weights, y, first, end); break;
#endif
    }
    if (kByColumns) return;  // the grid has a block for every item
    item += listed;
    if (item >= count) return;
    it = items[item];
    __syncthreads();  // before what it needs lies here
  }
}
