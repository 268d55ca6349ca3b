// lora: x (rows x inputs), per group A (rank x inputs), B (outputs x rank) float32     s (rows x s_width, first rank columns) float32 =
//       s = dropout(x) A^T, y += scale s B^T                                            y (rows x outputs) +=
//
// Over a table of tiles, each of up to 128 rows of one segment of one group. Rows in no group, padding rows and the columns of s from
// rank on are untouched. For bf16 A, B, s and the dropped-out x are rounded to bf16 before they are multiplied.
#include "lora.cuh"

KERNEL __launch_bounds__(SHRINK_THREADS) lora_shrink(PARAMS Lora p) { shrink<true>(p); }
KERNEL __launch_bounds__(EXPAND_THREADS) lora_expand(PARAMS Lora p) { expand<true>(p); }
