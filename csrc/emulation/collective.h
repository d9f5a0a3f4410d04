// The meeting of the lanes of a warp: the last lane to arrive executes the operation for all.
#pragma once
#include "block.h"

namespace emu {

enum class Operation : int { sync, barrier, shuffle, ballot, match, reduce, elect, ldmatrix, stmatrix, mma };

// Executed once all lanes of `lanes` have arrived; argument[lane] is what each brought.
using Execute = void (*)(Block& b, int warp, const Collective& meeting, unsigned lanes);

void collective(unsigned mask, Operation operation, void* argument, const char* what, Site where, Execute execute);

}  // namespace emu
