// w13 of the routed experts with SiLU(gate) * up fused, the form for dozens of rows an expert on
// sm_90a.
//
// A unit is an item's rows times two runs of gate columns and those of up, over all of K; a warpgroup
// has both of a pair. Chunks are folded as moe_w13 folds them, term by term: the CHUNKS of
// a part in registers, the SPLIT parts in shared memory.
#include "moe/w13.cuh"
#include "moe/many.cuh"

#ifdef WARPGROUP_MMA
constexpr int kUnits = (kPairs + kGroups - 1) / kGroups;  // an item
constexpr int kRowBytes = INTERMEDIATE * 16;            // of words, gate and up
// A warpgroup's 128 columns x rows, fp32; 64 columns x rows, bf16, where there is but one part.
constexpr int kScratch = BLOCK_ROWS * (SPLIT > 1 ? 512 : 128);
constexpr int kTables = kAfterRing + kGroups * kScratch;
constexpr int kTable = 16;  // a unit
constexpr int kTableCount = tables_for(kSteps);

struct Work {
  u32 scratch;  // this warpgroup's
  u16* act;

  template <int NT>
  __device__ __forceinline__ void multiply(Multiplier& with, u32 table) const {
    const u32 total = scratch + ((threadIdx.x >> 5) & 3) * (2 * NT * 512);
    float4 part[2][NT];
#pragma unroll 1
    for (int q = 0; q < SPLIT; ++q) {
      fill(part, kNothing);
#pragma unroll 1
      for (int c = q * CHUNKS; c < (q + 1) * CHUNKS; ++c)
        with.add_chain<NT>(chunk_begin(c + 1) - chunk_begin(c), part);
      if (q > 0) fold_partial(total, part);
      if (q + 1 < SPLIT) leave_partial(total, part);
    }
    sync_group();  // totals are read
    leave_run<NT>(scratch, [&](int t, u32& low, u32& high) {
      const float4 gate = part[0][t], up = part[1][t];
      low = pack_bf16(silu_mul(gate.x, up.x), silu_mul(gate.y, up.y));
      high = pack_bf16(silu_mul(gate.z, up.z), silu_mul(gate.w, up.w));
    });
    sync_group();
    const Unit unit = Unit::load(table);  // only now: registers are short
    const int pair = unit.first + (threadIdx.x >> 7);
    u16* to = act + (long long)unit.position * INTERMEDIATE + pair * 64 + (threadIdx.x & 7) * 8;
#pragma unroll
    for (int i = 0; i < (NT + 1) / 2; ++i) {
      const int r = i * 16 + ((threadIdx.x >> 3) & 15);
      const uint4 v = load_piece(scratch, r);
      if (r < unit.rows && pair < kPairs)
        *reinterpret_cast<uint4*>(to + (long long)r * INTERMEDIATE) = v;
    }
    sync_group();  // before totals of the next unit lie here
  }
};

struct TokenRows {
  int from[Copier::kTiles];

  __device__ __forceinline__ TokenRows(const int* slots, int rows) {
#pragma unroll
    for (int i = 0; i < Copier::kTiles; ++i)
      from[i] = token_offset(slots, rows, i * 4 + Copier::place(), threadIdx.x & 31);
  }
  __device__ __forceinline__ bool has(int i) const { return from[i] >= 0; }
  __device__ __forceinline__ int offset(int i) const { return from[i]; }
};

// Arguments as moe_w13's; compile-time, besides moe_w13's: BLOCK_ROWS.
// grid: as many blocks as multiprocessors
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    moe_w13_many(const char* x, const char* packed, const char* scales, const int4* items,
                 const int* item_count, const int* slots, u16* act) {
  Ring::make();
  wait_for_previous();
  let_next_start();
  const u32 tables = smem_addr(smem) + kTables;
  if (threadIdx.x < kMultipliers) {
    take_registers();
    Multiplier with;
    const Work work{smem_addr(smem) + kAfterRing + (threadIdx.x >> 7) * kScratch, act};
    with.run<kTableCount>(work, tables, kTable);
    return;
  }
  give_registers();
  const int units = item_count[0] * kUnits, place = Copier::place();
  packed += place / kGroups * (kRowBytes / 2), scales += place / kGroups * (kRowBytes / 8);  // of up
  Copier copier;
  int turn = 0;
  auto table = [&] { return tables + turn % kTableCount * kTable; };
  for (int unit; (unit = unit_at(turn)) < units; ++turn) {
    const int4 item = items[unit / kUnits];
    const int first = unit % kUnits * kGroups, pair = first + place % kGroups;
    if (threadIdx.x == kMultipliers) Unit{item.y, item.z, first, item.w}.store(table());
    __threadfence_block();
    copier.copy<kSteps, kRowBytes>(
        x, TokenRows(slots + item.y, item.z),
        packed + (long long)item.x * (HIDDEN / 16 * kRowBytes) + pair * 512,
        scales + (long long)item.x * (HIDDEN / GROUP * (kRowBytes / 4)) + pair * kScaleBytes,
        pair < kPairs);
  }
  if (threadIdx.x == kMultipliers) Unit{}.store(table());
  copier.finish();
}
#endif
