/* The loops around the microkernels, the same for ternary and int8 weights. */
#ifndef MEGABIT_PRODUCT_H
#define MEGABIT_PRODUCT_H

#include "isa.h"

struct product {
    const struct isa *isa;
    const int8_t *x; /* [m, k] */
    const uint8_t *panels;
    void *out; /* [m, n] of out_type */
    int out_type;
    int64_t m, n, k;
    const float *x_scale; /* [m]; NULL: out is int32 */
    const float *w_scale; /* 64 values for panel p at w_scale + p * w_scale_step */
    int64_t w_scale_step;
    int threads;

    /* How the weights are held and multiplied. */
    int64_t blocks;      /* of a panel */
    int64_t block_bytes; /* of a panel */
    int32_t w_offset;    /* what the microkernel multiplies by is w + w_offset */
    void (*unpack)(const uint8_t *panel, int64_t blocks, uint8_t *codes); /* NULL: not packed */
    tile_function *tile;
};

int64_t panels_of(const struct product *product);

/* Every tile of x with every panel. */
int multiply_tiles(const struct product *product);

/* Writes the 64 sums of one row of x and one panel as elements of `out`. x_sum is of that row. */
void store_sums(const struct product *product, int64_t row, int64_t panel, int32_t x_sum,
                const int32_t *sum);

#endif
