// What a text's steps leave on the device for the next: int32, see tree/launch.py.
#pragma once
#include "common.cuh"

enum State {
  kStart,     // position of the newest token, which is not yet run: so many are committed
  kToken,     // that token
  kBefore,    // kStart of the step before
  kAccepted,  // rows of that step that were accepted
  kRows,      // rows of this step: the root and its nodes
  kSteps,     // how many have ended
  kWrong,     // 1 once the drafter's logits held NaN or +inf
  kStateSize
};

// What the budget `auto` knows: fp64, see drafting/budget.py. Seconds of a draft, then of a step of
// 1, 2, … nodes + 1 rows; then these.
enum Auto { kKept, kPromised, kAcceptedSum, kNow, kPays, kAutoSize };

constexpr int kReach = 32;  // protocol.REACH
constexpr int kSplit = 64;
constexpr int kWindow = kSplit + kReach;
// How many keys below a query are not drafted, for certain: a fixed function of its position.
__device__ __forceinline__ int prefix_of(int position) {
  return max(position - kReach, 0) / kSplit * kSplit;
}
