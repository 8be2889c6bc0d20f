/* int8 activations times int8 weights, as an output head has them. With few rows it is bound by the
 * one stream in which the weights are read; tiles beyond the first find their chunk in L1. */

#include <stddef.h>

#include "product.h"

int megabit_int8_product(const struct isa *isa, const int8_t *x, const uint8_t *panels, void *out,
                         int out_type, int64_t m, int64_t n, int64_t k, const float *x_scale,
                         const float *w_scale, int threads)
{
    if (m <= 0 || n <= 0)
        return MEGABIT_OK;
    struct product product = {
        .isa = isa,
        .x = x,
        .panels = panels,
        .out = out,
        .out_type = out_type,
        .m = m,
        .n = n,
        .k = k,
        .x_scale = x_scale,
        .w_scale = w_scale,
        .w_scale_step = PANEL_ROWS,
        .threads = threads,
        .blocks = (k + BLOCK_K - 1) / BLOCK_K,
        .block_bytes = BYTE_BLOCK,
        .w_offset = isa->micro.byte_offset,
        .unpack = NULL,
        .tile = isa->micro.byte_tile,
    };
    return multiply_tiles(&product);
}
