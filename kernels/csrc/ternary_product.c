/* int8 activations times ternary weights. One row of x (or a few) is bound by the reading of the
 * weights and has a microkernel of its own; more rows are multiplied in tiles. */

#include <stddef.h>
#include <string.h>

#include "product.h"
#include "scratch.h"
#include "threads.h"

struct single_rows {
    struct product product;
    int32_t x_sum[MAX_SINGLE_ROWS];
};

/* Each panel with every row; after the first row it is in cache. */
static void multiply_rows(void *context, int64_t begin, int64_t end)
{
    const struct single_rows *single = context;
    const struct product *product = &single->product;
    int64_t panel_bytes = product->blocks * product->block_bytes;
    for (int64_t panel = begin; panel < end; panel++)
        for (int64_t row = 0; row < product->m; row++) {
            int32_t sum[PANEL_ROWS] = {0};
            product->isa->micro.ternary_row(product->panels + panel * panel_bytes,
                                            product->x + row * product->k, product->blocks, sum);
            store_sums(product, row, panel, single->x_sum[row], sum);
        }
}

/* Makes K a multiple of a block, with zeros in x. */
static int pad_rows(struct product *product)
{
    int64_t padded = product->blocks * BLOCK_K;
    if (product->k == padded)
        return MEGABIT_OK;
    int8_t *x = scratch(SCRATCH_ACTIVATIONS, (size_t)(product->m * padded));
    if (x == NULL)
        return MEGABIT_NO_MEMORY;
    for (int64_t row = 0; row < product->m; row++) {
        memcpy(x + row * padded, product->x + row * product->k, (size_t)product->k);
        memset(x + row * padded + product->k, 0, (size_t)(padded - product->k));
    }
    product->x = x;
    product->k = padded;
    return MEGABIT_OK;
}

static int multiply_single_rows(const struct product *product)
{
    struct single_rows single = {.product = *product};
    if (pad_rows(&single.product) != MEGABIT_OK)
        return MEGABIT_NO_MEMORY;
    for (int64_t row = 0; row < product->m; row++)
        single.x_sum[row] =
            product->isa->elementwise.sum(product->x + row * product->k, product->k);
    double operations = (double)product->m * (double)product->n * (double)product->k;
    parallel_for(panels_of(product), threads_for(operations, product->threads), multiply_rows,
                 &single);
    return MEGABIT_OK;
}

int megabit_ternary_product(const struct isa *isa, const int8_t *x, const uint8_t *panels,
                            void *out, int out_type, int64_t m, int64_t n, int64_t k,
                            const float *x_scale, float w_scale, int threads)
{
    if (m <= 0 || n <= 0)
        return MEGABIT_OK;
    float scales[PANEL_ROWS]; /* the same for every panel */
    for (int i = 0; i < PANEL_ROWS; i++)
        scales[i] = w_scale;
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
        .w_scale = scales,
        .w_scale_step = 0,
        .threads = threads,
        .blocks = (k + BLOCK_K - 1) / BLOCK_K,
        .block_bytes = PACKED_BLOCK,
        .w_offset = 1,
        .unpack = isa->micro.unpack,
        .tile = isa->micro.ternary_tile,
    };
    return m <= isa->micro.single_rows ? multiply_single_rows(&product) : multiply_tiles(&product);
}
