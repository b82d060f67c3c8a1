// w13 of the routed experts with SiLU(gate) * up fused, the form for at most 8 rows an item.
//
// A cluster of SPLIT blocks makes 64 columns of act for the rows of one item; each of its
// SPLIT x CHUNKS warps streams one chunk of K, weights and rows, through a ring of its own.
// Tried, and slower from 33 tokens on: the last block to finish folds sums left in global memory
// (the L2 is the busiest part already). Tried, no gain: blocks that go through several pairs with
// the ring running on (fewer warps fit).
#include "moe/w13.cuh"

constexpr int kStage = 2 * kBlockBytes + kTokenBytes;
constexpr int kRing = STAGES * kStage;
constexpr int kUnits = 8;  // of 16 columns x 8 rows: four of gate, four of up
static_assert(kRing >= kUnits * 512, "a partial must fit where the ring was");

extern __shared__ __align__(128) char smem[];

__device__ __forceinline__ void run(const u16* x, const uint4* packed, const uint4* scales, int4 it,
                                    int pair, int rank, const int* slots, u16* act) {
  const int rows = it.z, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int begin = chunk_begin(rank * CHUNKS + warp), end = chunk_begin(rank * CHUNKS + warp + 1);
  const u32 ring = smem_addr(smem) + warp * kRing;
  const RunSource source(packed, scales, it.x, pair);
  // Weights need no list of rows: ask for them before reading it.
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s)
    if (begin + s < end) source.copy<2>(ring + s * kStage, begin + s);
  const int offset = token_offset(slots + it.y, rows, 0, lane);
  auto copy_tokens = [&](u32 stage, int step) {
    if (offset >= 0)
      copy16_shared(stage + 2 * kBlockBytes + token_write_offset(lane),
                    reinterpret_cast<const char*>(x) + offset + step * (kBlockK * 2));
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (begin + s < end) copy_tokens(ring + s * kStage, begin + s);
    commit_copies();
  }

  float4 acc[2][4][1] = {};
  u32 stage = ring, ahead = ring + (STAGES - 1) * kStage;
  for (int step = begin; step < end; ++step) {
    wait_copies<STAGES - 2>();
    __syncwarp();
    if (step + STAGES - 1 < end) {
      source.copy<2>(ahead, step + STAGES - 1);
      copy_tokens(ahead, step + STAGES - 1);
    }
    commit_copies();
    multiply_runs<2, 1>(stage, stage + 2 * kBlockBytes + token_read_offset(lane), acc);
    ahead = stage;  // the stage just read is the next to fill
    stage = stage + kStage == ring + kRing ? ring : stage + kStage;
  }
  __syncwarp();
  leave_partial<1>(ring, acc[0]);
  leave_partial<1>(ring + 4 * 512, acc[1]);
  __syncthreads();

  const u32 partials = smem_addr(smem);
#pragma unroll
  for (int f = threadIdx.x; f < kUnits * 32; f += CHUNKS * 32) {
    float4 sum = load_shared_f4(partials + f * 16);
#pragma unroll
    for (int w = 1; w < CHUNKS; ++w) sum = add(sum, load_shared_f4(partials + w * kRing + f * 16));
    store_shared_f4(partials + f * 16, sum);  // only this thread reads or writes f of warp 0
  }
  if (SPLIT > 1) cluster_sync(); else __syncthreads();
  act += (long long)it.y * INTERMEDIATE + pair * 64;
  for (int u = warp * SPLIT + rank; u < 4; u += CHUNKS * SPLIT)
    finish_unit<1, SPLIT>(partials, u, rows, act);
  if (SPLIT > 1) cluster_wait_for_readers(); else __syncthreads();
}

// x         bf16 [tokens, HIDDEN]
// packed    int32 [experts, HIDDEN/16, 4 INTERMEDIATE]
// scales    bf16 [experts, HIDDEN/GROUP, 2 INTERMEDIATE]
// items     {expert, first position, rows, 0}; item_count[0] of them; position -> slot in slots
// act       bf16 [positions, INTERMEDIATE]
// grid      as many items as are likely x kPairs clusters of SPLIT blocks of CHUNKS warps
extern "C" __global__ void __launch_bounds__(CHUNKS * 32, MIN_BLOCKS)
    moe_w13(const u16* x, const uint4* packed, const uint4* scales, const int4* items,
            const int* item_count, const int* slots, u16* act) {
  wait_for_previous();
  let_next_start();
  const int pair = blockIdx.x / SPLIT % kPairs, rank = blockIdx.x % SPLIT;
  int item = blockIdx.x / (SPLIT * kPairs);
#pragma unroll 1
  do {
    const int4 it = items[item];  // may be past the end of the list, never of the buffer
    if (item >= item_count[0]) return;
    run(x, packed, scales, it, pair, rank, slots, act);
    item += gridDim.x / (SPLIT * kPairs);
  } while (item < item_count[0]);
}
