// w2 of the routed experts with the router weight fused, the form for dozens of rows an expert on
// sm_90a: one bf16 row for each (token, slot).
//
// A unit is an item's rows times some of its columns, kRuns runs of 64 at a time over all of K; a
// column's sum is moe_w2's, term by term.
#include "moe/many.cuh"

#ifdef WARPGROUP_MMA
constexpr int kSteps = INTERMEDIATE / kBlockK;
constexpr int kColumnRuns = HIDDEN / 64;
constexpr int kPasses = (56 + kSteps - 1) / kSteps;  // over kRuns runs each: some 56 stages a unit
constexpr int kRunsAUnit = kRuns * kPasses;
constexpr int kUnits = (kColumnRuns + kRunsAUnit - 1) / kRunsAUnit;  // an item
constexpr int kRowBytes = HIDDEN * 8;                                // of words
constexpr int kScratch = 2 * BLOCK_ROWS * 128;  // a warpgroup's 128 columns x rows, bf16
constexpr int kTables = kAfterRing + kGroups * kScratch;
constexpr int kTable = 16 + BLOCK_ROWS * 8;  // a unit, its rows' slots, their router weights
constexpr int kTableCount = tables_for(kSteps);

// Chunks are of whole 64 k.
__device__ constexpr int chunk_begin(int chunk) { return chunk * (INTERMEDIATE / 64) / CHUNKS * 2; }

struct Work {
  u32 scratch;  // this warpgroup's
  u16* y;

  template <int NT>
  __device__ __forceinline__ void multiply(Multiplier& with, u32 table) const {
    // What a unit is gets read when it is needed: registers are short.
#pragma unroll 1
    for (int p = 0; p < kPasses && Unit::load(table).first + p * kRuns < kColumnRuns; ++p)
      pass<NT>(with, table, p * kRuns + (threadIdx.x >> 7));
  }
  // The runs `ahead` of the unit's first, and kGroups beyond.
  template <int NT>
  __device__ __forceinline__ void pass(Multiplier& with, u32 table, int ahead) const {
    float4 sum[2][NT];
    fill(sum, kNothing);
#pragma unroll 1
    for (int c = 0; c < CHUNKS; ++c) with.add_chain<NT>(chunk_begin(c + 1) - chunk_begin(c), sum);
    const u32 slots = table + 16, weights = slots + BLOCK_ROWS * 4 + (threadIdx.x & 3) * 8;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      leave_run<NT>(scratch + h * (BLOCK_ROWS * 128), [&](int t, u32& low, u32& high) {
        const float2 weight = load_shared_f2(weights + t * 32);
        const float4 v = sum[h][t];
        low = pack_bf16(v.x * weight.x, v.y * weight.y);
        high = pack_bf16(v.z * weight.x, v.w * weight.y);
      });
    sync_group();
    const Unit unit = Unit::load(table);
    const int first = unit.first + ahead;
#pragma unroll
    for (int i = 0; i < (NT + 1) / 2; ++i) {
      const int r = i * 16 + ((threadIdx.x >> 3) & 15);
      u16* to = y + (long long)(int)load_shared4(slots + r * 4) * HIDDEN + (threadIdx.x & 7) * 8;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 v = load_piece(scratch + h * (BLOCK_ROWS * 128), r);
        if (r < unit.rows && first + h * kGroups < kColumnRuns)
          *reinterpret_cast<uint4*>(to + (first + h * kGroups) * 64) = v;
      }
    }
    sync_group();  // before rows of the next pass lie here
  }
};

// Rows of act adjoin: those of a lane's tiles from its first on, of which `left` are there.
struct ActRows {
  int left;

  __device__ __forceinline__ bool has(int i) const { return i * 32 < left; }
  __device__ __forceinline__ int offset(int i) const { return i * (32 * INTERMEDIATE * 2); }
};

// Arguments as moe_w2's, but its last. Compile-time: HIDDEN, INTERMEDIATE, GROUP, BLOCK_ROWS, STAGES,
// CHUNKS.
// grid: as many blocks as multiprocessors
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    moe_w2_many(const char* act, const char* packed, const char* scales, const int4* items,
                const int* item_count, const int* slots, const float* router_weights, u16* y) {
  Ring::make();
  let_next_start();
  const u32 tables = smem_addr(smem) + kTables;
  if (threadIdx.x < kMultipliers) {
    take_registers();
    Multiplier with;
    const Work work{smem_addr(smem) + kAfterRing + (threadIdx.x >> 7) * kScratch, y};
    with.run<kTableCount>(work, tables, kTable);
    return;
  }
  give_registers();
  wait_for_previous();
  const int units = item_count[0] * kUnits, lane = threadIdx.x & 31, place = Copier::place();
  Copier copier;
  int turn = 0;
  auto table = [&] { return tables + turn % kTableCount * kTable; };
  for (int unit; (unit = unit_at(turn)) < units; ++turn) {
    const int4 item = items[unit / kUnits];
    const int begin = unit % kUnits * kRunsAUnit, last = min(begin + kRunsAUnit, kColumnRuns);
    if (threadIdx.x == kMultipliers) Unit{item.y, item.z, begin, item.w}.store(table());
#pragma unroll 1
    for (int r = place * 32 + lane; r < item.z; r += kCopiers) {
      const int slot = slots[item.y + r];
      store_shared4(table() + 16 + r * 4, slot);
      store_shared4(table() + 16 + BLOCK_ROWS * 4 + r * 4,
                    __float_as_uint(router_weights[slot] * kWeightUnit));
    }
    __threadfence_block();
    const char* w = packed + (long long)item.x * (INTERMEDIATE / 16 * kRowBytes);
    const char* s = scales + (long long)item.x * (INTERMEDIATE / GROUP * (kRowBytes / 4));
    const int first_row = place * 8 + (lane >> 2);
    const char* from = act + (long long)(item.y + first_row) * (INTERMEDIATE * 2) + (lane & 3) * 16;
#pragma unroll 1
    for (int run = begin + place; run < last + place; run += kRuns)
      copier.copy<kSteps, kRowBytes>(from, ActRows{item.z - first_row}, w + run * 512,
                                     s + run * kScaleBytes, run < kColumnRuns);
  }
  if (threadIdx.x == kMultipliers) Unit{}.store(table());
  copier.finish();
}
#endif
