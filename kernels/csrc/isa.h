/* What the drivers need from an instruction set. Each isa_*.c fills one table with functions that
 * are compiled for it. A *quad* is four consecutive k, what one lane of a dot-product instruction
 * takes; a *block* is 16 consecutive k of the 64 rows of a panel, or of a row of x. */
#ifndef MEGABIT_ISA_H
#define MEGABIT_ISA_H

#include <stdbool.h>
#include <stdint.h>

#include "megabit_kernels.h"
#include "stochastic.h"

enum {
    PANEL_ROWS = 64,
    QUAD = 4,
    QUADS_PER_BLOCK = 4,
    BLOCK_K = QUAD * QUADS_PER_BLOCK,
    PACKED_BLOCK = PANEL_ROWS * BLOCK_K / 4, /* bytes of a block in a ternary panel */
    QUAD_BYTES = PANEL_ROWS * QUAD,          /* of a quad in a panel of bytes */
    BYTE_BLOCK = QUAD_BYTES * QUADS_PER_BLOCK,
    CHUNK_BLOCKS = 32, /* a tile is given at most so many of a panel at a time */
    MAX_SINGLE_ROWS = 4,
    WORD = 16, /* floats that are computed side by side, whatever the vectors are */
};

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t ceil_div(int64_t count, int64_t step)
{
    return (count + step - 1) / step;
}

INLINE int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* A loop of so many turns, a small constant, over variables that must live in registers; and one
 * that stays a loop, since unrolled it would need more registers than there are. */
#if defined(__clang__)
#define UNROLLED(i, turns) _Pragma("clang loop unroll(full)") for (int i = 0; i < (turns); i++)
#define ROLLED(i, turns) _Pragma("clang loop unroll(disable)") for (int i = 0; i < (turns); i++)
#else
#define UNROLLED(i, turns) _Pragma("GCC unroll 32") for (int i = 0; i < (turns); i++)
#define ROLLED(i, turns) _Pragma("GCC unroll 1") for (int i = 0; i < (turns); i++)
#endif

typedef void tile_function(const uint8_t *w, const int8_t *x, int64_t blocks, int rows,
                           int32_t *sum);

/* Integer microkernels. All of them add to int32 sums: sum[r][n] += sum over k of w[n][k] * x[r][k]
 * for the 64 rows n of a panel, where w is a code (0, 1, 2) or a byte. Sums wrap modulo 2^32; what
 * follows takes away the offset of w, and the true sum fits. A *tile* of x has up to `tile_rows`
 * rows and lies in memory as [blocks][rows][16], so that each step reads the next bytes. */
struct microkernels {
    int single_rows; /* up to so many rows of x, one by one is quicker than a tile */
    int tile_rows;
    int byte_offset; /* byte_tile multiplies by w + byte_offset */

    /* One row of x, plain, with a ternary panel. */
    void (*ternary_row)(const uint8_t *panel, const int8_t *x, int64_t blocks, int32_t *sum);
    /* A ternary panel to a byte for each code, in the order that ternary_tile wants. NULL if that
     * takes the panel itself. */
    void (*unpack)(const uint8_t *panel, int64_t blocks, uint8_t *codes);
    /* A tile of x with unpacked codes. */
    tile_function *ternary_tile;
    /* A tile of x with the bytes w + 128 of an int8 panel. */
    tile_function *byte_tile;
    /* So many dot products between registers, or a few more; returns multiplications and additions
     * done. */
    int64_t (*dot_loop)(int64_t count);
};

/* Loops over plain arrays, written once in elementwise.h and vectorised by the compiler. */
struct elementwise {
    int32_t (*sum)(const int8_t *x, int64_t count);
    /* sum[i] - offset, plain or times (x_scale * w_scale[i]), to one row of a result. */
    void (*store_int32)(const int32_t *sum, int32_t offset, int64_t count, int32_t *out);
    void (*store_float32)(const int32_t *sum, int32_t offset, float x_scale, const float *w_scale,
                          int64_t count, float *out);
    void (*store_bfloat16)(const int32_t *sum, int32_t offset, float x_scale, const float *w_scale,
                           int64_t count, uint16_t *out);
    float (*absmax_float32)(const float *x, int64_t count);
    float (*absmax_bfloat16)(const uint16_t *x, int64_t count);
    /* Sum of what is from `low` on and below `high`, each rounded to an integer of such units. */
    int64_t (*sum_units)(const float *x, int64_t count, float low, float high, double units);
    /* Sum of (x * shrink)^2, each rounded to an integer of such units. */
    int64_t (*sum_squares)(const float *x, int64_t count, double shrink, double units);
    void (*quantize_float32)(const float *x, float scale, int64_t count, int8_t *out);
    void (*quantize_bfloat16)(const uint16_t *x, float scale, int64_t count, int8_t *out);
    /* One row, rounded stochastically. */
    void (*round_row)(const float *x, float scale, struct noise_row noise, int64_t count,
                      int8_t *out);
    /* Of one row times its x_scale: to the largest magnitudes so far of each column, and rounded
     * under the scale of each column, of which `first` is the first one. */
    void (*absmax_columns)(const float *x, float x_scale, int64_t count, float *largest);
    void (*round_columns)(const float *x, float x_scale, const float *scale, struct noise_row noise,
                          uint32_t first, int64_t count, int8_t *out);
    /* 64 columns of four rows to a quad of an int8 panel; not 0 if there is -128. */
    int32_t (*interleave)(const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d,
                          uint8_t *out);
    /* A block of so many times four rows of a ternary panel to its part of as many quads. */
    void (*turn_block)(const uint8_t *from, int64_t count, uint8_t *to);
    void (*ternarize)(const float *weight, float scale, int64_t count, int8_t *codes);
    /* Codes -1, 0, 1 of whole blocks of one row to the words of a ternary panel. */
    void (*pack_words)(const int8_t *codes, int64_t blocks, uint32_t *words);
    /* Codes 0, 1, 2 to -1, 0, 1. */
    void (*widen_int8)(const uint8_t *codes, int64_t count, int8_t *out);
    void (*widen_float32)(const uint8_t *codes, int64_t count, float *out);
    void (*widen_bfloat16)(const uint8_t *codes, int64_t count, uint16_t *out);
    /* All bits of all words, so that each of them must be read. */
    uint64_t (*read)(const uint64_t *words, int64_t count);
};

/* Floating-point microkernels, written once in float_tiles.h. What they give for a row does not
 * depend on the other rows. */
struct float_kernels {
    int row_tile; /* rows that outer_tile takes at most */
    int dot_rows; /* and dot_tile */

    /* c[r][i] += sum over k, in order, of a[r][k] * b[k][i], for some words of i: `b` has a pointer
     * to each of them, where the next k is b_stride further on. */
    void (*outer_tile)(int rows, int64_t words, const float *a, int64_t a_stride,
                       const float *const *b, int64_t b_stride, int64_t count, float *c,
                       int64_t c_stride);
    /* Scores to weights e^(score * scale - largest), and their sum. Writes up to a whole word. */
    float (*softmax_row)(float *row, int64_t count, float scale, float *largest);
    /* out[r][i] = x[r] . w[i] for n rows of a weight [n, k] in float32 or bfloat16; rows of x are
     * filled up with zeros to whole words. */
    void (*dot_tile)(int rows, const float *x, int64_t x_stride, const void *weight, int type,
                     int64_t n, int64_t k, float *out, int64_t out_stride);
    /* Rows of any type, `from_stride` elements apart, to floats. */
    void (*widen_rows)(const void *from, int type, int64_t from_stride, int64_t rows, int64_t count,
                       float *out, int64_t out_stride);
    /* x / divisor to float32, bfloat16 or float16. */
    void (*narrow_row)(const float *x, float divisor, int64_t count, int type, void *out);
    void (*scale_row)(float *out, const float *factor, int64_t count);
};

struct isa {
    const char *name;
    struct microkernels micro;
    struct elementwise elementwise;
    struct float_kernels floats;
    /* out[r][i] = x[r] . w[i] for any number of rows of x [rows, k] and n of w [n, k], all in
     * bfloat16, in an order and with a rounding of its own. NULL where products are no quicker in
     * bfloat16 than in float32: floats.dot_tile then. */
    void (*bfloat16_product)(const uint16_t *x, const uint16_t *w, int64_t rows, int64_t n,
                             int64_t k, uint16_t *out, int64_t out_stride);
};

extern const struct isa isa_avx512bf16, isa_avx512vnni, isa_avxvnni, isa_avx2, isa_neondot,
    isa_portable;

#endif
